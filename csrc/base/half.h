/* half.h - bfloat16 and float16 from and to float, in integer arithmetic that compilers vectorise.
 *
 * No branches and no float16 instructions, so that gcc (for any instruction set) and nvcc turn the same
 * lines into the same bits. Rounding is to nearest, ties to even; NaN stays NaN, and overflow becomes infinity.
 */
#ifndef ZS_HALF_H
#define ZS_HALF_H

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define ZS_HD __host__ __device__ __forceinline__ static
#else
#define ZS_HD static inline __attribute__((always_inline))
#endif

/* Before a loop whose stores change nothing that it loads: gcc takes our word, clang checks when the loop runs. */
#if defined(__clang__)
#define ZS_NO_OVERLAP
#else
#define ZS_NO_OVERLAP _Pragma("GCC ivdep")
#endif

typedef uint16_t zs_bf16; /* the upper half of a float */
typedef uint16_t zs_f16;  /* IEEE binary16 */

/* The bits of a float. */
ZS_HD uint32_t zs_float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The float of these bits. */
ZS_HD float zs_bits_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* a if `which`, else b; in bits, because gcc makes branches of nested ?: and then does not vectorise. */
ZS_HD uint32_t zs_choose(int which, uint32_t a, uint32_t b)
{
    return b ^ ((a ^ b) & (0u - (uint32_t)which));
}

/* Exact. */
ZS_HD float zs_from_bf16(zs_bf16 half)
{
    return zs_bits_float((uint32_t)half << 16);
}

/* Rounds; NaN becomes the quiet NaN 0x7fc0, as in torch. */
ZS_HD zs_bf16 zs_to_bf16(float value)
{
    uint32_t bits = zs_float_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (zs_bf16)zs_choose((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc0u, rounded);
}

/* Exact. */
ZS_HD float zs_from_f16(zs_f16 half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t rest = half & 0x7fffu;
    uint32_t normal = (rest << 13) + (112u << 23); /* exponent bias 15 -> 127 */
    uint32_t special = (rest << 13) | 0x7f800000u;
    uint32_t tiny = zs_float_bits((float)(int32_t)rest * 0x1p-24f); /* subnormals count in units of 2^-24 */
    uint32_t finite = zs_choose(rest < 0x0400u, tiny, normal);
    return zs_bits_float(zs_choose(rest >= 0x7c00u, special, finite) | sign);
}

/* Rounds; NaN stays NaN (quiet), 65520 and more becomes infinity. */
ZS_HD zs_f16 zs_to_f16(float value)
{
    uint32_t bits = zs_float_bits(value);
    uint32_t rest = bits & 0x7fffffffu;
    uint32_t normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    /* Below 2^-14: 0.5 has a unit in the last place of 2^-24, so the adder rounds the subnormal for us. */
    uint32_t tiny = zs_float_bits(zs_bits_float(rest) + 0.5f) - zs_float_bits(0.5f);
    uint32_t special = zs_choose(rest > 0x7f800000u, 0x7e00u, 0x7c00u);
    uint32_t finite = zs_choose(rest < 0x38800000u, tiny, normal);
    uint32_t half = zs_choose(rest >= 0x477ff000u, special, finite);
    return (zs_f16)(half | ((bits >> 16) & 0x8000u));
}

#endif
