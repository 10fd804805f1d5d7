/* hold.c - see hold.h. */
#include "unit/hold.h"

#include "unit/engine_facts.h"
#include "unit/usage.h"

/* Puts a copy under the full storage where it is a mapping; a slot is one already. Either is known as held. */
static zs_status hold_flat(zs_unit *unit, zs_flat *flat)
{
    if (flat->full_mem == NULL) {
        zs_mem *copy = NULL;
        size_t bytes = zs_flat_full_bytes(unit, flat);
        const zs_device *device = zs_engine_device(unit->engine);
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
    flat->full_mem->role = ZS_MEM_HELD;
    flat->full_mem->user = unit;
    return ZS_OK;
}

zs_status zs_hold(zs_unit *unit, bool exact)
{
    if (unit->held) return ZS_OK;
    ZS_TRY(exact ? zs_unit_unshard_exact(unit) : zs_unit_unshard(unit));
    zs_hold_mark(unit);
    zs_status status = ZS_OK;
    for (int f = 0; f < unit->n_flats && status == ZS_OK; f++)
        status = hold_flat(unit, &unit->flats[f]);
    if (status != ZS_OK) (void)zs_unit_reshard(unit, ZS_SHARDED);
    zs_engine_note_peak(unit->engine);
    return status;
}

static zs_status take_slice(const zs_unit *unit, const zs_param *param)
{
    const zs_flat *flat = &unit->flats[param->flat];
    size_t itemsize = flat->layout.itemsize;
    char *dst = zs_flat_home(flat) + (size_t)param->in_shard.begin * itemsize;
    const char *src = (char *)flat->full_mem->ptr + (size_t)(param->offset + param->owned.begin) * itemsize;
    size_t bytes = (size_t)param->owned.numel * itemsize;
    return zs_device_copy(zs_engine_device(unit->engine), ZS_LANE_COMPUTE, dst, src, bytes);
}

zs_status zs_hold_accept(zs_unit *unit, bool keep)
{
    if (!unit->held) return ZS_OK;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (!zs_tensor_alive(param->tensor)) continue;
        bool there = zs_tensor_on_storage(param->tensor, unit->flats[param->flat].full);
        if (keep && there) ZS_TRY(take_slice(unit, param));
        param->version = zs_tensor_version(param->tensor);
    }
    return ZS_OK;
}

zs_status zs_hold_check_forward(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats && unit->held && unit->exact; f++)
        if (unit->flats[f].compute != unit->flats[f].dtype)
            return ZS_FAIL(
                ZS_ERR_STATE,
                "unit '%s' was called within summon_full_params(), where its parameters are in their original dtype, "
                "not in the compute dtype (param_dtype); call the model outside summon_full_params()",
                zs_unit_label(unit->name));
    return ZS_OK;
}
