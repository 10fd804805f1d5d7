/* wire.h - codes of numbers that cross hosts. Compiled by gcc and by nvcc. */
#ifndef ZS_WIRE_H
#define ZS_WIRE_H

#include "base/half.h"

typedef enum zs_wire {
    ZS_WIRE_EXACT, /* as they are */
    ZS_WIRE_BF16,
} zs_wire;

/* Codes value + *lost, and sets *lost to the code's error; to 0 if that is not finite, as it would stay forever. */
ZS_HD zs_bf16 zs_wire_encode(float value, float *lost)
{
    const float sum = value + *lost;
    const zs_bf16 code = zs_to_bf16(sum);
    const uint32_t bits = zs_float_bits(sum - zs_from_bf16(code));
    *lost = zs_bits_float(zs_choose((bits & 0x7fffffffu) >= 0x7f800000u, 0, bits));
    return code;
}

#endif
