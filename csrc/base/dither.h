/* dither.h - stochastic rounding to bfloat16: up or down at random, right on average.
 *
 * A bfloat16 has 8 significant bits. An update below half a unit in the last place is lost when it is rounded to
 * nearest, at every step; rounded at random, it moves the parameter once in a while, and by the right amount on
 * average.
 *
 * An element's random bits are a function of the seed, the step and the element's number in the model, not of which
 * thread computes it, or when. So the bits are the same for any number of ranks, strategy, thread count and vector
 * width. Plain 32-bit integer arithmetic, compiled by gcc and by nvcc.
 */
#ifndef ZS_DITHER_H
#define ZS_DITHER_H

#include "base/half.h"

/* The random state shared by elements of one step whose numbers have the same upper half. */
typedef struct zs_dither {
    uint32_t key[3];
} zs_dither;

/* Random bits of one element, 16 for each value that is stored of it. */
typedef struct zs_noise {
    uint32_t of[2];
} zs_noise;

/* Every output bit depends on every input bit. (The last stage of MurmurHash3, which is in the public domain.) */
ZS_HD uint32_t zs_mix32(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}

/* The same for 64 bits. */
ZS_HD uint64_t zs_mix64(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53u;
    return x ^ (x >> 33);
}

/* The keys of step `step` for elements whose numbers have the upper half `high`. */
ZS_HD zs_dither zs_dither_at(uint64_t seed, uint64_t step, uint32_t high)
{
    const uint64_t odd = 0x9e3779b97f4a7c15u; /* 2^64 over the golden ratio: keeps neighbours apart */
    uint64_t state = zs_mix64(zs_mix64(zs_mix64(seed + odd) + step + odd) + high + odd);
    uint64_t more = zs_mix64(state + odd);
    zs_dither dither = {{(uint32_t)state, (uint32_t)(state >> 32), (uint32_t)more}};
    return dither;
}

/* The bits of the element whose number has the lower half `low`. Two keyed rounds: with one, the bits of two steps
 * would be the same in another order. */
ZS_HD zs_noise zs_noise_of(const zs_dither *dither, uint32_t low)
{
    zs_noise noise;
    noise.of[0] = zs_mix32(zs_mix32(low ^ dither->key[0]) ^ dither->key[1]);
    noise.of[1] = zs_mix32(noise.of[0] ^ dither->key[2]);
    return noise;
}

/* Rounds to one of the two neighbours, away from zero with probability (`noise` uniform in [0, 65536)) of the part
 * that is cut off. Exact values and infinities stay, NaN becomes 0x7fc0. */
ZS_HD zs_bf16 zs_to_bf16_dithered(float value, uint32_t noise)
{
    uint32_t bits = zs_float_bits(value);
    return (zs_bf16)zs_choose((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc0u, (bits + noise) >> 16);
}

#endif
