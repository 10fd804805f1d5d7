/* wire_block.h - the arithmetic of wire codes (comm/wire_code.c), for one number of a block. Compiled by gcc and
 * by nvcc.
 *
 * Integer arithmetic and single roundings (to nearest, ties to even), so all machines agree on the bits.
 */
#ifndef ZS_WIRE_BLOCK_H
#define ZS_WIRE_BLOCK_H

#include "base/half.h"

enum { ZS_WIRE_BLOCK = 256, ZS_WIRE_LEVELS = 127 }; /* numbers that share a scale; levels on either side of 0 */

enum { ZS_WIRE_NOT_FINITE = 0x7f800000 }; /* from these bits of a magnitude on it is infinity or NaN */

/* The bits of a magnitude, ordered like integers, with infinity and NaN on top. */
ZS_HD uint32_t zs_wire_magnitude(float value)
{
    return zs_float_bits(value) & 0x7fffffffu;
}

/* The scale of a block whose largest magnitude has these bits. NaN: not all are finite. 0: all are 0, or too small for
 * a scale. */
ZS_HD float zs_wire_scale(uint32_t largest)
{
    if (largest >= ZS_WIRE_NOT_FINITE) return zs_bits_float(0x7fc00000u);
    float scale = zs_bits_float(largest) / (float)ZS_WIRE_LEVELS;
    /* rounded up: a finite value would decode as infinity */
    if (zs_float_bits(scale * (float)ZS_WIRE_LEVELS) >= ZS_WIRE_NOT_FINITE)
        scale = zs_bits_float(zs_float_bits(scale) - 1);
    return scale;
}

/* The level nearest to a value; `scale` > 0. The adder rounds, as the unit in the last place of 1.5 * 2^23 is 1.
 * Halfway through subnormals a quotient may exceed the levels. */
ZS_HD int8_t zs_wire_level(float value, float scale)
{
    float quotient = value / scale;
    quotient = quotient > (float)ZS_WIRE_LEVELS ? (float)ZS_WIRE_LEVELS : quotient;
    quotient = quotient < -(float)ZS_WIRE_LEVELS ? -(float)ZS_WIRE_LEVELS : quotient;
    const float shifted = quotient + 12582912.0F;
    return (int8_t)(shifted - 12582912.0F);
}

/* What a code has lost of `value`; 0 if that is not finite, as it would stay forever. */
ZS_HD float zs_wire_lost(float value, float decoded)
{
    const uint32_t lost = zs_float_bits(value - decoded);
    return zs_bits_float(zs_choose((lost & 0x7fffffffu) >= ZS_WIRE_NOT_FINITE, 0, lost));
}

#endif
