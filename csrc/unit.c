/* unit.c - birth and death of a unit: which flat a parameter goes to, its layout, its memory. See unit.h. */
#define _GNU_SOURCE /* strdup */
#include "unit.h"

#include "bucket.h"
#include "device.h"
#include "hold.h"
#include "in_backward.h"
#include "kept.h"
#include "local_grads.h"
#include "offload.h"
#include "schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- references --------------------------------------------------------------------------------------------------- */

static void free_flat(zs_unit *unit, zs_flat *flat)
{
    zs_comm *comm = zs_engine_ranks(unit->engine)->shards, *near = zs_engine_ranks(unit->engine)->near;
    zs_offload_done_flat(flat); /* while its memory is known to the pager */
    zs_storage_free(flat->full);
    zs_storage_free(flat->shard);
    zs_storage_free(flat->grads);
    if (flat->mem.mem != NULL) flat->mem.mem->user = NULL;
    if (flat->low.mem != NULL) flat->low.mem->user = NULL;
    if (unit->replicated)
        zs_mem_release(flat->mem.mem);
    else if (flat->mem.mem != NULL)
        comm->ops->flat_free(comm, &flat->mem);
    if (flat->low.mem != NULL) comm->ops->flat_free(comm, &flat->low);
    if (flat->kept.mem != NULL) near->ops->flat_free(near, &flat->kept);
    if (flat->grad_mem != NULL) flat->grad_mem->user = NULL;
    if (unit->fixed && flat->full_mem != NULL) flat->full_mem->user = NULL;
    zs_mem_release(flat->grad_mem);
    zs_mem_release(flat->full_mem);
    zs_layout_free(&flat->layout);
}

static void free_unit(zs_unit *unit)
{
    zs_comm *comm = zs_engine_comm(unit->engine);
    zs_bucket_forget(zs_engine_buckets(unit->engine), unit);
    zs_in_backward_detach(unit);
    zs_local_grads_free(unit);
    zs_hold_end(unit);
    zs_unit_cancel(unit);
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        zs_tensor_free(param->tensor);
        zs_tensor_free(param->grad);
        free(param->name);
        free(param->sizes);
    }
    for (int f = 0; f < unit->n_flats; f++)
        free_flat(unit, &unit->flats[f]);
    if (unit->cunit != NULL) comm->ops->cunit_free(comm, unit->cunit);
    free(unit->params);
    free(unit->used);
    free(unit->by_hand[0].units);
    free(unit->by_hand[1].units);
    free(unit->name);
    free(unit->sharded_message);
    zs_offload_forget(unit);
    zs_engine_forget(unit->engine, unit);
    zs_engine_release(unit->engine);
    free(unit);
}

void zs_unit_retain(void *unit)
{
    __atomic_fetch_add(&((zs_unit *)unit)->refs, 1, __ATOMIC_RELAXED);
}

void zs_unit_release(void *unit)
{
    if (unit != NULL && __atomic_sub_fetch(&((zs_unit *)unit)->refs, 1, __ATOMIC_ACQ_REL) == 0) free_unit(unit);
}

/* --- which flat each parameter goes to ------------------------------------------------------------------------------ */

static zs_status check_param(const zs_unit_spec *spec, int64_t i, const zs_tensor_info *info)
{
    const char *name = spec->names[i];
    if (info->is_meta && !spec->outline)
        return ZS_FAIL(
            ZS_ERR_VALUE,
            "parameter '%s' is on the meta device, so it has no values to shard; initialise the model on the "
            "CPU (or call module.to_empty(device='cpu') and initialise it) before FSDP(...)",
            name);
    if (!info->on_cpu && !info->is_meta)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "parameter '%s' of unit '%s' is not on the CPU; all parameters of a model have to be on one "
                       "device, here the CPU: model.cpu() before FSDP(...)",
                       name, spec->name);
    if (!info->strided)
        return ZS_FAIL(ZS_ERR_VALUE, "parameter '%s' is not a dense tensor; pass its module in ignored_modules", name);
    if (info->ndim > ZS_MAX_DIM)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED, "parameter '%s' has %d dimensions; at most %d are supported", name,
                       info->ndim, ZS_MAX_DIM);
    if (!info->is_leaf)
        return ZS_FAIL(ZS_ERR_VALUE, "parameter '%s' is the result of a computation, not a leaf; detach it first",
                       name);
    if (info->requires_grad && info->dtype == ZS_BYTES)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "parameter '%s' is trainable and of a dtype whose gradients cannot be summed; float32, float64, "
                       "bfloat16 and float16 can",
                       name);
    return ZS_OK;
}

