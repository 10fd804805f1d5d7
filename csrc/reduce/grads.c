/* grads.c - see grads.h. */
#include "reduce/grads.h"

#include "base/bits.h"
#include "device/pending.h"
#include "reduce/grad_memory.h"
#include "reduce/kept_grads.h"
#include "reduce/leaves.h"
#include "reduce/local_grads.h"
#include "reduce/squares.h"
#include "unit/context.h"
#include "unit/unit.h"

#include <string.h>

/* --- the beginning of a backward ---------------------------------------------------------------------------------- */

static zs_status set_aside(zs_unit *unit, zs_param *param)
{
    zs_grad_info grad;
    ZS_TRY(zs_grad_describe(param->tensor, &grad));
    param->has_grad = grad.defined;
    if (!grad.defined) return ZS_OK;
    zs_pending_settle(grad.mem);
    const zs_flat *flat = &unit->flats[param->flat];
    bool shown = false;
    ZS_TRY(zs_grad_is(param->tensor, param->grad, &shown));
    if (!shown) {
        bool here = zs_same_where(grad.where, zs_context_device(unit->context)->where);
        if (!grad.dense || !here || grad.dtype != flat->dtype || grad.numel != param->owned.numel)
            return ZS_FAIL(ZS_ERR_VALUE,
                           "parameter '%s' of unit '%s' has a .grad of %lld elements that does not match this rank's "
                           "shard (a dense tensor of %lld elements, with the parameter's dtype and device); set .grad "
                           "to None before backward",
                           param->name, zs_unit_label(unit->name), (long long)grad.numel,
                           (long long)param->owned.numel);
        ZS_TRY(zs_grad_memory_take(unit));
        char *dst = (char *)flat->grad_mem->ptr + (size_t)param->in_shard.begin * flat->layout.itemsize;
        size_t bytes = (size_t)grad.numel * flat->layout.itemsize;
        ZS_TRY(zs_device_copy(zs_context_device(unit->context), ZS_STREAM_COMPUTE, dst, grad.data, bytes));
    }
    return zs_grad_set(param->tensor, NULL);
}

/* Prepares one parameter for a new gradient: .grad becomes None, and the old one is kept. */
static zs_status put_away(zs_unit *unit, int64_t i)
{
    zs_param *param = &unit->params[i];
    bool hidden;
    ZS_TRY(zs_local_grads_hide(unit, param, &hidden));
    param->has_grad = param->below;
    param->below = false;
    if (hidden) return ZS_OK;
    if (unit->local != NULL) zs_clear_bit(unit->used, i); /* zero_grad() since: the local sum is dropped */
    return set_aside(unit, param);
}

/* Prepares parameter `i`; `expected` counts it. */
static zs_status ready_param(zs_unit *unit, int64_t i, int64_t arriving, zs_expected *expected)
{
    zs_param *param = &unit->params[i];
    param->has_grad = param->reduced = param->held = false;
    if (!zs_tensor_alive(param->tensor)) return ZS_OK;
    bool wanted = zs_tensor_requires_grad(param->tensor);
    expected->has_frozen |= !wanted;
    if (param->grad == NULL) return ZS_OK;
    expected->n_wanted += wanted;
    /* Replicated gradients accumulate in place, as with DDP: shapes match. */
    if (!unit->record.is.replicated && i != arriving) ZS_TRY(put_away(unit, i));
    zs_grad_info grad = {0};
    if (unit->record.is.replicated) ZS_TRY(zs_grad_describe(param->tensor, &grad));
    param->held = param->has_grad || grad.defined;
    return ZS_OK;
}

