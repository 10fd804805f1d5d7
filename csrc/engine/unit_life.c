/* unit_life.c - birth and death of a unit: the flat of each parameter, and the unit's memory. See unit.h. */
#define _GNU_SOURCE /* strdup */
#include "unit/unit.h"

#include "device/device.h"
#include "device/pending.h"
#include "engine/engine_inside.h"
#include "reduce/in_backward.h"
#include "reduce/kept_grads.h"
#include "reduce/leaves.h"
#include "reduce/local_grads.h"
#include "unit/offload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- references --------------------------------------------------------------------------------------------------- */

static void free_flat(zs_unit *unit, zs_flat *flat)
{
    zs_comm *comm = unit->context->ranks.shards, *shard_group = unit->context->ranks.shard_group;
    zs_offload_done_flat(flat); /* while its memory is known to the pager */
    zs_storage_free(flat->full);
    zs_storage_free(flat->shard);
    zs_storage_free(flat->grads);
    if (flat->mem.mem != NULL) flat->mem.mem->user = NULL;
    if (flat->low.mem != NULL) flat->low.mem->user = NULL;
    if (unit->record.is.replicated)
        zs_mem_release(flat->mem.mem);
    else if (flat->mem.mem != NULL)
        zs_comm_flat_free(comm, &flat->mem);
    if (flat->low.mem != NULL) zs_comm_flat_free(comm, &flat->low);
    if (flat->secondary.mem != NULL) zs_comm_flat_free(shard_group, &flat->secondary);
    if (flat->grad_mem != NULL) flat->grad_mem->user = NULL;
    zs_pending_settle(flat->grad_mem);
    free(flat->squares);
    zs_kept_grads_free(flat, unit);
    if (unit->record.is.fixed && flat->full_mem != NULL) flat->full_mem->user = NULL;
    zs_mem_release(flat->grad_mem);
    zs_mem_release(flat->full_mem);
    zs_layout_free(&flat->layout);
}

static void free_unit(zs_unit *unit)
{
    zs_comm *comm = unit->context->ranks.all;
    zs_engine_forget(zs_engine_of(unit), unit);
    zs_in_backward_detach(unit);
    zs_local_grads_free(unit);
    zs_leaves_free(unit);
    zs_pinned_end(unit);
    (void)zs_schedule_cancel(&unit->context->schedule, &unit->record);
    for (int f = 0; f < unit->n_flats; f++)
        free_flat(unit, &unit->flats[f]);
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        zs_tensor_free(param->tensor);
        zs_tensor_free(param->grad);
        free(param->name);
        free(param->sizes);
        free(param->strides);
    }
    if (unit->cunit != NULL) zs_cunit_free(comm, unit->cunit);
    free(unit->params);
    free(unit->used);
    free(unit->name);
    free(unit->sharded_message);
    zs_offload_forget(unit);
    zs_record_free(&unit->record);
    zs_engine_release(zs_engine_of(unit));
    free(unit);
}

void zs_unit_retain(void *unit)
{
    zs_refs_take(&((zs_unit *)unit)->refs);
}

void zs_unit_release(void *unit)
{
    if (unit != NULL && zs_refs_drop(&((zs_unit *)unit)->refs)) free_unit(unit);
}

/* --- which flat each parameter goes to ---------------------------------------------------------------------------- */

