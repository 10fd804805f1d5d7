/* compact_lanes.h - AdamW's step of compact.h with 8-bit moments, in vectors of LANES elements. No include guard:
 * optim_lanes.c includes it for AVX2 and for AVX-512, with names by LANED(name).
 *
 * gcc makes vectors of the loops of compact.h too, but a group's exponents and scales then take as long as its
 * elements. Here a block of groups is stepped at a time, their exponents and scales are one vector (of the first
 * moments, then of the second), and codes are packed where they are 16 bits. The integer operations of one block run in
 * parallel with the divisions of the next. Operations on floats are compact.h's in its order: the bits are the same.
 */
#define VECTORS (ZS_GROUP / LANES) /* of a group */
#define GROUPS (LANES / 2)         /* of a block */
#define floats LANED(floats)
#define words LANED(words)
#define shorts LANED(shorts)

/* Constants of a step, a vector each. */
typedef struct LANED(constants) {
    floats factor, pull, sq_keep, sq_add, eps, neg_step, shrink;
} LANED(constants);

/* A block that is stepped, and not yet encoded. */
typedef struct LANED(block) {
    zs_group at;
    floats first[GROUPS][VECTORS], second[GROUPS][VECTORS];
    float scales[2 * GROUPS];
} LANED(block);

/* Elements of the parameter, from element j on. */
LANED_FN floats LANED(load_param)(const zs_group *at, int kind, int j)
{
    if (kind == ZS_IN_F32) return LANED(from_32)((const float *)at->param + j);
    const words high = LANED(from_16)((const zs_bf16 *)at->param + j) << 16;
    return (floats)(kind == ZS_IN_BF16 ? high : high + (LANED(from_i8)(at->low + j) << 8));
}

/* And of its gradient, without its factor. */
LANED_FN floats LANED(load_grad)(const zs_group *at, int kind, int j)
{
    if (kind == ZS_IN_F32) return LANED(from_32)((const float *)at->grad + j);
    return (floats)(LANED(from_16)((const zs_bf16 *)at->grad + j) << 16);
}

/* Writes a group of the parameter, from element j on. */
LANED_FN void LANED(store_param)(const zs_group *at, int kind, int j, floats *values, words offset)
{
    words upper[VECTORS], low[VECTORS];
    if (kind != ZS_IN_F32 && LANED(any_nan)(values)) {
        for (int v = 0; v < VECTORS; v++) {
            const words nan = (words)(values[v] != values[v]);
            values[v] = (floats)(((words)values[v] & ~nan) | (0x7fc00000u & nan));
        }
    }
    for (int v = 0; v < VECTORS; v++, offset += LANES * ZS_STEP_PARAM) {
        const words bits = (words)values[v];
        if (kind == ZS_IN_F32) {
            LANED(to_32)((float *)at->param + j + v * LANES, values[v]);
        } else if (kind == ZS_IN_BF16) {
            upper[v] = bits + (offset & 0xffffu);
        } else {
            low[v] = bits + (offset & 0xffu);
            upper[v] = low[v] + 0x8000u;
        }
    }
    shorts packed[VECTORS / 2];
    if (kind != ZS_IN_F32) {
        for (int h = 0; h < VECTORS / 2; h++)
            packed[h] = LANED(upper)(upper[2 * h], upper[2 * h + 1]);
        LANED(store_16)((zs_bf16 *)at->param + j, packed);
    }
    if (kind == ZS_IN_BF16_LOW) {
        for (int h = 0; h < VECTORS / 2; h++)
            packed[h] = LANED(lower)(low[2 * h], low[2 * h + 1]) >> 8;
        LANED(store_8)(at->low + j, packed);
    }
}

/* As zs_decode_first. */
LANED_FN floats LANED(decode_first)(const int8_t *codes, float scale)
{
    const words word = LANED(from_i8)(codes);
    const words sum = (word << ZS_FIRST_SHIFT & (0x7fu << ZS_FIRST_SHIFT)) | zs_float_bits(ZS_FIRST_FLOOR);
    const floats magnitude = ((floats)sum - ZS_FIRST_FLOOR) * scale;
    return (floats)((words)magnitude | (word & 0x80000000u));
}

/* As zs_decode_second. */
LANED_FN floats LANED(decode_second)(const uint8_t *codes, float scale)
{
    const words sum = LANED(from_u8)(codes) << ZS_SECOND_SHIFT | zs_float_bits(ZS_SECOND_FLOOR);
    return ((floats)sum - ZS_SECOND_FLOOR) * scale;
}

