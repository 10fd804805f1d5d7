/* codes.h - an optimizer's moments in 8 bits, and a float32 parameter as a bfloat16 and 8 bits more.
 *
 * A group is 32 elements of a parameter's flat index. It keeps the biased exponent of its largest magnitude, in a byte,
 * and each element a code. A code is the upper bits of a float: the scaled magnitude plus a floor. So codes are linear
 * below the floor and logarithmic above it, and neither direction needs a table, a division or a logarithm.
 *
 * A value between two codes is rounded to one of them by an offset that changes with the element and the step and is
 * right on average. Rounded to nearest, a second moment would never decay: one step takes a thousandth from it, two
 * codes are a twentieth apart.
 *
 * Only exact IEEE operations and integers: gcc for any instruction set and nvcc give the same bits. Flushing subnormals
 * to zero changes magnitudes below 2^-126 only.
 */
#ifndef ZS_CODES_H
#define ZS_CODES_H

#include "base/half.h"

enum { ZS_GROUP = 32 }; /* elements */

/* --- rounding ----------------------------------------------------------------------------------------------------- */

/* Rounding offsets of a group's first element; element j adds j steps. */
typedef struct zs_offsets {
    uint32_t first, second, param;
} zs_offsets;

/* An offset is the lower bits of a sum of steps, one for each element before and one for each round of the optimizer:
 * the recurrences R2 and R3, which fill the range evenly both over elements and over rounds. Odd, so that every value
 * occurs equally often. */
enum {
    ZS_STEP_FIRST = 197887,  /* 0.7549 of 2^18 */
    ZS_ROUND_FIRST = 149381, /* 0.5698 */
    ZS_STEP_SECOND = 298761, /* 0.5698 of 2^19 */
    ZS_ROUND_SECOND = 395773,
    ZS_STEP_PARAM = 53685,  /* 0.8192 of 2^16 */
    ZS_ROUND_PARAM = 43977, /* 0.6710 */
};

/* The offsets of the group whose first element has `number`, at step `round` of the optimizer. */
ZS_HD zs_offsets zs_offsets_at(uint64_t number, uint64_t round)
{
    const uint32_t n = (uint32_t)number, r = (uint32_t)round;
    zs_offsets at = {n * ZS_STEP_FIRST + r * ZS_ROUND_FIRST, n * ZS_STEP_SECOND + r * ZS_ROUND_SECOND,
                     n * ZS_STEP_PARAM + r * ZS_ROUND_PARAM};
    return at;
}

/* --- a group's scale ---------------------------------------------------------------------------------------------- */

/* Exponents beyond this one: the group has an element that is infinite, NaN or at least 2^124. It decodes to NaN. */
enum { ZS_LAST_EXPONENT = 250, ZS_NO_EXPONENT = 255 };

/* Largest scaled magnitude plus floor, just below 2: the largest code and its offset stay within the range. Below
 * the bits of a code, and in them, a floor has zeros only. */
#define ZS_FIRST_FLOOR 0x1p-3f
#define ZS_FIRST_FILL (1 - 0x1p-6f - ZS_FIRST_FLOOR / 2)
#define ZS_SECOND_FLOOR 0x1p-15f
#define ZS_SECOND_FILL (1 - 0x1p-5f - ZS_SECOND_FLOOR / 2)

enum {
    ZS_FIRST_SHIFT = 18,  /* 32 codes an octave, 4 octaves, and a sign */
    ZS_SECOND_SHIFT = 19, /* 16 codes an octave, 16 octaves */
};

/* The bits of the sum whose code is 1. */
#define ZS_SECOND_LEAST (zs_float_bits(ZS_SECOND_FLOOR) + (1u << ZS_SECOND_SHIFT))

/* The exponent to keep for a group whose largest magnitude has these bits. */
ZS_HD uint32_t zs_group_exponent(uint32_t largest)
{
    const uint32_t exponent = largest >> 23;
    const uint32_t normal = zs_choose(exponent < 1, 1, exponent);
    return zs_choose(exponent > ZS_LAST_EXPONENT, ZS_NO_EXPONENT, normal);
}