/* `device`: the unit's device, NULL: that of its parameters. */
static zs_status check_param(const zs_unit_spec *spec, const zs_device *device, int64_t i, const zs_tensor_info *info)
{
    const char *name = spec->names[i];
    if (info->where.type == ZS_ON_META && !spec->dry_run)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "parameter '%s' is on the meta device and has no values to shard: initialize the model on the "
                       "CPU (or call module.to_empty(device='cpu') and initialize it) before FSDP(...)",
                       name);
    bool elsewhere = device != NULL && !zs_same_where(info->where, device->where) && !spec->dry_run;
    if (info->where.type == ZS_ON_OTHER || elsewhere)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "parameter '%s' of unit '%s' is on another device: all parameters of a model must be on one "
                       "device (%s); move the model there before FSDP(...)",
                       name, zs_unit_label(spec->name), device != NULL ? device->ops->name : "the CPU or a CUDA GPU");
    if (!info->strided)
        return ZS_FAIL(ZS_ERR_VALUE, "parameter '%s' is not a dense tensor; pass its module in ignored_modules", name);
    if (info->ndim > ZS_MAX_DIM)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED, "parameter '%s' has %d dimensions; at most %d are supported", name,
                       info->ndim, ZS_MAX_DIM);
    if (!info->is_leaf)
        return ZS_FAIL(ZS_ERR_VALUE, "parameter '%s' is not a leaf tensor: detach() it before FSDP(...)", name);
    if (info->requires_grad && info->dtype == ZS_BYTES)
        return ZS_FAIL(
            ZS_ERR_VALUE,
            "parameter '%s' requires grad, but gradients of its dtype cannot be reduced (only float32, "
            "float64, bfloat16 and float16): convert it (a complex one: nn.Parameter(torch.view_as_real(w)), "
            "and torch.view_as_complex(p) in forward), or pass its module in ignored_modules",
            name);
    return ZS_OK;
}

static bool is_lowered(const zs_unit_spec *spec, int64_t i, const zs_tensor_info *info)
{
    return info->dtype != ZS_BYTES && !(spec->keep != NULL && spec->keep[i]);
}

/* Dtypes of a parameter's computation and of its gradient on the wire; `keeps`: the parameter's own on the wire. */
static zs_precision precision_of(bool keeps, const zs_unit_spec *spec, int64_t i, const zs_tensor_info *info)
{
    zs_precision own = {info->dtype, info->dtype};
    if (!is_lowered(spec, i, info)) return own;
    if (spec->precision.compute != ZS_BYTES) own.compute = own.wire = spec->precision.compute;
    if (spec->precision.wire != ZS_BYTES) own.wire = spec->precision.wire;
    /* Sums are shared without another rounding, and sums of leaves are not rounded before they are complete. */
    if (keeps) own.wire = info->dtype;
    return own;
}

static zs_status find_flat(zs_unit *unit, const zs_tensor_info *info, zs_precision own, int *index)
{
    for (int f = 0; f < unit->n_flats; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (flat->dtype == info->dtype && flat->trainable == info->requires_grad &&
            flat->layout.itemsize == info->itemsize && flat->compute == own.compute && flat->wire == own.wire) {
            *index = f;
            return ZS_OK;
        }
    }
    if (unit->n_flats == ZS_MAX_FLATS)
        return ZS_FAIL(
            ZS_ERR_UNSUPPORTED,
            "unit '%s' has more than %d combinations of requires_grad and dtypes (of parameters, param_dtype, "
            "reduce_dtype); wrap its "
            "submodules as units of their own",
            zs_unit_label(unit->name), ZS_MAX_FLATS);
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
        ZS_TRY(check_param(spec, NULL, i, &info));
        ZS_TRY(find_flat(&scratch, &info, precision_of(false, spec, i, &info), &flat));
    }
    return ZS_OK;
}

static zs_status describe_params(zs_unit *unit, const zs_unit_spec *spec)
{
    const bool keeps = unit->record.is.replicated || unit->context->tree != NULL;
    for (int64_t i = 0; i < spec->n_params; i++) {
        zs_param *param = &unit->params[i];
        zs_tensor_info info;
        ZS_TRY(zs_tensor_describe(spec->tensors[i], &info));
        ZS_TRY(check_param(spec, zs_context_device(unit->context), i, &info));
        ZS_TRY(find_flat(unit, &info, precision_of(keeps, spec, i, &info), &param->flat));
        param->tensor = zs_tensor_new_weak(spec->tensors[i]);
        param->numel = info.numel;
        param->ndim = info.ndim;
        param->name = strdup(spec->names[i]);
        param->sizes = calloc((size_t)info.ndim + 1, sizeof *param->sizes);
        if (info.dense) param->strides = calloc((size_t)info.ndim + 1, sizeof *param->strides);
        if (param->name == NULL || param->sizes == NULL || (info.dense && param->strides == NULL))
            return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating parameter '%s'", spec->names[i]);
        memcpy(param->sizes, info.sizes, (size_t)info.ndim * sizeof *param->sizes);
        if (info.dense) memcpy(param->strides, info.strides, (size_t)info.ndim * sizeof *param->strides);
        unit->flats[param->flat].reordered |= info.dense && !info.contiguous;
    }
    return ZS_OK;
}

