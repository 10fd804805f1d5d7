/* leaves.c - see leaves.h. */
#include "reduce/leaves.h"

#include "base/bits.h"
#include "base/tree.h"
#include "device/device.h"

#include <stdlib.h>
#include <string.h>

typedef struct partial {
    zs_leaf_run node;
    char *sum;   /* with the layout of a section; NULL: none of its leaves used the unit */
    zs_mem *mem; /* under it; owned; NULL: it is a bucket's */
} partial;

struct zs_leaves {
    partial stack[ZS_TREE_RUN]; /* [n] neighbors, which cover the leaves so far */
    int n;
    uint64_t used[]; /* bitmap of parameters that had a gradient in this step */
};

static const zs_tree *tree_of(const zs_unit *unit)
{
    return unit->context->tree;
}

static zs_status make(zs_unit *unit)
{
    if (unit->leaves != NULL) return ZS_OK;
    unit->leaves = calloc(1, sizeof *unit->leaves + zs_unit_bitmap_words(unit) * sizeof(uint64_t));
    if (unit->leaves == NULL)
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory adding gradients of unit '%s'", zs_unit_label(unit->name));
    return ZS_OK;
}

static void release(zs_mem **mem)
{
    if (*mem != NULL) zs_mem_release(*mem);
    *mem = NULL;
}

/* --- a backward -------------------------------------------------------------------------------------------------- */

zs_status zs_leaves_ready(zs_context *context)
{
    if (context->tree == NULL) return ZS_OK;
    if (context->leaf != ZS_LEAF_BEGUN)
        return ZS_FAIL(ZS_ERR_STATE,
                       "a backward %s: with deterministic='any-world', run one for each number of `for index in "
                       "model.micro_batches(step)`, within the loop; if it passes through several such models, as a "
                       "GAN's does, zip() the micro_batches(step) of all of them",
                       context->leaf == ZS_LEAF_DONE ? "after that of the micro-batch" : "outside of a micro-batch");
    context->schedule.last_leaf = context->pass == zs_tree_passes(context->tree) - 1;
    return ZS_OK;
}

void zs_leaves_count(zs_context *context)
{
    if (context->tree == NULL) return;
    context->leaf = ZS_LEAF_DONE;
    context->pass = context->schedule.last_leaf ? 0 : context->pass + 1;
}

zs_status zs_leaves_check_step(const zs_context *context)
{
    if (context->tree == NULL || context->pass == 0) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE,
                   "optimizer.step() after %d of the %d micro-batches that this rank has in a step: call it after the "
                   "loop over model.micro_batches(step)",
                   context->pass, zs_tree_passes(context->tree));
}

void zs_leaves_restart(zs_context *context)
{
    context->pass = 0;
    context->leaf = ZS_LEAF_NONE;
}

/* --- a leaf ------------------------------------------------------------------------------------------------------- */

zs_status zs_leaves_check(const zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        zs_grad_info grad = {0};
        if (param->grad == NULL || !zs_tensor_alive(param->tensor)) continue;
        ZS_TRY(zs_grad_describe(param->tensor, &grad));
        if (grad.defined)
            return ZS_FAIL(
                ZS_ERR_STATE,
                "parameter '%s' has a .grad at the beginning of a micro-batch: with deterministic='any-world', "
                "call zero_grad() after each step, and raise micro_batches to accumulate more gradients",
                param->name);
    }
    return ZS_OK;
}

zs_status zs_leaves_begin(zs_unit *unit)
{
    ZS_TRY(make(unit));
    release(&unit->leaf);
    ZS_TRY(zs_device_mem_new(zs_context_device(unit->context), zs_unit_section_bytes(unit), &unit->leaf));
    unit->leaf->role = ZS_MEM_LOCAL_GRAD;
    unit->leaf->user = unit;
    unit->context->calls->note_peak(unit->context);
    return ZS_OK;
}

/* --- nodes -------------------------------------------------------------------------------------------------------- */

/* sum += other, flat by flat. */
static zs_status add(const zs_unit *unit, char *sum, const char *other)
{
    for (int f = 0; f < unit->n_flats; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        const void *src[] = {other + flat->bucket_offset, sum + flat->bucket_offset};
        zs_sum both = {.src = src, .world = 2, .dst = sum + flat->bucket_offset, .scale = 1.0};
        both.numel = zs_layout_full_numel(&flat->layout);
        both.dtype = both.to = flat->wire;
        ZS_TRY(zs_device_sum(zs_context_device(unit->context), ZS_STREAM_COMPUTE, &both));
    }
    return ZS_OK;
}

/* Adds to a node, which then covers them, the nodes before it that it completes. */
static zs_status complete(zs_unit *unit, partial *last)
{
    zs_leaves *leaves = unit->leaves;
    while (leaves->n > 0 && zs_tree_joins(tree_of(unit), leaves->stack[leaves->n - 1].node, last->node)) {
        partial before = leaves->stack[--leaves->n];
        zs_status status = ZS_OK;
        last->node.begin = before.node.begin;
        if (last->sum == NULL) {
            last->sum = before.sum;
            last->mem = before.mem;
        } else if (before.sum != NULL) {
            status = add(unit, last->sum, before.sum);
            release(&before.mem);
        }
        ZS_TRY(status);
    }
    return ZS_OK;
}

