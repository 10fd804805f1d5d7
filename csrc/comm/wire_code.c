/* wire_code.c - numbers in fewer bytes, to cross hosts: bfloat16, or int8 in blocks that share a scale. See
 * wire_sizes.h.
 *
 * A code depends on the numbers alone, and all machines agree on its bits (base/wire_block.h). Non-finite values stay
 * visible: with int8 their block decodes as NaN.
 *
 *   int8:  the scale of block 0 | of block 1 | ... | all numbers, a byte each; the last block may be shorter
 *
 * It works on one block at a time, through a copy that stays in the cache: sums, code and residual are then loops
 * without branches, which compilers vectorize. */
#include "comm/wire_sizes.h"

#include "base/half.h"

#include <string.h>

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

static uint32_t largest_magnitude(const float *values, int n)
{
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits = zs_wire_magnitude(values[i]);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

static void encode_int8(const float *values, int n, void *scale_at, int8_t *levels)
{
    float scale = zs_wire_scale(largest_magnitude(values, n));
    memcpy(scale_at, &scale, sizeof scale);
    if (!(scale > 0)) {
        memset(levels, 0, (size_t)n);
        return;
    }
    for (int i = 0; i < n; i++)
        levels[i] = zs_wire_level(values[i], scale);
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
        for (int i = 0; i < n; i++)
            lost[i] = zs_wire_lost(sums[i], decoded[i]);
    }
}

void zs_wire_decode(zs_wire wire, const void *code, int64_t numel, float *out)
{
    coder it = {wire, numel, code};
    for (int64_t block = 0; block < blocks_of(numel); block++)
        decode_block(&it, block, length_of(numel, block), out + block * ZS_WIRE_BLOCK);
}
