/* wire.cuh - numbers to wire codes, with the codes' errors so far; the arithmetic is the CPU's (base/wire.h). Codes to
 * numbers are casts.
 */
#include "kernel.cuh"

#include "base/wire.h"

namespace zs {

/* The codes of a pack. */
struct Encode {
    const zs_cuda_encode_args &args;

    template <int N> ZS_DEVICE void run(int64_t at) const
    {
        const Words<F32, N> values = load<F32, N, By::STREAM>(args.values, at);
        Words<F32, N> lost = load<F32, N, By::CACHE>(args.lost, at);
        Words<BF16, N> codes;
#pragma unroll
        for (int i = 0; i < N; i++)
            codes.at[i] = zs_wire_encode(values.at[i], &lost.at[i]);
        store<BF16, N, By::CACHE>(args.codes, at, codes);
        store<F32, N, By::STREAM>(args.lost, at, lost);
    }
};

} // namespace zs

/* Of all numbers. */
ZS_KERNEL(zs_encode, zs_cuda_encode_args, zs::F32::BLOCKS)
{
    zs::over<zs::pack_of<zs::F32>>(args.cut, zs::Encode{args});
}
