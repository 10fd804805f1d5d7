/* compact.h - one optimizer step of a group of 32 elements whose parameter or state has a special width: moments in 8
 * bits, moments in float32 of a bfloat16 parameter, a parameter in bfloat16 and 8 bits. Compiled by gcc and by nvcc.
 *
 * The codes of a group share a scale, so a group is decoded, updated and encoded again as a whole: by one thread of a
 * CPU, or by a warp of a GPU, whose lanes have an element each. Products are rounded before they are added, also where
 * the machine could fuse them: the bits are the same everywhere.
 */
#ifndef ZS_COMPACT_H
#define ZS_COMPACT_H

#include "base/dither.h"
#include "update/codes.h"
#include "update/update.h"

/* A parameter's storage. */
enum { ZS_IN_F32, ZS_IN_BF16, ZS_IN_BF16_LOW };

/* A group's place, and the inputs of its rounding. All pointers are borrowed. */
typedef struct zs_group {
    void *param;
    const void *grad;
    int8_t *low;            /* ZS_IN_BF16_LOW only */
    void *first, *second;   /* codes or floats */
    uint8_t *scales[2];     /* with codes: of first and second */
    uint64_t number, round; /* of the first element; of the step: as in zs_hyper */
    float factor;           /* of the gradient */
} zs_group;

/* NULL stays NULL. */
ZS_HD void *zs_group_offset(void *from, int64_t bytes)
{
    return from == NULL ? NULL : (char *)from + bytes;
}

/* The group that lies `at` elements behind `first`, a multiple of ZS_GROUP. */
ZS_HD zs_group zs_group_at(const zs_group *first, int64_t at, int kind, bool coded)
{
    const int64_t item = kind == ZS_IN_F32 ? 4 : 2, of_state = coded ? 1 : 4;
    zs_group group = *first;
    group.param = (char *)first->param + item * at;
    group.grad = (const char *)first->grad + item * at;
    group.low = (int8_t *)zs_group_offset(first->low, at);
    group.first = zs_group_offset(first->first, of_state * at);
    group.second = zs_group_offset(first->second, of_state * at);
    for (int i = 0; i < 2; i++)
        group.scales[i] = (uint8_t *)zs_group_offset(first->scales[i], at / ZS_GROUP);
    group.number += (uint64_t)at;
    return group;
}

/* ZS_EACH(j, n) runs the next statement for each of this thread's elements. Their values are in an array of ZS_GROUP /
 * ZS_LANES, where element j is at ZS_AT(j). */
#if defined(ZS_WARPS)         /* cuda/compact.cuh */
enum { ZS_LANES = ZS_GROUP }; /* threads that do a group together */
#define ZS_LANE ((int)(threadIdx.x % ZS_GROUP))
#define ZS_EACH(j, n) for (int j = ZS_LANE; j < (n); j += ZS_LANES)
#define ZS_AT(j) 0
#define ZS_MAX_OF_LANES(bits) __reduce_max_sync(0xffffffffu, bits)
#define ZS_OF_GROUP __device__ __forceinline__ static
#else /* gcc: vectorise, loads and stores do not overlap */
enum { ZS_LANES = 1 };
#define ZS_LANE 0
#define ZS_EACH(j, n) ZS_NO_OVERLAP for (int j = 0; j < (n); j++)
#define ZS_AT(j) (j)
#define ZS_MAX_OF_LANES(bits) (bits)
#define ZS_OF_GROUP ZS_HD
#endif

/* Element j of a group's parameter. */
ZS_HD float zs_group_load(const zs_group *at, int kind, int j)
{
    if (kind == ZS_IN_F32) return ((const float *)at->param)[j];
    zs_split split = {((const zs_bf16 *)at->param)[j], 0};
    if (kind == ZS_IN_BF16) return zs_from_bf16(split.high);
    split.low = at->low[j];
    return zs_joined(split);
}

/* And of its gradient. */
ZS_HD float zs_group_grad(const zs_group *at, int kind, int j)
{
    if (kind == ZS_IN_F32) return ((const float *)at->grad)[j] * at->factor;
    return zs_from_bf16(((const zs_bf16 *)at->grad)[j]); /* nothing is pending */
}

/* Writes an element of the parameter, rounded by `offset` if it is not float32. */
ZS_HD void zs_group_store(const zs_group *at, int kind, int j, float value, uint32_t offset)
{
    if (kind == ZS_IN_F32) {
        ((float *)at->param)[j] = value;
    } else if (kind == ZS_IN_BF16) {
        ((zs_bf16 *)at->param)[j] = zs_to_bf16_dithered(value, offset & 0xffffu);
    } else {
        const zs_split split = zs_split_of(value, offset);
        ((zs_bf16 *)at->param)[j] = split.high;
        at->low[j] = split.low;
    }
}

/* `most` or the bits of the magnitude of `value`, whichever is larger. (A NaN's are.) */
ZS_HD uint32_t zs_larger(uint32_t most, float value)
{
    const uint32_t bits = zs_float_bits(value) & 0x7fffffffu;
    return bits > most ? bits : most;
}

