/* sum.cuh - sums over ranks, from any dtype to any: bit-identical to the CPU's zs_device_sum.
 *
 * A thread reads the same pack of four sources before it adds any, so that enough loads are under way, and
 * adds them in rank order, so that every run and every transport gives the same bits.
 */
#include "kernel.cuh"

namespace zs {

/* The sum of all sources. */
template <class From, class To> struct Sum {
    using Real = Wider<From, To>;
    static constexpr int TOGETHER = 4; // sources whose loads are under way at a time
    const zs_cuda_sum_args &args;

    ZS_DEVICE const void *place(int r) const
    {
        if (args.base == nullptr) return args.src[r];
        if ((args.absent[r / 64] >> (r % 64) & 1) != 0) return nullptr;
        return static_cast<const char *>(args.base) + r * args.stride;
    }

    template <int N> ZS_DEVICE Words<From, N> source(int r, int64_t at) const
    {
        const void *from = place(r);
        return from != nullptr ? load<From, N, By::PEER>(from, at) : Words<From, N>{};
    }

    template <int N> ZS_DEVICE void run(int64_t at) const
    {
        const Real scale = static_cast<Real>(args.scale);
        Real total[N], before[N];
        Words<To, N> out;
        if (args.accumulate) out = load<To, N, By::CACHE>(args.dst, at);
#pragma unroll
        for (int i = 0; i < N; i++) { // -0 is what adding does not change
            total[i] = -static_cast<Real>(0);
            before[i] = args.accumulate ? static_cast<Real>(To::load(out.at[i])) : -static_cast<Real>(0);
        }
        for (int r = 0; r < args.world; r += TOGETHER) {
            Words<From, N> in[TOGETHER];
#pragma unroll
            for (int s = 0; s < TOGETHER; s++)
                if (r + s < args.world) in[s] = source<N>(r + s, at);
#pragma unroll
            for (int s = 0; s < TOGETHER; s++)
                if (r + s < args.world)
#pragma unroll
                    for (int i = 0; i < N; i++)
                        total[i] += (static_cast<Real>(From::load(in[s].at[i])) + before[i]) * scale;
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            out.at[i] = To::store(total[i]);
        store<To, N, By::CACHE>(args.dst, at, out);
    }
};

} // namespace zs

#define SUM(from, From, to, To)                                                             \
    ZS_KERNEL(zs_sum_##from##_##to, zs_cuda_sum_args, (zs::blocks_of<zs::From, zs::To>()))  \
    {                                                                                       \
        zs::over<zs::pack_of<zs::From, zs::To>>(args.cut, zs::Sum<zs::From, zs::To>{args}); \
    }
#define SUM_TO(to, To)      \
    SUM(f32, F32, to, To)   \
    SUM(f64, F64, to, To)   \
    SUM(bf16, BF16, to, To) \
    SUM(f16, F16, to, To)

SUM_TO(f32, F32)
SUM_TO(f64, F64)
SUM_TO(bf16, BF16)
SUM_TO(f16, F16)

#undef SUM
#undef SUM_TO
