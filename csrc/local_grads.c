/* local_grads.c - see local_grads.h. */
#include "local_grads.h"

static zs_status make_views(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        ZS_TRY(zs_storage_new(zs_layout_full_bytes(&flat->layout), "", &flat->local));
        ZS_TRY(zs_storage_fill(flat->local, unit->local, (char *)unit->local->ptr + flat->bucket_offset));
    }
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (param->grad == NULL) continue;
        const zs_storage *storage = unit->flats[param->flat].local;
        ZS_TRY(zs_tensor_new_on(storage, param->grad, param->offset, param->ndim, param->sizes, &param->local));
    }
    return ZS_OK;
}

zs_status zs_local_grads_new(zs_unit *unit)
{
    ZS_TRY(zs_mem_new_private(zs_unit_bucket_bytes(unit), &unit->local));
    unit->local->role = ZS_MEM_LOCAL_GRAD;
    unit->local->user = unit;
    zs_status status = make_views(unit);
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
    if (unit->local != NULL) unit->local->user = NULL; /* the user may hold views */
    zs_mem_release(unit->local);
    unit->local = NULL;
}

bool zs_local_grads_hide(zs_param *param)
{
    if (param->local == NULL || !zs_grad_is(param->tensor, param->local)) return false;
    zs_grad_set(param->tensor, NULL);
    return true;
}

void zs_local_grads_show(zs_param *param)
{
    zs_grad_set(param->tensor, param->local);
}
