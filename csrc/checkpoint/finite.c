/* finite.c - are all numbers in memory finite?
 *
 * In every format, a NaN or infinite number has all bits of its exponent set. So this only compares bits: no sum can
 * overflow, and no mode of the processor matters. See ckpt_file.h. */
#include "checkpoint/ckpt_file.h"

#include <stdint.h>
#include <string.h>

static const struct {
    const char *code;
    size_t size;
    uint64_t exponent; /* its bits */
} formats[] = {
    [ZS_NO_FLOATS] = {"", 1, 0},
    [ZS_BFLOAT16S] = {"BF16", 2, 0x7f80},
    [ZS_FLOAT16S] = {"F16", 2, 0x7c00},
    [ZS_FLOAT32S] = {"F32", 4, 0x7f800000},
    [ZS_FLOAT64S] = {"F64", 8, 0x7ff0000000000000},
};

zs_floats zs_floats_of(const char *code)
{
    for (zs_floats kind = ZS_BFLOAT16S; kind <= ZS_FLOAT64S; kind++)
        if (strcmp(formats[kind].code, code) == 0) return kind;
    return ZS_NO_FLOATS;
}

size_t zs_floats_size(zs_floats kind)
{
    return formats[kind].size;
}

/* Goes through all numbers even where the first is not finite, so that the compiler takes many at a time. */
#define DEFINE_FINITE(name, type)                                          \
    static bool name(const unsigned char *at, size_t bytes, type exponent) \
    {                                                                      \
        type strange = 0;                                                  \
        for (size_t i = 0; i < bytes; i += sizeof(type)) {                 \
            type bits;                                                     \
            memcpy(&bits, at + i, sizeof bits);                            \
            strange |= (type)((bits & exponent) == exponent);              \
        }                                                                  \
        return strange == 0;                                               \
    }

DEFINE_FINITE(finite_16, uint16_t)
DEFINE_FINITE(finite_32, uint32_t)
DEFINE_FINITE(finite_64, uint64_t)

bool zs_all_finite(zs_floats kind, const void *data, size_t bytes)
{
    uint64_t exponent = formats[kind].exponent;
    switch (formats[kind].size) {
    case 2: return finite_16(data, bytes, (uint16_t)exponent);
    case 4: return finite_32(data, bytes, (uint32_t)exponent);
    case 8: return finite_64(data, bytes, exponent);
    default: return true;
    }
}