/* Writes codes and exponent of the first moments. */
ZS_OF_GROUP void zs_group_encode_first(int8_t *__restrict__ codes, uint8_t *exponent, const float *values, int n,
                                       uint32_t largest, uint32_t offset)
{
    const uint32_t found = zs_group_exponent(largest);
    const float scale = zs_scale_in(found, ZS_FIRST_FILL);
    if (ZS_LANE == 0) *exponent = (uint8_t)found;
    ZS_EACH(j, n) codes[j] = zs_encode_first(values[ZS_AT(j)], scale, offset + (uint32_t)j * ZS_STEP_FIRST);
}

/* The same for the second moments. */
ZS_OF_GROUP void zs_group_encode_second(uint8_t *__restrict__ codes, uint8_t *exponent, const float *values, int n,
                                        uint32_t largest, uint32_t offset)
{
    const uint32_t found = zs_group_exponent(largest);
    const float scale = zs_scale_in(found, ZS_SECOND_FILL);
    if (ZS_LANE == 0) *exponent = (uint8_t)found;
    ZS_EACH(j, n) codes[j] = zs_encode_second(values[ZS_AT(j)], scale, offset + (uint32_t)j * ZS_STEP_SECOND);
}

/* Adam and AdamW of `n` elements, at most a group, with constants from zs_adam_folded_f32. `kind`, `coded` and, for
 * whole groups, `n` are compile-time constants of the caller. */
ZS_OF_GROUP void zs_group_adam(const zs_group *at, const zs_adam_f32 *k, int n, int kind, bool coded)
{
    const zs_offsets offsets = zs_offsets_at(at->number, at->round);
    const float scale1 = coded ? zs_scale_out(*at->scales[0], ZS_FIRST_FILL) : 0;
    const float scale2 = coded ? zs_scale_out(*at->scales[1], ZS_SECOND_FILL) : 0;
    int8_t *codes1 = (int8_t *)at->first;
    uint8_t *codes2 = (uint8_t *)at->second;
    float *floats1 = (float *)at->first, *floats2 = (float *)at->second;
    float first[ZS_GROUP / ZS_LANES], second[ZS_GROUP / ZS_LANES];
    uint32_t most1 = 0, most2 = 0;
    ZS_EACH(j, n)
    {
        zs_adam_cell_f32 cell = {zs_group_load(at, kind, j), coded ? zs_decode_first(codes1[j], scale1) : floats1[j],
                                 coded ? zs_decode_second(codes2[j], scale2) : floats2[j], 0};
        zs_adam_step_f32(k, &cell, zs_group_grad(at, kind, j), false, false, true);
        first[ZS_AT(j)] = cell.exp_avg;
        second[ZS_AT(j)] = cell.exp_avg_sq;
        most1 = zs_larger(most1, cell.exp_avg);
        most2 = zs_larger(most2, cell.exp_avg_sq);
        zs_group_store(at, kind, j, cell.param, offsets.param + (uint32_t)j * ZS_STEP_PARAM);
    }
    if (coded) {
        zs_group_encode_first(codes1, at->scales[0], first, n, ZS_MAX_OF_LANES(most1), offsets.first);
        zs_group_encode_second(codes2, at->scales[1], second, n, ZS_MAX_OF_LANES(most2), offsets.second);
    } else {
        ZS_EACH(j, n)
        {
            floats1[j] = first[ZS_AT(j)];
            floats2[j] = second[ZS_AT(j)];
        }
    }
}

/* The same for SGD; `momentum`: it has any. */
ZS_OF_GROUP void zs_group_sgd(const zs_group *at, const zs_sgd_f32 *k, int n, int kind, bool momentum, bool coded)
{
    const zs_offsets offsets = zs_offsets_at(at->number, at->round);
    const float scale = coded ? zs_scale_out(*at->scales[0], ZS_FIRST_FILL) : 0;
    int8_t *codes = (int8_t *)at->first;
    float *floats = (float *)at->first, buffer[ZS_GROUP / ZS_LANES];
    uint32_t most = 0;
    ZS_EACH(j, n)
    {
        zs_sgd_cell_f32 cell = {zs_group_load(at, kind, j), 0};
        if (momentum) cell.buffer = coded ? zs_decode_first(codes[j], scale) : floats[j];
        zs_sgd_update_f32(k, &cell, zs_group_grad(at, kind, j), momentum, false);
        buffer[ZS_AT(j)] = cell.buffer;
        most = zs_larger(most, cell.buffer);
        zs_group_store(at, kind, j, cell.param, offsets.param + (uint32_t)j * ZS_STEP_PARAM);
    }
    if (coded) {
        zs_group_encode_first(codes, at->scales[0], buffer, n, ZS_MAX_OF_LANES(most), offsets.first);
    } else if (momentum) {
        ZS_EACH(j, n) floats[j] = buffer[ZS_AT(j)];
    }
}

#endif
