/* unit_memory.c - the memory of a unit's parameters and gradients, allocated when the unit is created (gradients of
 * parameters that are unfrozen later: then).
 *
 * Sizes come first, then memory, then values: a dry run's unit (zs_unit_spec) stops after the sizes. For unit_life.c
 * and kept_grads.c. See unit.h. */

#include "base/tree.h"
#include "device/device.h"
#include "unit/context.h"
#include "unit/offload.h"
#include "unit/unit.h"

#include <stdlib.h>
#include <string.h>

/* Number of shards of the unit's flats: for ranks to hold, or if replicated, to sum. */
static int shards_of(const zs_unit *unit)
{
    return unit->record.is.replicated ? unit->context->ranks.all->world : unit->context->n_shards;
}

/* A shard's size is a multiple of this. */
static size_t shard_align(const zs_unit *unit)
{
    const zs_ranks *ranks = &unit->context->ranks;
    if (unit->record.is.replicated) return ZS_PARAM_ALIGN;
    size_t align = ranks->shards->ops->shard_align, group_align = ranks->shard_group->ops->shard_align;
    return group_align > align ? group_align : align;
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
    if (numels == NULL)
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the layout of unit '%s'", zs_unit_label(unit->name));
    int64_t n = 0;
    for (int64_t i = 0; i < unit->n_params; i++)
        if (unit->params[i].flat == f) numels[n++] = unit->params[i].numel;
    size_t itemsize = flat->layout.itemsize, smallest = smallest_size(flat);
    zs_status status = zs_layout_new(numels, n, smallest, shards_of(unit), shard_align(unit), &flat->layout);
    zs_layout_widen(&flat->layout, itemsize);
    free(numels);
    ZS_TRY(status);
    int64_t k = 0;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (param->flat != f) continue;
        param->offset = flat->layout.offsets[k];
        param->owned =
            unit->record.is.replicated ? (zs_range){0, param->numel} : zs_layout_owned(&flat->layout, k, unit->shard);
        param->in_shard = unit->record.is.replicated ? (zs_range){param->offset, param->numel}
                                                     : zs_layout_in_shard(&flat->layout, k, unit->shard);
        k++;
    }
    return ZS_OK;
}

static zs_status take_flat(zs_unit *unit, size_t shard_bytes, zs_flat_mem *out)
{
    zs_comm *comm = unit->context->ranks.shards;
    ZS_TRY(zs_offload_flat_new(unit, comm, shard_bytes, out));
    out->mem->role = ZS_MEM_SHARD;
    out->mem->user = unit;
    return ZS_OK;
}

static zs_status make_flat_memory(zs_unit *unit, zs_flat *flat)
{
    size_t widest = flat->compute_size > flat->layout.itemsize ? flat->compute_size : flat->layout.itemsize;
    size_t full_bytes = zs_layout_full_bytes(&flat->layout);
    size_t widest_bytes = (size_t)zs_layout_full_numel(&flat->layout) * widest;
    const zs_device *device = zs_context_device(unit->context);
    ZS_TRY(zs_storage_new(device->where, widest_bytes, unit->sharded_message, &flat->full));
    if (unit->record.is.fixed) {
        ZS_TRY(zs_device_mem_new(device, full_bytes, &flat->full_mem));
        flat->full_mem->user = unit;
        return zs_storage_fill(flat->full, flat->full_mem, flat->full_mem->ptr);
    }
    size_t shard_bytes = zs_flat_own_bytes(unit, flat);
    if (unit->record.is.replicated) {
        ZS_TRY(zs_offload_params_new(unit, full_bytes, &flat->mem.mem));
        flat->mem.mem->user = unit;
        flat->mem.shard = flat->mem.mem->ptr;
    } else {
        ZS_TRY(take_flat(unit, shard_bytes, &flat->mem));
        if (flat->compute != flat->dtype) ZS_TRY(take_flat(unit, zs_flat_low_bytes(flat), &flat->low));
        ZS_TRY(zs_secondary_new(unit, flat));
    }
    ZS_TRY(zs_storage_new(device->where, shard_bytes, "", &flat->shard));
    return zs_storage_fill(flat->shard, flat->mem.mem, flat->mem.shard);
}

