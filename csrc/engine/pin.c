/* pin.c - see pin.h. */
#include "engine/pin.h"

#include "engine/engine.h"

/* Puts a copy under the full storage where it is a mapping; a slot is one already. Either is known as pinned. */
static zs_status pin_flat(zs_unit *unit, zs_flat *flat)
{
    if (flat->full_mem == NULL) {
        zs_mem *copy = NULL;
        size_t bytes = zs_flat_full_bytes(unit, flat);
        const zs_device *device = zs_home_device(unit->home);
        ZS_TRY(zs_device_mem_new(device, bytes, &copy));
        const char *from = zs_flat_source(unit, flat)->full;
        zs_status status = zs_device_copy(device, ZS_LANE_COMPUTE, copy->ptr, from, bytes);
        ZS_THEN(status, zs_storage_fill(flat->full, copy, copy->ptr));
        if (status != ZS_OK) {
            zs_mem_release(copy);
            return status;
        }
        flat->full_mem = copy; /* given back as a slot is, of which the arena then knows nothing */
    }
    flat->full_mem->role = ZS_MEM_PINNED;
    flat->full_mem->user = unit;
    return ZS_OK;
}

/* The full buffer is to be of the parameters' own dtype, or of the one that is computed with. */
static zs_status choose_dtype(zs_unit *unit, bool exact)
{
    bool lowered = false;
    for (int f = 0; f < unit->n_flats; f++)
        lowered |= unit->flats[f].compute != unit->flats[f].dtype;
    if (!exact || zs_unit_is_full(unit)) {
        if (!exact || !lowered || unit->exact) return ZS_OK;
        return ZS_FAIL(ZS_ERR_STATE,
                       "unit '%s' is unsharded in the compute dtype (param_dtype), by its forward or by unshard(), so "
                       "its full parameters cannot be read in their original dtype; read them outside the unit's "
                       "forward, or after reshard()",
                       zs_unit_label(unit->name));
    }
    zs_schedule_cancel(&unit->home->schedule, &unit->record); /* begun in the other dtype */
    unit->exact = true;
    return ZS_OK;
}

zs_status zs_engine_summon(zs_unit *unit, bool exact)
{
    ZS_TRY(choose_dtype(unit, exact));
    zs_status status = zs_schedule_unshard(&unit->home->schedule, &unit->record);
    if (status != ZS_OK) unit->exact = false;
    return status;
}

zs_status zs_engine_dismiss(zs_unit *unit)
{
    return zs_schedule_reshard(&unit->home->schedule, &unit->record);
}

static zs_status pin_flats(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++)
        ZS_TRY(pin_flat(unit, &unit->flats[f]));
    return ZS_OK;
}

zs_status zs_pin(zs_unit *unit, bool exact)
{
    if (unit->record.pinned) return ZS_OK;
    ZS_TRY(zs_engine_summon(unit, exact));
    zs_schedule_pin(&unit->record);
    zs_pinned_begin();
    zs_status status = pin_flats(unit);
    if (status != ZS_OK) (void)zs_engine_dismiss(unit);
    unit->home->calls->note_peak(unit->home);
    return status;
}

static zs_status take_slice(const zs_unit *unit, const zs_param *param)
{
    const zs_flat *flat = &unit->flats[param->flat];
    size_t itemsize = flat->layout.itemsize;
    char *dst = zs_flat_home(flat) + (size_t)param->in_shard.begin * itemsize;
    const char *src = (char *)flat->full_mem->ptr + (size_t)(param->offset + param->owned.begin) * itemsize;
    size_t bytes = (size_t)param->owned.numel * itemsize;
    return zs_device_copy(zs_home_device(unit->home), ZS_LANE_COMPUTE, dst, src, bytes);
}

zs_status zs_pin_accept(zs_unit *unit, bool keep)
{
    if (!unit->record.pinned) return ZS_OK;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (!zs_tensor_alive(param->tensor)) continue;
        bool there = zs_tensor_on_storage(param->tensor, unit->flats[param->flat].full);
        if (keep && there) ZS_TRY(take_slice(unit, param));
        param->version = zs_tensor_version(param->tensor);
    }
    return ZS_OK;
}

zs_status zs_pin_check_forward(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats && unit->record.pinned && unit->exact; f++)
        if (unit->flats[f].compute != unit->flats[f].dtype)
            return ZS_FAIL(
                ZS_ERR_STATE,
                "unit '%s' was called within summon_full_params(), where its parameters are in their original dtype, "
                "not in the compute dtype (param_dtype); call the model outside summon_full_params()",
                zs_unit_label(unit->name));
    return ZS_OK;
}
