/* wire_code.c - bfloat16 and int8 for the wire. See wire_code.h.
 *
 * It works on one block at a time, through a copy that stays in the cache: sums, code and residual are then loops
 * without branches, which compilers vectorize. */
#include "comm/hosts/wire_code.h"

#include "base/half.h"

#include <string.h>

static const float levels_a_side = 127;

static const uint32_t infinity_bits = 0x7f800000u, quiet_nan_bits = 0x7fc00000u;

static int64_t blocks_of(int64_t numel)
{
    return (numel + ZS_WIRE_BLOCK - 1) / ZS_WIRE_BLOCK;
}

size_t zs_wire_bytes(zs_wire wire, int64_t numel)
{
    if (wire == ZS_WIRE_EXACT) return (size_t)numel * sizeof(float);
    if (wire == ZS_WIRE_BF16) return (size_t)numel * sizeof(zs_bf16);
    return (size_t)blocks_of(numel) * sizeof(float) + (size_t)numel;
}

/* --- one block ---------------------------------------------------------------------------------------------------- */

/* As bits, magnitudes are ordered like integers, with infinity and NaN on top. */
static uint32_t largest_magnitude(const float *values, int n)
{
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits = zs_float_bits(values[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* NaN: not all are finite. 0: all are 0, or too small for a scale. */
static float scale_of(const float *values, int n)
{
    uint32_t largest = largest_magnitude(values, n);
    if (largest >= infinity_bits) return zs_bits_float(quiet_nan_bits);
    float scale = zs_bits_float(largest) / levels_a_side;
    if (zs_float_bits(scale * levels_a_side) >= infinity_bits) /* rounded up: a finite value would decode as infinity */
        scale = zs_bits_float(zs_float_bits(scale) - 1);
    return scale;
}

/* To nearest, ties to even: the adder rounds, as the unit in the last place of 1.5 * 2^23 is 1. Halfway through
 * subnormals a quotient may exceed levels_a_side. */
static int8_t level_of(float value, float scale)
{
    float quotient = value / scale;
    quotient = quotient > levels_a_side ? levels_a_side : quotient;
    quotient = quotient < -levels_a_side ? -levels_a_side : quotient;
    float shifted = quotient + 0x1.8p23f;
    return (int8_t)(shifted - 0x1.8p23f);
}

static void encode_int8(const float *values, int n, void *scale_at, int8_t *levels)
{
    float scale = scale_of(values, n);
    memcpy(scale_at, &scale, sizeof scale);
    if (!(scale > 0)) {
        memset(levels, 0, (size_t)n);
        return;
    }
    for (int i = 0; i < n; i++)
        levels[i] = level_of(values[i], scale);
}

static void decode_int8(const void *scale_at, const int8_t *levels, int n, float *out)
{
    float scale;
    memcpy(&scale, scale_at, sizeof scale);
    for (int i = 0; i < n; i++)
        out[i] = (float)levels[i] * scale;
}

static void encode_bf16(const float *values, int n, char *out)
{
    zs_bf16 codes[ZS_WIRE_BLOCK] = {0};
    for (int i = 0; i < n; i++)
        codes[i] = zs_to_bf16(values[i]);
    memcpy(out, codes, (size_t)n * sizeof *codes);
}

static void decode_bf16(const char *code, int n, float *out)
{
    zs_bf16 codes[ZS_WIRE_BLOCK];
    memcpy(codes, code, (size_t)n * sizeof *codes);
    for (int i = 0; i < n; i++)
        out[i] = zs_from_bf16(codes[i]);
}

/* --- all of them -------------------------------------------------------------------------------------------------- */

typedef struct coder {
    zs_wire wire;
    int64_t numel;
    const char *code;
} coder;

/* Offset of the numbers of a block; of its scale, see decode_block. */
static size_t offset_of(const coder *it, int64_t block)
{
    size_t before = (size_t)block * ZS_WIRE_BLOCK;
    if (it->wire == ZS_WIRE_BF16) return before * sizeof(zs_bf16);
    if (it->wire == ZS_WIRE_EXACT) return before * sizeof(float);
    return (size_t)blocks_of(it->numel) * sizeof(float) + before;
}

static int length_of(int64_t numel, int64_t block)
{
    int64_t left = numel - block * ZS_WIRE_BLOCK;
    return (int)(left < ZS_WIRE_BLOCK ? left : ZS_WIRE_BLOCK);
}

static void encode_block(const coder *it, int64_t block, const float *values, int n, char *out)
{
    char *at = out + offset_of(it, block);
    if (it->wire == ZS_WIRE_EXACT) memcpy(at, values, (size_t)n * sizeof *values);
    if (it->wire == ZS_WIRE_BF16) encode_bf16(values, n, at);
    if (it->wire == ZS_WIRE_INT8) encode_int8(values, n, out + (size_t)block * sizeof(float), (int8_t *)at);
}

static void decode_block(const coder *it, int64_t block, int n, float *out)
{
    const char *at = it->code + offset_of(it, block);
    if (it->wire == ZS_WIRE_EXACT)
        memcpy(out, at, (size_t)n * sizeof *out);
    else if (it->wire == ZS_WIRE_BF16)
        decode_bf16(at, n, out);
    else
        decode_int8(it->code + (size_t)block * sizeof(float), (const int8_t *)at, n, out);
}

/* What the code has lost of `sums`; 0 if that is not finite. */
static void keep_lost(const float *sums, const float *decoded, int n, float *residual)
{
    for (int i = 0; i < n; i++) {
        uint32_t lost = zs_float_bits(sums[i] - decoded[i]);
        residual[i] = zs_bits_float(zs_choose((lost & 0x7fffffffu) >= infinity_bits, 0, lost));
    }
}

void zs_wire_encode(zs_wire wire, const float *values, int64_t numel, float *residual, void *out)
{
    coder it = {wire, numel, out};
    for (int64_t block = 0; block < blocks_of(numel); block++) {
        float sums[ZS_WIRE_BLOCK] = {0}, decoded[ZS_WIRE_BLOCK] = {0};
        int n = length_of(numel, block);
        const float *from = values + block * ZS_WIRE_BLOCK;
        if (residual == NULL) {
            encode_block(&it, block, from, n, out);
            continue;
        }
        float *lost = residual + block * ZS_WIRE_BLOCK;
        for (int i = 0; i < n; i++)
            sums[i] = from[i] + lost[i];
        encode_block(&it, block, sums, n, out);
        decode_block(&it, block, n, decoded);
        keep_lost(sums, decoded, n, lost);
    }
}

void zs_wire_decode(zs_wire wire, const void *code, int64_t numel, float *out)
{
    coder it = {wire, numel, code};
    for (int64_t block = 0; block < blocks_of(numel); block++)
        decode_block(&it, block, length_of(numel, block), out + block * ZS_WIRE_BLOCK);
}