zs_status zs_grads_begin(zs_record *record, int64_t arriving, zs_expected *expected)
{
    zs_unit *unit = zs_unit_of(record);
    *expected = (zs_expected){.known = unit->in_backward};
    if (unit->in_backward) return ZS_OK;
    unit->in_backward = true;
    zs_squares_begin(unit);
    ZS_TRY(zs_kept_grads_renew(unit));
    ZS_TRY(zs_local_grads_renew(unit));
    if (unit->local != NULL) memset(unit->arrived, 0, zs_unit_bitmap_words(unit) * sizeof *unit->arrived);
    for (int64_t i = 0; i < unit->n_params; i++)
        ZS_TRY(ready_param(unit, i, arriving, expected));
    zs_grad_memory_reuse(unit);
    for (int f = 0; f < unit->n_flats; f++) /* of gradients that were dropped */
        zs_pending_drop(unit->flats[f].grad_mem);
    return ZS_OK;
}

/* --- its end ------------------------------------------------------------------------------------------------------ */

/* Sets .grad to a new view of the storage. */
static zs_status show(const zs_unit *unit, const zs_param *param, const zs_storage *given)
{
    zs_tensor *view = NULL;
    ZS_TRY(zs_unit_new_grad_view(unit, param, given, &view));
    zs_status status = zs_grad_set(param->tensor, view);
    zs_tensor_free(view);
    return status;
}

/* Full gradients belong to the script, and go when it drops them. */
static zs_status give_away(zs_unit *unit)
{
    zs_storage *given[ZS_MAX_FLATS] = {NULL};
    zs_status status = ZS_OK;
    for (int f = 0; f < unit->n_flats && status == ZS_OK; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (flat->grad_mem == NULL) continue;
        status = zs_storage_new(zs_context_device(unit->context)->where, flat->grad_mem->bytes, "", &given[f]);
        ZS_THEN(status, zs_storage_fill(given[f], flat->grad_mem, flat->grad_mem->ptr));
    }
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (status == ZS_OK && param->has_grad && given[param->flat] != NULL && zs_tensor_alive(param->tensor))
            status = show(unit, param, given[param->flat]);
        param->has_grad = false;
    }
    for (int f = 0; f < unit->n_flats; f++)
        zs_storage_free(given[f]);
    zs_grad_memory_clear(unit, "");
    unit->in_backward = false;
    return status;
}

zs_status zs_grads_hand_out(zs_unit *unit)
{
    zs_status status = ZS_OK;
    if (unit->record.is.replicated && !unit->borrows && !unit->offloads.grads) return give_away(unit);
    int64_t shown = 0;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (!zs_tensor_alive(param->tensor)) continue;
        /* If the unit took no part, the user may have dropped them meanwhile. */
        bool local = unit->in_backward && param->local != NULL && zs_get_bit(unit->used, i);
        shown += param->has_grad;
        zs_status one = ZS_OK;
        if (local)
            one = zs_local_grads_show(param);
        else if (param->has_grad)
            one = zs_grad_set(param->tensor, param->grad);
        ZS_ALSO(status, one);
        if (unit->in_backward) param->below = local && param->has_grad;
        param->has_grad = false;
    }
    if (unit->in_backward) zs_squares_end(unit);
    zs_grad_memory_shown(unit, shown);
    unit->in_backward = false;
    return status;
}

bool zs_grads_undo(zs_unit *unit)
{
    bool spoiled = false;
    if (unit->in_backward) zs_squares_begin(unit);
    for (int64_t i = 0; i < unit->n_params && unit->in_backward; i++) {
        zs_param *param = &unit->params[i];
        bool packed = unit->record.is.replicated && param->grad != NULL && zs_get_bit(unit->used, i);
        if (!param->reduced && !packed) continue;
        spoiled |= param->held; /* the earlier gradient is incomplete without the sum added to it */
        param->has_grad = param->held;
        param->reduced = false;
    }
    return spoiled;
}

zs_status zs_grads_deliver(zs_record *record)
{
    zs_unit *unit = zs_unit_of(record);
    zs_status status = zs_grads_hand_out(unit);
    ZS_ALSO(status, zs_leaves_end(unit));
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        bool run = param->reduced && zs_tensor_alive(param->tensor) && zs_hook_has_users(param->tensor);
        if (run && status == ZS_OK) {
            unit->context->calls->show(unit->context);
            status = zs_hook_run_users(param->tensor);
        }
        param->has_grad = param->reduced = false;
    }
    return status;
}