static bool is_lowered(const zs_unit_spec *spec, int64_t i, const zs_tensor_info *info)
{
    return info->dtype != ZS_BYTES && !(spec->keep != NULL && spec->keep[i]);
}

/* In which dtype a parameter is computed with, and its gradient sent. */
static zs_precision precision_of(const zs_unit *unit, const zs_unit_spec *spec, int64_t i, const zs_tensor_info *info)
{
    zs_precision own = {info->dtype, info->dtype};
    if (!is_lowered(spec, i, info)) return own;
    if (spec->precision.compute != ZS_BYTES) own.compute = own.wire = spec->precision.compute;
    if (spec->precision.wire != ZS_BYTES) own.wire = spec->precision.wire;
    /* What is shared of a sum is the sum itself, not what it would be after another rounding. */
    if (unit->replicated) own.wire = info->dtype;
    return own;
}

static zs_status find_flat(zs_unit *unit, const zs_tensor_info *info, zs_precision own, int *index)
{
    for (int f = 0; f < unit->n_flats; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (flat->dtype == info->dtype && flat->trainable == info->requires_grad &&
            flat->layout.itemsize == info->itemsize && flat->compute == own.compute) {
            *index = f;
            return ZS_OK;
        }
    }
    if (unit->n_flats == ZS_MAX_FLATS)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED, "unit '%s' has parameters of more than %d kinds (dtype, trainable or not)",
                       unit->name, ZS_MAX_FLATS);
    zs_flat *flat = &unit->flats[unit->n_flats];
    flat->dtype = info->dtype;
    flat->compute = own.compute;
    flat->wire = own.wire;
    flat->compute_size = own.compute == info->dtype ? info->itemsize : zs_dtype_size(own.compute);
    flat->wire_size = own.wire == info->dtype ? info->itemsize : zs_dtype_size(own.wire);
    flat->trainable = info->requires_grad;
    flat->layout.itemsize = info->itemsize;
    *index = unit->n_flats++;
    return ZS_OK;
}

zs_status zs_unit_check(const zs_unit_spec *spec)
{
    zs_unit scratch = {.name = (char *)(uintptr_t)spec->name};
    for (int64_t i = 0; i < spec->n_params; i++) {
        zs_tensor_info info;
        int flat;
        ZS_TRY(zs_tensor_describe(spec->tensors[i], &info));
        ZS_TRY(check_param(spec, i, &info));
        ZS_TRY(find_flat(&scratch, &info, precision_of(&scratch, spec, i, &info), &flat));
    }
    return ZS_OK;
}

static zs_status describe_params(zs_unit *unit, const zs_unit_spec *spec)
{
    for (int64_t i = 0; i < spec->n_params; i++) {
        zs_param *param = &unit->params[i];
        zs_tensor_info info;
        ZS_TRY(zs_tensor_describe(spec->tensors[i], &info));
        ZS_TRY(check_param(spec, i, &info));
        ZS_TRY(find_flat(unit, &info, precision_of(unit, spec, i, &info), &param->flat));
        param->tensor = zs_tensor_new_weak(spec->tensors[i]);
        param->numel = info.numel;
        param->ndim = info.ndim;
        param->name = strdup(spec->names[i]);
        param->sizes = calloc((size_t)info.ndim + 1, sizeof *param->sizes);
        if (param->name == NULL || param->sizes == NULL)
            return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for parameter '%s'", spec->names[i]);
        memcpy(param->sizes, info.sizes, (size_t)info.ndim * sizeof *param->sizes);
    }
    return ZS_OK;
}