/* A sharded parameter keeps its number of dimensions, so that `p.ndim >= 2` in users' code stays true. */
static int local_sizes(const zs_unit *unit, const zs_param *param, int64_t *sizes)
{
    if (unit->record.is.replicated) {
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
    zs_place place = {unit->record.is.fixed ? flat->full : flat->shard, param->in_shard.begin, ndim, sizes, flat->dtype,
                      unit->record.is.fixed ? param->strides : NULL};
    return zs_tensor_bind(param->tensor, &place);
}

/* Sets the place of each flat's gradients in a bucket, and in local gradients. */
static void lay_out_gradients(zs_unit *unit)
{
    size_t offset = 0, local = 0;
    int trainable = 0;
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        flat->wire_shard_bytes = 0; /* a thaw that fails takes a place in the bucket back */
        if (!flat->trainable) continue;
        flat->trainable_index = trainable++;
        flat->wire_shard_bytes = (size_t)flat->layout.shard_numel * flat->wire_size;
        flat->bucket_offset = offset;
        flat->local_offset = local;
        offset += zs_flat_wire_bytes(flat);
        local += zs_layout_full_bytes(&flat->layout);
    }
}

zs_cunit_spec zs_unit_round_spec(const zs_unit *unit)
{
    zs_cunit_spec spec = {.name = unit->name, .n_params = (size_t)unit->n_params};
    spec.mode = unit->record.is.replicated ? ZS_REDUCE_ALL : ZS_REDUCE_SCATTER;
    spec.n_shards = shards_of(unit);
    spec.code = unit->code;
    spec.sections = zs_tree_sections(unit->context->tree);
    if (!unit->record.is.replicated) spec.shard_of = unit->context->shard_of;
    for (int f = 0; f < unit->n_flats; f++) {
        if (!unit->flats[f].trainable) continue;
        spec.wire[spec.n_flats] = unit->flats[f].wire;
        spec.shard_bytes[spec.n_flats++] = unit->flats[f].wire_shard_bytes;
    }
    return spec;
}

static zs_status make_grad_memory(zs_unit *unit, zs_flat *flat)
{
    size_t bytes = zs_flat_own_bytes(unit, flat);
    ZS_TRY(zs_storage_new(zs_context_device(unit->context)->where, bytes, "", &flat->grads));
    if (!unit->offloads.grads) return ZS_OK; /* a backward takes it */
    zs_status status = zs_disk_take(unit->offloads.disk, bytes, &flat->grad_mem);
    if (status != ZS_OK) { /* so that the next attempt makes both */
        zs_storage_free(flat->grads);
        flat->grads = NULL;
        return status;
    }
    flat->grad_mem->role = unit->record.is.replicated ? ZS_MEM_PLAIN : ZS_MEM_GRAD_SHARD;
    flat->grad_mem->user = unit;
    return zs_storage_fill(flat->grads, flat->grad_mem, flat->grad_mem->ptr);
}

/* Makes the gradient memory and the round that the trainable flats lack. */
static zs_status make_gradients(zs_unit *unit)
{
    zs_comm *comm = unit->context->ranks.all;
    zs_cunit_spec spec = zs_unit_round_spec(unit);
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        if (flat->trainable && flat->grads == NULL) ZS_TRY(make_grad_memory(unit, flat));
    }
    if (spec.n_flats == 0) return ZS_OK;
    size_t words = zs_unit_bitmap_words(unit);
    if (unit->used == NULL) unit->used = calloc(3 * words, sizeof *unit->used);
    if (unit->used == NULL)
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", zs_unit_label(unit->name));
    unit->arrived = unit->used + words;
    unit->kept = unit->arrived + words;
    return zs_cunit_new(comm, &spec, &unit->cunit);
}

zs_status zs_unit_new_grad_view(const zs_unit *unit, const zs_param *param, const zs_storage *storage, zs_tensor **out)
{
    int64_t sizes[ZS_MAX_DIM];
    int ndim = local_sizes(unit, param, sizes);
    zs_place place = {storage, param->in_shard.begin, ndim, sizes, unit->flats[param->flat].dtype, NULL};
    return zs_tensor_new_on(&place, param->tensor, out);
}

static zs_status make_grad_views(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        const zs_flat *flat = &unit->flats[param->flat];
        if (flat->grads == NULL || param->grad != NULL) continue;
        ZS_TRY(zs_unit_new_grad_view(unit, param, flat->grads, &param->grad));
    }
    return ZS_OK;
}

zs_status zs_unit_take_values(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        const zs_flat *flat = &unit->flats[param->flat];
        char *dst = zs_flat_home(flat) + (size_t)param->in_shard.begin * flat->layout.itemsize;
        zs_where where = zs_context_device(unit->context)->where;
        ZS_TRY(zs_tensor_read(param->tensor, param->owned.begin, param->owned.numel, dst, where));
    }
    return ZS_OK;
}

/* The code in which the flat's parameters cross hosts: exact if no gather crosses, or if this rank's transport has no
 * room for codes. */
