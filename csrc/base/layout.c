/* layout.c - see layout.h. Overflow is checked here and nowhere else: later sums are of numbers that passed. */
#include "base/layout.h"

#include <stdlib.h>
#include <string.h>

static int64_t round_up(int64_t value, int64_t step)
{
    return (value + step - 1) / step * step;
}

static int64_t at_least(int64_t value, int64_t least)
{
    return value < least ? least : value;
}

static zs_status place(const int64_t *numels, int64_t step, zs_layout *layout, int64_t *end)
{
    const int64_t limit = INT64_MAX / 4 / (int64_t)layout->itemsize;
    int64_t next = 0;
    for (int64_t i = 0; i < layout->n; i++) {
        if (numels[i] < 0 || numels[i] > limit - next)
            return ZS_FAIL(ZS_ERR_VALUE, "a parameter of %lld elements makes its unit too large", (long long)numels[i]);
        layout->offsets[i] = next;
        layout->numels[i] = numels[i];
        next = round_up(next + numels[i], step);
    }
    *end = next;
    return ZS_OK;
}

zs_status zs_layout_new(const int64_t *numels, int64_t n, size_t itemsize, int world, size_t shard_align,
                        zs_layout *out)
{
    memset(out, 0, sizeof *out);
    if (world < 1 || n < 0 || itemsize == 0 || ZS_PARAM_ALIGN % itemsize != 0 || shard_align % ZS_PARAM_ALIGN != 0)
        return ZS_FAIL(ZS_ERR_VALUE, "cannot lay out elements of %zu bytes for world size %d", itemsize, world);
    size_t count = n > 0 ? (size_t)n : 1;
    out->offsets = calloc(count, sizeof *out->offsets);
    out->numels = calloc(count, sizeof *out->numels);
    if (out->offsets == NULL || out->numels == NULL) {
        zs_layout_free(out);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the layout of %lld parameters", (long long)n);
    }
    out->n = n;
    out->itemsize = itemsize;
    out->world = world;
    int64_t end = 0;
    const int64_t step = at_least(ZS_PARAM_ALIGN / (int64_t)itemsize, ZS_LAYOUT_GROUP);
    zs_status status = place(numels, step, out, &end);
    if (status != ZS_OK) {
        zs_layout_free(out);
        return status;
    }
    int64_t per_rank = (at_least(end, n > 0) + world - 1) / world; /* memory also for parameters of no element */
    out->shard_numel = round_up(per_rank, at_least((int64_t)(shard_align / itemsize), ZS_LAYOUT_GROUP));
    return ZS_OK;
}

void zs_layout_widen(zs_layout *layout, size_t itemsize)
{
    layout->itemsize = itemsize;
}

int64_t zs_layout_full_numel(const zs_layout *layout)
{
    return layout->shard_numel * layout->world;
}

void zs_layout_free(zs_layout *layout)
{
    free(layout->offsets);
    free(layout->numels);
    memset(layout, 0, sizeof *layout);
}

static int64_t clamp(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

zs_range zs_layout_owned(const zs_layout *layout, int64_t i, int rank)
{
    int64_t shard_begin = rank * layout->shard_numel;
    int64_t begin = clamp(shard_begin - layout->offsets[i], 0, layout->numels[i]);
    int64_t end = clamp(shard_begin + layout->shard_numel - layout->offsets[i], 0, layout->numels[i]);
    return (zs_range){begin, end - begin};
}

zs_range zs_layout_in_shard(const zs_layout *layout, int64_t i, int rank)
{
    zs_range owned = zs_layout_owned(layout, i, rank);
    int64_t begin = layout->offsets[i] + owned.begin - rank * layout->shard_numel;
    return (zs_range){owned.numel > 0 ? begin : 0, owned.numel};
}

size_t zs_layout_shard_bytes(const zs_layout *layout)
{
    return (size_t)layout->shard_numel * layout->itemsize;
}

size_t zs_layout_full_bytes(const zs_layout *layout)
{
    return zs_layout_shard_bytes(layout) * (size_t)layout->world;
}