/* --- layout and memory ------------------------------------------------------------------------------------------------ */

/* How many slices the unit's flat buffers are cut into: for ranks to hold, or if replicated, to sum. */
static int parts_of(const zs_unit *unit)
{
    return unit->replicated ? zs_engine_comm(unit->engine)->world : zs_engine_n_parts(unit->engine);
}

/* To which multiple of bytes. */
static size_t shard_align(const zs_unit *unit)
{
    const zs_ranks *ranks = zs_engine_ranks(unit->engine);
    if (unit->replicated) return ZS_PARAM_ALIGN;
    size_t align = ranks->shards->ops->shard_align, near = ranks->near->ops->shard_align;
    return near > align ? near : align;
}

static size_t smallest_size(const zs_flat *flat)
{
    size_t size = flat->layout.itemsize;
    if (flat->compute_size < size) size = flat->compute_size;
    return flat->wire_size < size ? flat->wire_size : size;
}

static zs_status lay_out_flat(zs_unit *unit, int f)
{
    zs_flat *flat = &unit->flats[f];
    int64_t *numels = calloc((size_t)unit->n_params, sizeof *numels);
    if (numels == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for the layout of unit '%s'", unit->name);
    int64_t n = 0;
    for (int64_t i = 0; i < unit->n_params; i++)
        if (unit->params[i].flat == f) numels[n++] = unit->params[i].numel;
    size_t itemsize = flat->layout.itemsize, smallest = smallest_size(flat);
    zs_status status = zs_layout_new(numels, n, smallest, parts_of(unit), shard_align(unit), &flat->layout);
    zs_layout_widen(&flat->layout, itemsize);
    free(numels);
    ZS_TRY(status);
    int64_t k = 0;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (param->flat != f) continue;
        param->offset = flat->layout.offsets[k];
        param->owned = unit->replicated ? (zs_range){0, param->numel} : zs_layout_owned(&flat->layout, k, unit->part);
        param->in_shard = unit->replicated ? (zs_range){param->offset, param->numel}
                                           : zs_layout_in_shard(&flat->layout, k, unit->part);
        k++;
    }
    return ZS_OK;
}

static zs_status take_flat(zs_unit *unit, size_t shard_bytes, zs_flat_mem *out)
{
    zs_comm *comm = zs_engine_ranks(unit->engine)->shards;
    ZS_TRY(zs_offload_flat_new(unit, comm, shard_bytes, out));
    out->mem->role = ZS_MEM_SHARD;
    out->mem->user = unit;
    return ZS_OK;
}

static zs_status make_flat_memory(zs_unit *unit, zs_flat *flat)
{
    size_t widest = flat->compute_size > flat->layout.itemsize ? flat->compute_size : flat->layout.itemsize;
    size_t full_bytes = zs_layout_full_bytes(&flat->layout);
    ZS_TRY(zs_storage_new((size_t)zs_layout_full_numel(&flat->layout) * widest, unit->sharded_message, &flat->full));
    if (unit->fixed) {
        ZS_TRY(zs_mem_new_private(full_bytes, &flat->full_mem));
        flat->full_mem->user = unit;
        return zs_storage_fill(flat->full, flat->full_mem, flat->full_mem->ptr);
    }
    size_t shard_bytes = zs_flat_own_bytes(unit, flat);
    if (unit->replicated) {
        ZS_TRY(zs_offload_params_new(unit, full_bytes, &flat->mem.mem));
        flat->mem.mem->user = unit;
        flat->mem.shard = flat->mem.mem->ptr;
    } else {
        ZS_TRY(take_flat(unit, shard_bytes, &flat->mem));
        if (flat->compute != flat->dtype) ZS_TRY(take_flat(unit, zs_flat_low_bytes(flat), &flat->low));
        ZS_TRY(zs_kept_new(unit, flat));
    }
    ZS_TRY(zs_storage_new(shard_bytes, "", &flat->shard));
    return zs_storage_fill(flat->shard, flat->mem.mem, flat->mem.shard);
}