/* Writes the codes of group g's first moments; `offset`: of its lanes. */
LANED_FN void LANED(encode_first)(const LANED(block) * block, int g, words offset)
{
    const floats *values = block->first[g];
    words sums[VECTORS];
    shorts codes[VECTORS / 2];
    for (int v = 0; v < VECTORS; v++, offset += LANES * ZS_STEP_FIRST) {
        const floats magnitude = (floats)((words)values[v] & 0x7fffffffu);
        sums[v] = (words)(magnitude * block->scales[g] + ZS_FIRST_FLOOR) + (offset & ((1u << ZS_FIRST_SHIFT) - 1));
    }
    for (int h = 0; h < VECTORS / 2; h++) {
        const shorts code = LANED(upper)(sums[2 * h], sums[2 * h + 1]) << (24 - ZS_FIRST_SHIFT);
        const shorts sign = LANED(upper)((words)values[2 * h], (words)values[2 * h + 1]);
        codes[h] = ((code & 0x7fff) | (sign & 0x8000)) >> 8;
    }
    LANED(store_8)((int8_t *)block->at.first + g * ZS_GROUP, codes);
}

/* The same for the second moments. */
LANED_FN void LANED(encode_second)(const LANED(block) * block, int g, words offset)
{
    const uint16_t least = (uint16_t)(ZS_SECOND_LEAST >> 16);
    words sums[VECTORS];
    shorts codes[VECTORS / 2];
    for (int v = 0; v < VECTORS; v++, offset += LANES * ZS_STEP_SECOND) {
        const words noise = offset & ((1u << ZS_SECOND_SHIFT) - 1);
        sums[v] = (words)(block->second[g][v] * block->scales[GROUPS + g] + ZS_SECOND_FLOOR) + noise;
    }
    for (int h = 0; h < VECTORS / 2; h++) {
        const shorts code = LANED(upper)(sums[2 * h], sums[2 * h + 1]);
        codes[h] = LANED(max_short)(code, (shorts){0} + least) >> (ZS_SECOND_SHIFT - 16) & 0xff;
    }
    LANED(store_8)((uint8_t *)block->at.second + g * ZS_GROUP, codes);
}

/* Both. */
LANED_FN void LANED(encode)(const LANED(block) * block, int g)
{
    const zs_offsets from = zs_offsets_at(block->at.number + (uint64_t)g * ZS_GROUP, block->at.round);
    LANED(encode_first)(block, g, LANED(counted)() * ZS_STEP_FIRST + from.first);
    LANED(encode_second)(block, g, LANED(counted)() * ZS_STEP_SECOND + from.second);
}

/* Reads the exponents of a block to their zs_scale_out. */
LANED_FN void LANED(scales_out)(const zs_group *at, float *scales)
{
    uint8_t kept[2 * GROUPS];
    memcpy(kept, at->scales[0], GROUPS);
    memcpy(kept + GROUPS, at->scales[1], GROUPS);
    const words exponent = LANED(from_u8)(kept), power = LANED(max)(exponent, (words){0} + 1) << 23;
    const words is_none = (words)(exponent == ZS_NO_EXPONENT);
    const floats out = (floats)((power & ~is_none) | (0x7fc00000u & is_none));
    const floats scaled = out * LANED(halves)(1 / ZS_FIRST_FILL, 1 / ZS_SECOND_FILL);
    memcpy(scales, &scaled, sizeof scaled);
}

/* Writes the exponents of a block, whose groups' largest magnitudes are `largest`, and their zs_scale_in. */
LANED_FN void LANED(scales_in)(const zs_group *at, words largest, float *scales)
{
    const words normal = LANED(max)(largest >> 23, (words){0} + 1);
    const words is_none = (words)(normal > ZS_LAST_EXPONENT), exponent = normal | (is_none & ZS_NO_EXPONENT);
    const floats in = (floats)(((254 - exponent) << 23) & ~is_none);
    const floats scaled = in * LANED(halves)(ZS_FIRST_FILL, ZS_SECOND_FILL);
    memcpy(scales, &scaled, sizeof scaled);
    uint8_t kept[ZS_GROUP];
    const shorts packed[2] = {LANED(lower)(exponent, exponent) & 0xff};
    LANED(store_8)(kept, packed);
    memcpy(at->scales[0], kept, GROUPS);
    memcpy(at->scales[1], kept + GROUPS, GROUPS);
}

