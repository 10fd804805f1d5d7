/* local_grads.c - see local_grads.h. */
#include "reduce/local_grads.h"

#include "reduce/kept_grads.h"
#include "unit/context.h"

#include <math.h>
#include <stdatomic.h>

/* Units of this process that have local gradients. */
static _Atomic long holders;

bool zs_local_grads_any(void)
{
    return atomic_load(&holders) > 0;
}

static zs_status make_views(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        size_t bytes = zs_layout_full_bytes(&flat->layout);
        ZS_TRY(zs_storage_new(zs_context_device(unit->context)->where, bytes, "", &flat->local));
        ZS_TRY(zs_storage_fill(flat->local, unit->local, (char *)unit->local->ptr + flat->local_offset));
    }
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (param->grad == NULL) continue;
        const zs_flat *flat = &unit->flats[param->flat];
        zs_place place = {flat->local, param->offset, param->ndim, param->sizes, flat->dtype, NULL};
        ZS_TRY(zs_tensor_new_on(&place, param->grad, &param->local));
    }
    return ZS_OK;
}

zs_status zs_local_grads_new(zs_unit *unit)
{
    ZS_TRY(zs_device_mem_new(zs_context_device(unit->context), zs_unit_local_bytes(unit), &unit->local));
    unit->local->role = ZS_MEM_LOCAL_GRAD;
    unit->local->user = unit;
    atomic_fetch_add(&holders, 1);
    zs_status status = make_views(unit);
    unit->context->calls->note_peak(unit->context);
    if (status != ZS_OK) zs_local_grads_free(unit);
    return status;
}

void zs_local_grads_free(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_tensor_free(unit->params[i].local);
        unit->params[i].local = NULL;
    }
    for (int f = 0; f < unit->n_flats; f++) {
        zs_storage_free(unit->flats[f].local);
        unit->flats[f].local = NULL;
    }
    if (unit->local == NULL) return;
    unit->local->user = NULL; /* the user may hold views */
    zs_mem_release(unit->local);
    unit->local = NULL;
    atomic_fetch_sub(&holders, 1);
}

/* A parameter's local gradient: is it `.grad`, and unchanged by the user since it was shown? */
typedef struct seen {
    bool shown, same;
} seen;

static seen look_at(const zs_param *param)
{
    seen found = {0};
    if (param->local == NULL || !zs_tensor_alive(param->tensor)) return found;
    (void)zs_grad_is(param->tensor, param->local, &found.shown);
    found.same = zs_tensor_version(param->local) == param->shown;
    return found;
}

/* Moves those that are shown to the new memory. */
static zs_status take_over(zs_unit *unit, const seen *before)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        /* NOLINTNEXTLINE(clang-analyzer-core.uninitialized.Branch): a unit keeps its number of parameters */
        if (!before[i].shown) continue;
        ZS_TRY(zs_grad_set(param->tensor, param->local));
        param->shown = zs_tensor_version(param->local) + !before[i].same;
    }
    return ZS_OK;
}

static zs_status move(zs_unit *unit)
{
    const zs_device *device = zs_context_device(unit->context);
    zs_mem *before = zs_mem_retain(unit->local);
    seen was[unit->n_params];
    for (int64_t i = 0; i < unit->n_params; i++)
        was[i] = look_at(&unit->params[i]);
    zs_local_grads_free(unit);
    zs_status status = zs_local_grads_new(unit);
    ZS_THEN(status, zs_device_copy(device, ZS_STREAM_COMPUTE, unit->local->ptr, before->ptr, before->bytes));
    ZS_THEN(status, take_over(unit, was));
    zs_mem_release(before);
    if (unit->local == NULL) zs_record_forget_local(&unit->record); /* no memory: what .grad shows is the user's */
    return status;
}

zs_status zs_local_grads_renew(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats && unit->local != NULL; f++)
        if (zs_grads_are_kept(unit, f, ZS_VIEW_LOCAL)) return move(unit);
    return ZS_OK;
}

zs_numbers zs_local_grads_of(const zs_unit *unit, const zs_param *param)
{
    const zs_flat *flat = &unit->flats[param->flat];
    char *at = (char *)unit->local->ptr + flat->local_offset + (size_t)param->offset * flat->layout.itemsize;
    return (zs_numbers){at, param->numel, flat->dtype};
}

static zs_status is_zero(const zs_unit *unit, const zs_param *param, bool *zero)
{
    const zs_numbers numbers = zs_local_grads_of(unit, param);
    double largest = 0;
    ZS_TRY(zs_device_norm(zs_context_device(unit->context), &numbers, 1, (double)INFINITY, &largest));
    *zero = largest == 0;
    return ZS_OK;
}

zs_status zs_local_grads_hide(const zs_unit *unit, zs_param *param, bool *hidden)
{
    *hidden = false;
    if (param->local != NULL) ZS_TRY(zs_grad_is(param->tensor, param->local, hidden));
    if (!*hidden) return ZS_OK;
    ZS_TRY(zs_grad_set(param->tensor, NULL));
    if (!param->below || zs_tensor_version(param->local) == param->shown) return ZS_OK;
    bool zero = false;
    ZS_TRY(is_zero(unit, param, &zero));
    if (!zero)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "the .grad of parameter '%s' of unit '%s' was modified in place in no_sync(), but the gradient "
                       "of earlier backwards is already reduced and sharded, and was not modified with it; run all "
                       "backwards but the last in no_sync(), or modify gradients after the last",
                       param->name, zs_unit_label(unit->name));
    param->below = false;
    return ZS_OK;
}

zs_status zs_local_grads_show(zs_param *param)
{
    ZS_TRY(zs_grad_set(param->tensor, param->local));
    param->shown = zs_tensor_version(param->local);
    return ZS_OK;
}