/* --- birth -------------------------------------------------------------------------------------------------------- */

static zs_status build(zs_unit *unit, const zs_unit_spec *spec)
{
    ZS_TRY(describe_params(unit, spec));
    ZS_TRY(zs_unit_lay_out(unit));
    if (spec->dry_run) return ZS_OK;
    ZS_TRY(zs_unit_take_memory(unit));
    ZS_TRY(zs_unit_take_values(unit));
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        ZS_TRY(zs_grad_set(param->tensor, NULL));
        ZS_TRY(zs_unit_bind_local(unit, param));
        if (zs_unit_reduces(unit)) ZS_TRY(unit->context->calls->hook_param(unit, i));
    }
    zs_offload_filled(unit);
    return ZS_OK;
}

/* Is any of the parameters computed with in another dtype or order than it has at rest? */
static bool changes(bool replicated, const zs_unit_spec *spec)
{
    for (int64_t i = 0; i < spec->n_params; i++) {
        zs_tensor_info info;
        if (zs_tensor_describe(spec->tensors[i], &info) != ZS_OK) continue; /* creating the unit reports it */
        if (precision_of(replicated, spec, i, &info).compute != info.dtype) return true;
        if (info.dense && !info.contiguous) return true;
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

zs_status zs_unit_new(zs_context *context, const zs_unit_spec *spec, zs_unit **out)
{
    zs_unit *unit = calloc(1, sizeof *unit);
    if (unit == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", zs_unit_label(spec->name));
    zs_refs_init(&unit->refs);
    unit->context = &zs_engine_retain((zs_engine *)context)->context;
    unit->strategy = spec->strategy;
    unit->code = context->grads_code;
    zs_traits is = {.replicated = spec->strategy == ZS_NO_SHARD || context->n_shards == 1,
                    .empty = spec->n_params == 0};
    is.stays = spec->strategy == ZS_SHARD_GRAD_OP;
    zs_offload_choose(&context->offload, unit, bytes_of(spec));
    is.fixed = is.replicated && !unit->offloads.params && !changes(is.replicated, spec);
    zs_record_init(&unit->record, is);
    unit->shard = is.replicated ? context->ranks.all->rank : context->shard;
    unit->n_params = spec->n_params;
    unit->name = strdup(spec->name);
    unit->sharded_message = zs_unit_message(spec->name);
    unit->params = calloc((size_t)spec->n_params + 1, sizeof *unit->params);
    zs_status status = ZS_OK;
    if (unit->name == NULL || unit->sharded_message == NULL || unit->params == NULL)
        status = ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", zs_unit_label(spec->name));
    ZS_THEN(status, build(unit, spec));
    ZS_THEN(status, zs_engine_add(zs_engine_of(unit), unit));
    if (!spec->dry_run && !zs_context_device(context)->ops->queues) zs_mem_heap_freed(bytes_of(spec));
    if (status != ZS_OK) {
        zs_unit_release(unit);
        return status;
    }
    *out = unit;
    return ZS_OK;
}

void zs_unit_set_strategy(zs_unit *unit, zs_strategy strategy)
{
    unit->strategy = strategy;
    unit->reshard_by_hand = true;
    zs_record_set_stays(&unit->record, strategy == ZS_SHARD_GRAD_OP);
    zs_context_replan(unit->context);
    zs_keep_gathered_choose(zs_engine_of(unit));
}