/* Prefetches the memory ZS_AHEAD elements behind group g. */
LANED_FN void LANED(prefetch)(const zs_group *at, int kind, int g)
{
    const int item = kind == ZS_IN_F32 ? 4 : 2, j = g * ZS_GROUP + ZS_AHEAD;
    for (int byte = 0; byte < ZS_GROUP * item; byte += 64) {
        __builtin_prefetch((const char *)at->grad + j * item + byte);
        __builtin_prefetch((const char *)at->param + j * item + byte, 1);
    }
    if (g % 2 != 0) return; /* two groups of codes are 64 bytes */
    if (kind == ZS_IN_BF16_LOW) __builtin_prefetch(at->low + j, 1);
    __builtin_prefetch((const char *)at->first + j, 1);
    __builtin_prefetch((const char *)at->second + j, 1);
}

/* Steps the block `at`, all but its codes, and encodes the block before it, if `encode`. */
LANED_FN void LANED(step_block)(LANED(block) * block, const zs_group *at, const LANED(constants) * k, int kind,
                                bool encode)
{
    words largest[2 * GROUPS], offset = LANED(counted)() * ZS_STEP_PARAM + zs_offsets_at(at->number, at->round).param;
    float scales[2 * GROUPS];
    LANED(scales_out)(at, scales);
    for (int g = 0; g < GROUPS; g++, offset += ZS_GROUP * ZS_STEP_PARAM) {
        floats params[VECTORS], *first = block->first[g], *second = block->second[g];
        words most1 = {0}, most2 = {0};
        if (encode) LANED(encode)(block, g);
        LANED(prefetch)(at, kind, g);
        for (int v = 0; v < VECTORS; v++) { /* as zs_adam_step_f32 */
            const int j = g * ZS_GROUP + v * LANES;
            const floats grad = LANED(load_grad)(at, kind, j) * k->factor;
            const floats last1 = LANED(decode_first)((const int8_t *)at->first + j, scales[g]);
            const floats last2 = LANED(decode_second)((const uint8_t *)at->second + j, scales[GROUPS + g]);
            first[v] = k->pull * (grad - last1) + last1;
            second[v] = k->sq_add * grad * grad + last2 * k->sq_keep;
            const floats change = k->neg_step * first[v] / (LANED(sqrt)(second[v]) + k->eps);
            params[v] = LANED(load_param)(at, kind, j) * k->shrink + change;
            most1 = LANED(max)(most1, (words)first[v] & 0x7fffffffu);
            most2 = LANED(max)(most2, (words)second[v]); /* has a sign only if it is NaN */
        }
        LANED(store_param)(at, kind, g * ZS_GROUP, params, offset);
        largest[g] = most1;
        largest[GROUPS + g] = most2;
    }
    block->at = *at;
    LANED(scales_in)(at, LANED(largest)(largest), block->scales);
}

/* Steps the blocks of [begin, end); returns where the last one ends. */
LANED_FN int64_t LANED(blocks)(const zs_run *run, int64_t begin, int64_t end, int kind)
{
    const int64_t size = GROUPS * ZS_GROUP;
    const zs_group first = zs_run_group(run);
    const zs_adam_f32 k = zs_adam_folded_f32(run->constants->adam_f32);
    if (k.l2 != 0 || k.from_grad != 0 || end - begin < size) return begin; /* rare, and left to compact.h */
    const floats zero = {0};
    const LANED(constants) each = {zero + k.sign * first.factor,
                                   zero + k.pull,
                                   zero + k.sq_keep,
                                   zero + k.sq_add,
                                   zero + k.eps,
                                   zero + k.neg_step,
                                   zero + k.shrink};
    LANED(block) block;
    zs_group at = zs_group_at(&first, begin, kind, true);
    LANED(step_block)(&block, &at, &each, kind, false);
    for (begin += size; end - begin >= size; begin += size) {
        at = zs_group_at(&at, size, kind, true);
        LANED(step_block)(&block, &at, &each, kind, true);
    }
    for (int g = 0; g < GROUPS; g++)
        LANED(encode)(&block, g);
    return begin;
}

#undef VECTORS
#undef GROUPS
#undef LANES
#undef LANED
#undef LANED_FN
#undef floats
#undef words
#undef shorts