static zs_wire code_of(const zs_unit *unit, const zs_flat *flat)
{
    const zs_ranks *ranks = &unit->context->ranks;
    zs_wire code = unit->context->params_code;
    bool crosses = !unit->record.is.replicated && ranks->shard_group == ranks->all;
    size_t room = crosses ? zs_comm_code_room(ranks->all, code, flat->compute, zs_flat_low_bytes(flat)) : 0;
    return room > 0 ? code : ZS_WIRE_EXACT;
}

zs_status zs_unit_lay_out(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++) {
        ZS_TRY(lay_out_flat(unit, f));
        unit->flats[f].code = code_of(unit, &unit->flats[f]);
    }
    if (!zs_unit_reduces(unit)) return ZS_OK;
    lay_out_gradients(unit);
    zs_record_set_reduces(&unit->record, zs_unit_round_spec(unit).n_flats > 0, zs_unit_bucket_bytes(unit));
    return ZS_OK;
}

zs_status zs_unit_take_memory(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++)
        ZS_TRY(make_flat_memory(unit, &unit->flats[f]));
    if (!zs_unit_reduces(unit)) return ZS_OK;
    ZS_TRY(make_gradients(unit));
    return make_grad_views(unit);
}

/* --- thawing ------------------------------------------------------------------------------------------------------ */

bool zs_unit_is_thawing(const zs_unit *unit)
{
    bool frozen = false;
    for (int f = 0; f < unit->n_flats; f++)
        frozen |= !unit->flats[f].trainable;
    for (int64_t i = 0; frozen && i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        if (unit->flats[param->flat].trainable || !zs_tensor_alive(param->tensor)) continue;
        if (zs_tensor_requires_grad(param->tensor)) return true;
    }
    return false;
}

static zs_status check_thaw(const zs_unit *unit)
{
    if (unit->local != NULL)
        return ZS_FAIL(ZS_ERR_STATE,
                       "parameters of unit '%s' were unfrozen while it has gradients from no_sync() that are not "
                       "reduced: run the last backward outside of no_sync() before requires_grad_(True)",
                       zs_unit_label(unit->name));
    if (unit->context->pass > 0)
        return ZS_FAIL(
            ZS_ERR_STATE,
            "parameters of unit '%s' were unfrozen within a step: call requires_grad_(True) before the first "
            "micro-batch of a step",
            zs_unit_label(unit->name));
    if (unit->stepping != NULL)
        return ZS_FAIL(ZS_ERR_STATE,
                       "parameters of unit '%s', which is stepped in backward, were unfrozen: call remove() on the "
                       "handle of optimizer_in_backward() before requires_grad_(True), and "
                       "optimizer_in_backward() again with an optimizer that has them",
                       zs_unit_label(unit->name));
    return ZS_OK;
}

static bool has_unfrozen(const zs_unit *unit, int f)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        bool wants = param->flat == f && zs_tensor_alive(param->tensor) && zs_tensor_requires_grad(param->tensor);
        if (wants) return true;
    }
    return false;
}

/* Updates the schedule's and the transport's facts about the unit's flats. */
static void tell_reduces(zs_unit *unit)
{
    lay_out_gradients(unit);
    zs_record_set_reduces(&unit->record, zs_unit_round_spec(unit).n_flats > 0, zs_unit_bucket_bytes(unit));
}

/* Gradients for flats that are trained from now on; the round of those before stays until the new one is made. */
static zs_status make_thawed(zs_unit *unit)
{
    zs_cunit *before = unit->cunit;
    unit->cunit = NULL;
    zs_status status = make_gradients(unit);
    ZS_THEN(status, make_grad_views(unit));
    zs_cunit *dropped = status == ZS_OK ? before : unit->cunit;
    if (status != ZS_OK) unit->cunit = before;
    if (dropped != NULL) zs_cunit_free(unit->context->ranks.all, dropped);
    return status;
}

zs_status zs_unit_thaw(zs_unit *unit)
{
    ZS_TRY(check_thaw(unit));
    bool thaws[ZS_MAX_FLATS] = {false};
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        thaws[f] = !flat->trainable && has_unfrozen(unit, f);
        flat->trainable |= thaws[f];
        flat->thawed |= thaws[f];
    }
    zs_context_replan(unit->context);
    if (!zs_unit_reduces(unit)) return ZS_OK;
    tell_reduces(unit);
    zs_status status = make_thawed(unit);
    for (int f = 0; f < unit->n_flats && status != ZS_OK; f++)
        if (thaws[f]) unit->flats[f].trainable = unit->flats[f].thawed = false;
    if (status != ZS_OK) tell_reduces(unit); /* the next forward tries again */
    for (int64_t i = 0; i < unit->n_params && status == ZS_OK; i++)
        if (zs_tensor_alive(unit->params[i].tensor)) status = unit->context->calls->hook_param(unit, i);
    return status;
}
