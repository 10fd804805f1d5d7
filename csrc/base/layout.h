/* layout.h - the place of each parameter of a unit in its flat buffer, and the part of it that each rank owns.
 *
 * Parameters lie one after another, each from a 64-byte boundary on (the math libraries pick other kernels
 * for other alignments, and then give other bits), and the whole is padded so that it cuts into `world` equal shards.
 * Parameters and shards also begin at multiples of 32 elements, so that no group of 8-bit optimizer state
 * (update/codes.h) spans two ranks.
 * A rank's shard is then one contiguous range, and its part of each parameter a contiguous range of the parameter's
 * row-major elements. Pure arithmetic: no memory, no torch.
 */
#ifndef ZS_LAYOUT_H
#define ZS_LAYOUT_H

#include "base/status.h"

enum {
    ZS_PARAM_ALIGN = 64,  /* bytes */
    ZS_LAYOUT_GROUP = 32, /* elements; both are powers of two */
};

typedef struct zs_layout {
    int64_t n;           /* number of parameters */
    int64_t *offsets;    /* [n] first element of each, from the flat buffer's start; owned */
    int64_t *numels;     /* [n] elements of each; owned */
    int64_t shard_numel; /* elements per rank */
    size_t itemsize;     /* bytes per element */
    int world;
} zs_layout;

/* A contiguous range of elements. */
typedef struct zs_range {
    int64_t begin; /* first element */
    int64_t numel; /* may be 0 */
} zs_range;

/* Lays out `n` parameters of `numels` elements for `world` ranks; a shard's bytes are a multiple of `shard_align`
 * (a power of two, at least 64). ZS_ERR_VALUE on sizes that overflow. Free with zs_layout_free. */
zs_status zs_layout_new(const int64_t *numels, int64_t n, size_t itemsize, int world, size_t shard_align,
                        zs_layout *out);

/* Aligns a layout of small elements for larger ones as well. */
void zs_layout_widen(zs_layout *layout, size_t itemsize);

/* Elements of the full buffer. */
int64_t zs_layout_full_numel(const zs_layout *layout);

/* Frees what zs_layout_new made; a zeroed layout is allowed. */
void zs_layout_free(zs_layout *layout);

/* The elements of parameter `i` that `rank` owns, counted in the parameter. */
zs_range zs_layout_owned(const zs_layout *layout, int64_t i, int rank);

/* The same elements, counted in the shard of `rank`. */
zs_range zs_layout_in_shard(const zs_layout *layout, int64_t i, int rank);

/* Bytes of one shard. */
size_t zs_layout_shard_bytes(const zs_layout *layout);

/* Bytes of the full buffer. */
size_t zs_layout_full_bytes(const zs_layout *layout);

#endif
