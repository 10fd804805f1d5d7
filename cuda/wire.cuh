/* wire.cuh - numbers to wire codes and back (comm/wire_code.c), a warp for each block of 256.
 *
 * The arithmetic is the CPU's, from the same header. A lane has every 32nd number of its block, so a warp's accesses
 * are to neighbouring bytes; for the scale, lanes ask for the block's largest magnitude.
 */
#include "kernel.cuh"

#include "base/wire_block.h"

namespace zs {

/* The block of a warp. */
template <class D> struct WireBlock {
    static constexpr int LANES = ZS_CUDA_LANES, EACH = ZS_WIRE_BLOCK / LANES;
    const zs_cuda_code_args &args;
    int64_t part, block;
    int lane, n; // this lane; numbers in the block

    ZS_DEVICE explicit WireBlock(const zs_cuda_code_args &its_args, int64_t warp)
        : args(its_args), part(warp / its_args.blocks), block(warp % its_args.blocks),
          lane(static_cast<int>(threadIdx.x % LANES))
    {
        const int64_t left = args.numel - block * ZS_WIRE_BLOCK;
        n = left < ZS_WIRE_BLOCK ? static_cast<int>(left) : ZS_WIRE_BLOCK;
    }

    ZS_DEVICE typename D::Word *values() const
    {
        char *of_part = static_cast<char *>(args.values) + part * args.value_stride;
        return reinterpret_cast<typename D::Word *>(of_part) + block * ZS_WIRE_BLOCK;
    }

    ZS_DEVICE float *residual() const
    {
        return args.residual == nullptr ? nullptr : args.residual + part * args.numel + block * ZS_WIRE_BLOCK;
    }

    ZS_DEVICE char *code() const { return static_cast<char *>(args.codes) + part * args.code_stride; }
    ZS_DEVICE zs_bf16 *halves() const { return reinterpret_cast<zs_bf16 *>(code()) + block * ZS_WIRE_BLOCK; }
    ZS_DEVICE float *scale() const { return reinterpret_cast<float *>(code()) + block; }
    ZS_DEVICE int8_t *levels() const
    {
        return reinterpret_cast<int8_t *>(code() + args.blocks * 4) + block * ZS_WIRE_BLOCK;
    }

    /* Calls each(i, j) for number i of the block, the j-th of this lane. */
    template <class Each> ZS_DEVICE void over(const Each &each) const
    {
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (j * LANES + lane < n) each(j * LANES + lane, j);
    }

    /* The numbers of this lane, with what was lost before; 0 beyond the end. */
    ZS_DEVICE void read(float *sums) const
    {
        const typename D::Word *from = values();
        const float *lost = residual();
#pragma unroll
        for (int j = 0; j < EACH; j++)
            sums[j] = 0;
        over([&](int i, int j) {
            const float value = D::load(from[i]);
            sums[j] = lost != nullptr ? value + lost[i] : value;
        });
    }

    ZS_DEVICE void encode_int8(const float *sums) const
    {
        uint32_t largest = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            largest = zs_wire_magnitude(sums[j]) > largest ? zs_wire_magnitude(sums[j]) : largest;
        const float its_scale = zs_wire_scale(__reduce_max_sync(0xffffffffu, largest));
        float *lost = residual();
        int8_t *to = levels();
        if (lane == 0) *scale() = its_scale;
        over([&](int i, int j) {
            const int8_t level = its_scale > 0 ? zs_wire_level(sums[j], its_scale) : static_cast<int8_t>(0);
            to[i] = level;
            if (lost != nullptr) lost[i] = zs_wire_lost(sums[j], static_cast<float>(level) * its_scale);
        });
    }

    ZS_DEVICE void encode_bf16(const float *sums) const
    {
        float *lost = residual();
        zs_bf16 *to = halves();
        over([&](int i, int j) {
            to[i] = zs_to_bf16(sums[j]);
            if (lost != nullptr) lost[i] = zs_wire_lost(sums[j], zs_from_bf16(to[i]));
        });
    }

    ZS_DEVICE void decode() const
    {
        typename D::Word *to = values();
        if (args.int8 != 0) {
            const float its_scale = *scale();
            const int8_t *from = levels();
            over([&](int i, int) { to[i] = D::store(static_cast<float>(from[i]) * its_scale); });
        } else {
            const zs_bf16 *from = halves();
            over([&](int i, int) { to[i] = D::store(zs_from_bf16(from[i])); });
        }
    }
};

/* This warp's number in the grid. */
ZS_DEVICE int64_t warp_number()
{
    return thread_number() / ZS_CUDA_LANES;
}

/* Encodes the block of this warp. */
template <class D> ZS_DEVICE void encode(const zs_cuda_code_args &args)
{
    if (warp_number() >= args.blocks * args.parts) return;
    const WireBlock<D> block(args, warp_number());
    float sums[WireBlock<D>::EACH];
    block.read(sums);
    args.int8 != 0 ? block.encode_int8(sums) : block.encode_bf16(sums);
}

/* Decodes it. */
template <class D> ZS_DEVICE void decode(const zs_cuda_code_args &args)
{
    if (warp_number() < args.blocks * args.parts) WireBlock<D>(args, warp_number()).decode();
}

} // namespace zs

#define CODER(d, D)                                            \
    ZS_KERNEL(zs_encode_##d, zs_cuda_code_args, zs::D::BLOCKS) \
    {                                                          \
        zs::encode<zs::D>(args);                               \
    }                                                          \
    ZS_KERNEL(zs_decode_##d, zs_cuda_code_args, zs::D::BLOCKS) \
    {                                                          \
        zs::decode<zs::D>(args);                               \
    }

CODER(f32, F32)
CODER(bf16, BF16)
CODER(f16, F16)

#undef CODER