/* A sharded parameter keeps its number of dimensions, so that `p.ndim >= 2` in users' code stays true. */
static int local_sizes(const zs_unit *unit, const zs_param *param, int64_t *sizes)
{
    if (unit->replicated) {
        memcpy(sizes, param->sizes, (size_t)param->ndim * sizeof *sizes);
        return param->ndim;
    }
    if (param->ndim == 0 && param->owned.numel == 1) return 0;
    int ndim = param->ndim > 0 ? param->ndim : 1;
    sizes[0] = param->owned.numel;
    for (int d = 1; d < ndim; d++)
        sizes[d] = 1;
    return ndim;
}

zs_status zs_unit_bind_local(zs_unit *unit, zs_param *param)
{
    int64_t sizes[ZS_MAX_DIM];
    int ndim = local_sizes(unit, param, sizes);
    const zs_flat *flat = &unit->flats[param->flat];
    zs_place place = {unit->fixed ? flat->full : flat->shard, param->in_shard.begin, ndim, sizes, flat->dtype};
    return zs_tensor_bind(param->tensor, &place);
}

bool zs_unit_reduces(const zs_unit *unit)
{
    return zs_engine_comm(unit->engine)->world > 1 || !unit->fixed;
}

/* Where each flat's gradients lie in a bucket. */
static void lay_out_gradients(zs_unit *unit)
{
    size_t offset = 0;
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        flat->slice_bytes = (size_t)flat->layout.shard_numel * flat->wire_size;
        flat->bucket_offset = offset;
        offset += zs_flat_wire_bytes(flat);
    }
}

zs_cunit_spec zs_unit_round_spec(const zs_unit *unit)
{
    zs_cunit_spec spec = {.name = unit->name, .n_params = (size_t)unit->n_params + 2};
    spec.mode = unit->replicated ? ZS_REDUCE_ALL : ZS_REDUCE_SCATTER;
    spec.parts = parts_of(unit);
    if (!unit->replicated) spec.part_of = zs_engine_part_of(unit->engine);
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].trainable) spec.slice_bytes[spec.n_slices++] = unit->flats[f].slice_bytes;
    return spec;
}

static zs_status make_gradients(zs_unit *unit)
{
    zs_comm *comm = zs_engine_comm(unit->engine);
    zs_cunit_spec spec = zs_unit_round_spec(unit);
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        size_t bytes = zs_flat_own_bytes(unit, flat);
        ZS_TRY(zs_offload_grads_new(unit, bytes, &flat->grad_mem));
        flat->grad_mem->role = unit->replicated ? ZS_MEM_PLAIN : ZS_MEM_GRAD_SHARD;
        flat->grad_mem->user = unit;
        ZS_TRY(zs_storage_new(bytes, "", &flat->grads));
        ZS_TRY(zs_storage_fill(flat->grads, flat->grad_mem, flat->grad_mem->ptr));
    }
    if (spec.n_slices == 0) return ZS_OK;
    unit->used_words = (spec.n_params + 63) / 64;
    unit->used = calloc(3 * unit->used_words, sizeof *unit->used);
    if (unit->used == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for unit '%s'", unit->name);
    unit->arrived = unit->used + unit->used_words;
    unit->kept = unit->arrived + unit->used_words;
    return comm->ops->cunit_new(comm, &spec, &unit->cunit);
}

static zs_status make_grad_views(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        const zs_flat *flat = &unit->flats[param->flat];
        if (flat->grads == NULL) continue;
        int64_t sizes[ZS_MAX_DIM];
        int ndim = local_sizes(unit, param, sizes);
        zs_place place = {flat->grads, param->in_shard.begin, ndim, sizes, flat->dtype};
        ZS_TRY(zs_tensor_new_on(&place, param->tensor, &param->grad));
    }
    return ZS_OK;
}