/* From magnitudes of a group to scaled ones, below 2 `fill`. */
ZS_HD float zs_scale_in(uint32_t exponent, float fill)
{
    return zs_bits_float(zs_choose(exponent == ZS_NO_EXPONENT, 0, (254 - exponent) << 23)) * fill;
}

/* And back; an exponent of 0, of new state, counts as 1. */
ZS_HD float zs_scale_out(uint32_t exponent, float fill)
{
    const uint32_t power = zs_choose(exponent == 0, 1, exponent) << 23;
    return zs_bits_float(zs_choose(exponent == ZS_NO_EXPONENT, 0x7fc00000u, power)) * (1 / fill);
}

/* --- first moments: a sign and 7 bits ----------------------------------------------------------------------------- */

/* `scale`: from zs_scale_in. */
ZS_HD int8_t zs_encode_first(float value, float scale, uint32_t offset)
{
    const uint32_t bits = zs_float_bits(value);
    const float sum = zs_bits_float(bits & 0x7fffffffu) * scale + ZS_FIRST_FLOOR;
    const uint32_t rounded = zs_float_bits(sum) + (offset & ((1u << ZS_FIRST_SHIFT) - 1));
    const uint32_t code = rounded << (24 - ZS_FIRST_SHIFT) & 0x7fffffffu;
    return (int8_t)(uint8_t)((code | (bits & 0x80000000u)) >> 24);
}

/* `scale`: from zs_scale_out. */
ZS_HD float zs_decode_first(int8_t code, float scale)
{
    const uint32_t word = (uint32_t)(int32_t)code;
    const uint32_t sum = (word & 0x7fu) << ZS_FIRST_SHIFT | zs_float_bits(ZS_FIRST_FLOOR);
    const float magnitude = (zs_bits_float(sum) - ZS_FIRST_FLOOR) * scale;
    return zs_bits_float(zs_float_bits(magnitude) | (word & 0x80000000u));
}

/* --- second moments: 8 bits --------------------------------------------------------------------------------------- */

/* As above, for values that are not negative. The least code is 1, about a millionth of the group's largest value: an
 * element's moment decays, but does not vanish before the next gradient is divided by its root. */
ZS_HD uint8_t zs_encode_second(float value, float scale, uint32_t offset)
{
    const float sum = value * scale + ZS_SECOND_FLOOR;
    const uint32_t rounded = zs_float_bits(sum) + (offset & ((1u << ZS_SECOND_SHIFT) - 1));
    return (uint8_t)((rounded > ZS_SECOND_LEAST ? rounded : ZS_SECOND_LEAST) >> ZS_SECOND_SHIFT);
}

/* `scale`: from zs_scale_out. */
ZS_HD float zs_decode_second(uint8_t code, float scale)
{
    const uint32_t sum = (uint32_t)code << ZS_SECOND_SHIFT | zs_float_bits(ZS_SECOND_FLOOR);
    return (zs_bits_float(sum) - ZS_SECOND_FLOOR) * scale;
}

/* --- a float32 parameter in 24 bits ------------------------------------------------------------------------------- */

/* Its upper 24 bits: the nearest bfloat16, and the difference from it, in 256ths of its last place. */
typedef struct zs_split {
    zs_bf16 high;
    int8_t low;
} zs_split;

/* The float of both. */
ZS_HD float zs_joined(zs_split value)
{
    return zs_bits_float(((uint32_t)value.high << 16) + ((uint32_t)(int32_t)value.low << 8));
}

/* The bits beyond 24 are rounded by `offset`. NaN becomes 0x7fc0. */
ZS_HD zs_split zs_split_of(float value, uint32_t offset)
{
    const uint32_t bits = zs_float_bits(value);
    const uint32_t given = zs_choose((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc00000u, bits);
    const uint32_t upper = (given + (offset & 0xffu)) >> 8, high = (upper + 0x80u) >> 8;
    zs_split split = {(zs_bf16)high, (int8_t)(uint8_t)(upper - (high << 8))};
    return split;
}

#endif