/* Appends a node, and adds up the nodes that it completes; takes over its memory. */
static zs_status push(zs_unit *unit, partial last)
{
    zs_status status = complete(unit, &last);
    if (status == ZS_OK)
        unit->leaves->stack[unit->leaves->n++] = last;
    else
        release(&last.mem);
    return status;
}

/* Appends nodes without gradients up to `leaf`, for backwards that did not use the unit. */
static zs_status catch_up(zs_unit *unit, int leaf)
{
    const zs_leaves *leaves = unit->leaves;
    zs_leaf_run run = zs_tree_run(tree_of(unit), unit->context->ranks.all->rank);
    int next = leaves->n > 0 ? leaves->stack[leaves->n - 1].node.end : run.begin;
    for (; next < leaf; next++)
        ZS_TRY(push(unit, (partial){.node = {next, next + 1}}));
    return ZS_OK;
}

static int leaf_now(const zs_unit *unit, bool *counts)
{
    return zs_tree_leaf(tree_of(unit), unit->context->ranks.all->rank, unit->context->pass, counts);
}

static void note_used(zs_unit *unit)
{
    for (size_t w = 0; w < zs_unit_bitmap_words(unit); w++)
        unit->leaves->used[w] |= unit->used[w];
}

zs_status zs_leaves_end(zs_unit *unit)
{
    if (unit->leaf == NULL) return ZS_OK;
    bool counts = false;
    int leaf = leaf_now(unit, &counts);
    zs_record_forget_local(&unit->record);
    if (!counts) {
        release(&unit->leaf);
        return ZS_OK;
    }
    ZS_TRY(catch_up(unit, leaf));
    note_used(unit);
    partial last = {{leaf, leaf + 1}, unit->leaf->ptr, unit->leaf};
    unit->leaf = NULL;
    return push(unit, last);
}

/* Copies the nodes before the last one to their sections. */
static zs_status send_others(const zs_unit *unit, char *bucket)
{
    const zs_device *device = zs_context_device(unit->context);
    const size_t bytes = zs_unit_section_bytes(unit);
    const zs_leaves *leaves = unit->leaves;
    for (int k = 0; k < leaves->n; k++) {
        char *section = bucket + (size_t)zs_tree_section(k, leaves->n + 1) * bytes;
        const char *sum = leaves->stack[k].sum;
        if (sum == NULL)
            ZS_TRY(zs_device_zero(device, ZS_STREAM_COMPUTE, section, bytes));
        else
            ZS_TRY(zs_device_copy(device, ZS_STREAM_COMPUTE, section, sum, bytes));
    }
    return ZS_OK;
}

zs_status zs_leaves_send(zs_unit *unit, char *bucket)
{
    bool counts = false;
    ZS_TRY(make(unit));
    int leaf = leaf_now(unit, &counts);
    ZS_TRY(catch_up(unit, leaf));
    partial last = {{leaf, leaf + 1}, bucket, NULL};
    ZS_TRY(complete(unit, &last));
    ZS_TRY(send_others(unit, bucket));
    note_used(unit);
    memcpy(unit->used, unit->leaves->used, zs_unit_bitmap_words(unit) * sizeof *unit->used);
    zs_leaves_drop(unit);
    return ZS_OK;
}

void zs_leaves_drop(zs_unit *unit)
{
    zs_leaves *leaves = unit->leaves;
    if (unit->leaf != NULL) zs_record_forget_local(&unit->record);
    release(&unit->leaf);
    while (leaves != NULL && leaves->n > 0)
        release(&leaves->stack[--leaves->n].mem);
    if (leaves != NULL) memset(leaves->used, 0, zs_unit_bitmap_words(unit) * sizeof *leaves->used);
}

void zs_leaves_free(zs_unit *unit)
{
    zs_leaves_drop(unit);
    free(unit->leaves);
    unit->leaves = NULL;
}

/* --- sizes -------------------------------------------------------------------------------------------------------- */

size_t zs_leaves_bytes(const zs_unit *unit)
{
    size_t total = unit->leaf != NULL ? unit->leaf->bytes : 0;
    for (int k = 0; unit->leaves != NULL && k < unit->leaves->n; k++)
        if (unit->leaves->stack[k].mem != NULL) total += unit->leaves->stack[k].mem->bytes;
    return total;
}

size_t zs_leaves_most_bytes(const zs_unit *unit)
{
    const zs_tree *tree = tree_of(unit);
    if (tree == NULL) return 0;
    zs_leaf_run run = zs_tree_run(tree, unit->context->ranks.all->rank), nodes[ZS_TREE_RUN];
    int most = zs_tree_passes(tree) > run.end - run.begin; /* a leaf that does not count */
    for (int end = run.begin + 1; end < run.end; end++) {
        int n = zs_tree_cover(tree, (zs_leaf_run){run.begin, end - 1}, nodes) + 1; /* and the leaf at hand */
        if (n > most) most = n;
    }
    return (size_t)most * zs_unit_section_bytes(unit);
}
