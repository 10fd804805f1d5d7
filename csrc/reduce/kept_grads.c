/* kept_grads.c - see kept_grads.h. */
#include "reduce/kept_grads.h"

#include "device/device.h"
#include "device/pending.h"
#include "unit/context.h"
#include "unit/offload.h"
#include "unit/unit.h"

static const zs_tensor *view_of(const zs_param *param, zs_view view)
{
    switch (view) {
    case ZS_VIEW_GRAD: return param->grad;
    case ZS_VIEW_SPARE: return param->spare_grad;
    case ZS_VIEW_LOCAL: return param->local;
    }
    return NULL;
}

static const zs_storage *storage_of(const zs_flat *flat, zs_view view)
{
    switch (view) {
    case ZS_VIEW_GRAD: return flat->grads;
    case ZS_VIEW_SPARE: return flat->spare_grads;
    case ZS_VIEW_LOCAL: return flat->local;
    }
    return NULL;
}

static bool is_shown(const zs_param *param, const zs_tensor *view)
{
    bool shown = false;
    return zs_tensor_alive(param->tensor) && zs_grad_is(param->tensor, view, &shown) == ZS_OK && shown;
}

bool zs_grads_are_kept(const zs_unit *unit, int f, zs_view which)
{
    const zs_storage *storage = storage_of(&unit->flats[f], which);
    int64_t views = 0;
    bool some_gone = false;
    for (int64_t i = 0; storage != NULL && i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        const zs_tensor *view = view_of(param, which);
        if (param->flat != f || view == NULL) continue;
        views++;
        if (is_shown(param, view)) continue;
        if (zs_tensor_is_kept(view)) return true;
        some_gone = true;
    }
    return some_gone && zs_storage_users(storage) > 1 + views;
}

void zs_kept_grads_free(zs_flat *flat, zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (&unit->flats[param->flat] != flat) continue;
        zs_tensor_free(param->spare_grad);
        param->spare_grad = NULL;
    }
    zs_storage_free(flat->spare_grads);
    if (flat->spare_mem != NULL) flat->spare_mem->user = NULL;
    zs_pending_settle(flat->spare_mem);
    zs_mem_release(flat->spare_mem);
    flat->spare_grads = NULL;
    flat->spare_mem = NULL;
}

/* Allocated separately, not from the pool: it is freed when the script drops its references. */
static zs_status make_spare(zs_unit *unit, int f)
{
    zs_flat *flat = &unit->flats[f];
    const zs_device *device = zs_context_device(unit->context);
    size_t bytes = zs_flat_own_bytes(unit, flat);
    zs_mem *mem = NULL;
    if (unit->offloads.grads)
        ZS_TRY(zs_disk_take(unit->offloads.disk, bytes, &mem));
    else
        ZS_TRY(zs_device_mem_lend(device, bytes, &mem));
    mem->role = unit->record.is.replicated ? ZS_MEM_PLAIN : ZS_MEM_GRAD_SHARD;
    mem->user = unit;
    flat->spare_mem = mem;
    ZS_TRY(zs_storage_new(device->where, bytes, "", &flat->spare_grads));
    ZS_TRY(zs_storage_fill(flat->spare_grads, flat->spare_mem, flat->spare_mem->ptr));
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (param->flat == f && param->grad != NULL)
            ZS_TRY(zs_unit_new_grad_view(unit, param, flat->spare_grads, &param->spare_grad));
    }
    return ZS_OK;
}

static void take_turns(zs_unit *unit, int f)
{
    zs_flat *flat = &unit->flats[f];
    zs_mem *mem = flat->grad_mem;
    zs_storage *storage = flat->grads;
    flat->grad_mem = flat->spare_mem;
    flat->grads = flat->spare_grads;
    flat->spare_mem = mem;
    flat->spare_grads = storage;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (param->flat != f) continue;
        zs_tensor *grad = param->grad;
        param->grad = param->spare_grad;
        param->spare_grad = grad;
    }
}

/* Reduced gradients below unreduced ones of no_sync() are no parameter's .grad now, but count. */
static bool has_below(const zs_unit *unit, int f)
{
    for (int64_t i = 0; i < unit->n_params; i++)
        if (unit->params[i].flat == f && unit->params[i].below) return true;
    return false;
}

static zs_status renew_flat(zs_unit *unit, int f)
{
    zs_flat *flat = &unit->flats[f];
    if (zs_grads_are_kept(unit, f, ZS_VIEW_SPARE)) zs_kept_grads_free(flat, unit);
    if (flat->spare_grads == NULL) {
        zs_status status = make_spare(unit, f);
        if (status != ZS_OK) {
            zs_kept_grads_free(flat, unit);
            return status;
        }
    }
    take_turns(unit, f);
    unit->grads_held = true;
    if (flat->spare_mem == NULL) { /* a step in backward has freed it */
        zs_kept_grads_free(flat, unit);
        return ZS_OK;
    }
    if (!has_below(unit, f)) return ZS_OK;
    zs_pending_settle(flat->spare_mem);
    const void *before = flat->spare_mem->ptr;
    return zs_device_copy(zs_context_device(unit->context), ZS_STREAM_COMPUTE, flat->grad_mem->ptr, before,
                          flat->grad_mem->bytes);
}

zs_status zs_kept_grads_renew(zs_unit *unit)
{
    if (unit->stepping != NULL || unit->borrows) return ZS_OK; /* a unit that is stepped in backward shows no .grad */
    for (int f = 0; f < unit->n_flats; f++)
        if (zs_grads_are_kept(unit, f, ZS_VIEW_GRAD)) ZS_TRY(renew_flat(unit, f));
    return ZS_OK;
}