static zs_status take_values(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        const zs_flat *flat = &unit->flats[param->flat];
        char *dst = zs_flat_home(flat) + (size_t)param->in_shard.begin * flat->layout.itemsize;
        ZS_TRY(zs_tensor_read(param->tensor, param->owned.begin, param->owned.numel, dst));
    }
    return ZS_OK;
}

static zs_status build(zs_unit *unit, const zs_unit_spec *spec)
{
    ZS_TRY(describe_params(unit, spec));
    for (int f = 0; f < unit->n_flats; f++)
        ZS_TRY(lay_out_flat(unit, f));
    if (zs_unit_reduces(unit)) lay_out_gradients(unit);
    if (spec->outline) return ZS_OK;
    for (int f = 0; f < unit->n_flats; f++)
        ZS_TRY(make_flat_memory(unit, &unit->flats[f]));
    if (zs_unit_reduces(unit)) {
        ZS_TRY(make_gradients(unit));
        ZS_TRY(make_grad_views(unit));
    }
    ZS_TRY(take_values(unit));
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        zs_grad_set(param->tensor, NULL);
        ZS_TRY(zs_unit_bind_local(unit, param));
        if (zs_unit_reduces(unit)) ZS_TRY(zs_unit_hook_param(unit, i));
    }
    zs_offload_filled(unit);
    return ZS_OK;
}

/* Is any of the parameters computed with in another dtype than its own? */
static bool lowers(const zs_unit *unit, const zs_unit_spec *spec)
{
    for (int64_t i = 0; i < spec->n_params; i++) {
        zs_tensor_info info;
        if (zs_tensor_describe(spec->tensors[i], &info) != ZS_OK) continue; /* building the unit will tell */
        if (precision_of(unit, spec, i, &info).compute != info.dtype) return true;
    }
    return false;
}

static size_t bytes_of(const zs_unit_spec *spec)
{
    size_t total = 0;
    for (int64_t i = 0; i < spec->n_params; i++) {
        zs_tensor_info info;
        if (zs_tensor_describe(spec->tensors[i], &info) == ZS_OK) total += (size_t)info.numel * info.itemsize;
    }
    return total;
}

zs_status zs_unit_new(zs_engine *engine, const zs_unit_spec *spec, zs_unit **out)
{
    zs_unit *unit = calloc(1, sizeof *unit);
    if (unit == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for unit '%s'", spec->name);
    unit->refs = 1;
    unit->engine = zs_engine_retain(engine);
    unit->strategy = spec->strategy;
    unit->sync = unit->syncs = true;
    unit->past = true;
    unit->replicated = spec->strategy == ZS_NO_SHARD || zs_engine_n_parts(engine) == 1;
    unit->part = unit->replicated ? zs_engine_comm(engine)->rank : zs_engine_part(engine);
    zs_offload_choose(zs_engine_offload(engine), unit, bytes_of(spec));
    unit->fixed = unit->replicated && !unit->offloads.params && !lowers(unit, spec);
    unit->state = unit->fixed ? ZS_FULL : ZS_SHARDED;
    unit->n_params = spec->n_params;
    unit->name = strdup(spec->name);
    unit->sharded_message = zs_unit_message(spec->name);
    unit->params = calloc((size_t)spec->n_params + 1, sizeof *unit->params);
    zs_status status = ZS_OK;
    if (unit->name == NULL || unit->sharded_message == NULL || unit->params == NULL)
        status = ZS_FAIL(ZS_ERR_MEMORY, "out of memory for unit '%s'", spec->name);
    if (status == ZS_OK) status = build(unit, spec);
    if (status == ZS_OK) status = zs_engine_add(engine, unit);
    if (!spec->outline) zs_mem_heap_freed(bytes_of(spec));
    if (status != ZS_OK) {
        zs_unit_release(unit);
        return status;
    }
    *out = unit;
    return ZS_OK;
}
