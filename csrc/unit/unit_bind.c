/* unit_bind.c - what a unit's parameters point to: rebinding, gathering, and finding parameters that users moved.
 *
 * The one idea: storage identity tells everything. A parameter that no longer lies on the storage that its unit bound
 * it to was replaced by the user; one whose version counter moved while its unit was FULL was written to in a place
 * that is about to be given back.
 */
#include "device/device.h"
#include "pager/pager.h"
#include "unit/engine_facts.h"
#include "unit/held.h"
#include "unit/kept.h"
#include "unit/offload.h"
#include "unit/unit.h"

#include <string.h>

static bool allowed(const zs_unit *unit, zs_unit_state next)
{
    switch (unit->state) {
    case ZS_SHARDED: return next == ZS_GATHERING;
    case ZS_GATHERING: return next == ZS_FULL || next == ZS_SHARDED; /* SHARDED: the gather failed */
    case ZS_FULL: return next == ZS_SHARDED || next == ZS_REDUCING;
    case ZS_REDUCING: return next == ZS_SHARDED || next == ZS_GATHERING || (unit->fixed && next == ZS_FULL);
    }
    return false;
}

zs_status zs_unit_move(zs_unit *unit, zs_unit_state next)
{
    static const char *const names[] = {"SHARDED", "GATHERING", "FULL", "REDUCING"};
    if (!allowed(unit, next))
        return ZS_FAIL(ZS_ERR_STATE,
                       "internal error: unit '%s' cannot go from state %s to %s; please report this with a script that "
                       "reproduces it",
                       zs_unit_label(unit->name), names[unit->state], names[next]);
    unit->state = next;
    return ZS_OK;
}

/* --- binding ------------------------------------------------------------------------------------------------------- */

/* Of which dtype the full buffer is now. */
static zs_dtype full_dtype(const zs_unit *unit, const zs_flat *flat)
{
    return zs_flat_is_lowered(unit, flat) ? flat->compute : flat->dtype;
}

static zs_status cast(const zs_unit *unit, const zs_flat *flat, void *dst, int64_t numel)
{
    zs_cast job = {dst, flat->mem.shard, numel, flat->compute, flat->dtype};
    return zs_device_cast(zs_engine_device(unit->engine), ZS_LANE_COMPUTE, &job);
}

zs_status zs_unit_cast(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (flat->low.mem == NULL) continue;
        ZS_TRY(zs_pager_want(flat->mem.shard, flat->mem.shard_bytes, ZS_PAGER_READ));
        ZS_TRY(zs_pager_want(flat->low.shard, flat->low.shard_bytes, ZS_PAGER_WRITE));
        zs_status status = cast(unit, flat, flat->low.shard, flat->layout.shard_numel);
        zs_pager_done(flat->mem.shard, flat->mem.shard_bytes);
        zs_pager_done(flat->low.shard, flat->low.shard_bytes);
        ZS_TRY(status);
    }
    return ZS_OK;
}

/* Begins to fill a slot: a gather, or where this rank has everything, a cast. */
static zs_status fill_slot(zs_unit *unit, zs_flat *flat, const zs_flat_mem *from)
{
    zs_comm *near = zs_engine_ranks(unit->engine)->near;
    zs_mem *slot = flat->full_mem;
    if (!unit->replicated && flat->kept.mem != NULL && from != &flat->kept)
        return zs_kept_gather_exact(unit, flat, slot);
    if (!unit->replicated)
        return near->ops->gather_start(near, from, unit->name, (zs_target){slot, slot->ptr}, &flat->gathering);
    if (zs_flat_is_lowered(unit, flat)) return cast(unit, flat, slot->ptr, zs_layout_full_numel(&flat->layout));
    const zs_device *device = zs_engine_device(unit->engine);
    return zs_device_copy(device, ZS_LANE_COMPUTE, slot->ptr, flat->mem.shard, zs_layout_full_bytes(&flat->layout));
}

static zs_status begin_flat(zs_unit *unit, zs_flat *flat)
{
    const zs_flat_mem *from = zs_flat_source(unit, flat);
    ZS_TRY(zs_offload_want_flat(unit, flat));
    if (from->full != NULL) return ZS_OK;
    zs_mem *slot = NULL;
    ZS_TRY(zs_arena_take(zs_engine_arena(unit->engine), zs_flat_full_bytes(unit, flat), &slot));
    flat->full_mem = zs_mem_retain(slot);
    return fill_slot(unit, flat, from);
}

static zs_status finish_gather(const zs_unit *unit, zs_flat *flat)
{
    zs_gathering *gathering = flat->gathering;
    zs_comm *near = zs_engine_ranks(unit->engine)->near;
    flat->gathering = NULL;
    return gathering != NULL ? near->ops->gather_finish(near, gathering) : ZS_OK;
}

static zs_status finish_flat(zs_unit *unit, zs_flat *flat)
{
    const zs_flat_mem *from = zs_flat_source(unit, flat);
    ZS_TRY(finish_gather(unit, flat));
    if (from->full != NULL) return zs_storage_fill(flat->full, from->mem, from->full);
    zs_offload_done_flat(flat); /* it is in the slot now */
    return zs_storage_fill(flat->full, flat->full_mem, flat->full_mem->ptr);
}

static void clear_full_storage(zs_unit *unit, zs_flat *flat)
{
    /* Clearing only drops bytes and sets a message; it can fail on memory for that message alone, and then the old
     * bytes are gone all the same. */
    (void)zs_storage_clear(flat->full, unit->sharded_message);
    zs_offload_done_flat(flat);
    if (flat->full_mem == NULL) return;
    zs_arena_give(zs_engine_arena(unit->engine), flat->full_mem);
    zs_mem_release(flat->full_mem);
    flat->full_mem = NULL;
}

static zs_status moved_error(const zs_unit *unit, const zs_param *param, const char *when)
{
    return ZS_FAIL(
        ZS_ERR_STATE,
        "parameter '%s' of unit '%s' was replaced %s (by p.data = ..., .to() or load_state_dict(assign=True)); replace "
        "it outside of forward and backward, or convert the model before FSDP(...)",
        param->name, zs_unit_label(unit->name), when);
}

static zs_status bind_full(zs_unit *unit, int64_t i)
{
    zs_param *param = &unit->params[i];
    zs_flat *flat = &unit->flats[param->flat];
    if (!zs_tensor_on_storage(param->tensor, flat->shard))
        return moved_error(unit, param, "between forward and backward");
    zs_place place = {flat->full, param->offset, param->ndim, param->sizes, full_dtype(unit, flat)};
    ZS_TRY(zs_tensor_bind(param->tensor, &place));
    param->version = zs_tensor_version(param->tensor);
    return zs_engine_hook_param(unit, i);
}

zs_status zs_unit_unshard_exact(zs_unit *unit)
{
    bool lowered = false;
    for (int f = 0; f < unit->n_flats; f++)
        lowered |= unit->flats[f].compute != unit->flats[f].dtype;
    if (lowered && zs_unit_is_full(unit) && !unit->exact)
        return ZS_FAIL(ZS_ERR_STATE,
                       "unit '%s' is unsharded in the compute dtype (param_dtype), by its forward or by unshard(), so "
                       "its full parameters cannot be read in their original dtype; read them outside the unit's "
                       "forward, or after reshard()",
                       zs_unit_label(unit->name));
    zs_unit_cancel(unit); /* begun in the other dtype */
    unit->exact = true;
    zs_status status = zs_unit_unshard(unit);
    if (!zs_unit_is_full(unit)) unit->exact = false;
    return status;
}

/* Back to SHARDED from a gather, whatever came of it. */
static void give_up_gather(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (zs_tensor_alive(param->tensor) && zs_tensor_on_storage(param->tensor, unit->flats[param->flat].full))
            (void)zs_unit_bind_local(unit, param);
    }
    for (int f = 0; f < unit->n_flats; f++) {
        (void)finish_gather(unit, &unit->flats[f]);
        clear_full_storage(unit, &unit->flats[f]);
    }
    (void)zs_unit_move(unit, ZS_SHARDED);
}

zs_status zs_unit_begin(zs_unit *unit)
{
    if (unit->fixed || (unit->state != ZS_SHARDED && unit->state != ZS_REDUCING)) return ZS_OK;
    ZS_TRY(zs_unit_move(unit, ZS_GATHERING));
    zs_status status = ZS_OK;
    for (int f = 0; f < unit->n_flats && status == ZS_OK; f++)
        status = begin_flat(unit, &unit->flats[f]);
    if (status != ZS_OK) give_up_gather(unit);
    return status;
}

void zs_unit_cancel(zs_unit *unit)
{
    if (unit->state == ZS_GATHERING) give_up_gather(unit);
}

zs_status zs_unit_unshard(zs_unit *unit)
{
    if (zs_unit_is_full(unit)) return ZS_OK;
    ZS_TRY(zs_unit_begin(unit));
    zs_status status = ZS_OK;
    for (int f = 0; f < unit->n_flats && status == ZS_OK; f++)
        status = finish_flat(unit, &unit->flats[f]);
    for (int64_t i = 0; i < unit->n_params && status == ZS_OK; i++)
        if (zs_tensor_alive(unit->params[i].tensor)) status = bind_full(unit, i);
    if (status == ZS_OK) return zs_unit_move(unit, ZS_FULL);
    give_up_gather(unit);
    return status;
}

static zs_status bind_sharded(zs_unit *unit, zs_param *param)
{
    zs_flat *flat = &unit->flats[param->flat];
    bool moved = !zs_tensor_on_storage(param->tensor, flat->full);
    bool written = !moved && zs_tensor_version(param->tensor) != param->version;
    ZS_TRY(zs_unit_bind_local(unit, param));
    if (written) zs_kept_spoil(unit);
    if (moved) return moved_error(unit, param, "while it was unsharded");
    if (written)
        return ZS_FAIL(
            ZS_ERR_STATE,
            "parameter '%s' of unit '%s' was modified in place while it was unsharded (in its unit's forward or "
            "backward, or after unshard()), which each rank would do on its own; modify the sharded parameter between "
            "steps instead: elementwise operations work there (Embedding(max_norm=...) modifies its weight in forward)",
            param->name, zs_unit_label(unit->name));
    return ZS_OK;
}

zs_status zs_unit_reshard(zs_unit *unit, zs_unit_state next)
{
    if (unit->fixed) return next == unit->state || next == ZS_SHARDED ? ZS_OK : zs_unit_move(unit, next);
    if (unit->state != ZS_FULL) return ZS_OK;
    zs_hold_end(unit);
    zs_status status = ZS_OK;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (!zs_tensor_alive(param->tensor)) continue;
        ZS_ALSO(status, bind_sharded(unit, param));
    }
    for (int f = 0; f < unit->n_flats; f++)
        clear_full_storage(unit, &unit->flats[f]);
    unit->exact = false;
    ZS_TRY(zs_unit_move(unit, next));
    return status;
}

/* --- parameters that users moved ------------------------------------------------------------------------------------- */

static bool same_sizes(const zs_tensor_info *info, int ndim, const int64_t *sizes)
{
    return info->ndim == ndim && memcmp(info->sizes, sizes, (size_t)ndim * sizeof *sizes) == 0;
}

static zs_status write_back_param(zs_unit *unit, zs_param *param)
{
    zs_flat *flat = &unit->flats[param->flat];
    zs_tensor_info info;
    ZS_TRY(zs_tensor_describe(param->tensor, &info));
    const zs_device *device = zs_engine_device(unit->engine);
    bool here = zs_same_where(info.where, device->where);
    if (info.dtype != flat->dtype || info.itemsize != flat->layout.itemsize || !here || !info.strided)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "parameter '%s' of unit '%s' changed its dtype or device after FSDP(...) (by .to(), .double(), "
                       ".half() or p.data = ...); convert the model before FSDP(...)",
                       param->name, zs_unit_label(unit->name));
    char *dst = zs_flat_home(flat) + (size_t)param->in_shard.begin * flat->layout.itemsize;
    bool whole = same_sizes(&info, param->ndim, param->sizes);
    if (!whole && info.numel != param->owned.numel)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "parameter '%s' of unit '%s' was replaced by a tensor of %lld elements: expected its full shape "
                       "(%lld elements) or this rank's shard (%lld elements)",
                       param->name, zs_unit_label(unit->name), (long long)info.numel, (long long)param->numel,
                       (long long)param->owned.numel);
    int64_t begin = whole ? param->owned.begin : 0;
    ZS_TRY(zs_tensor_read(param->tensor, begin, param->owned.numel, dst, device->where));
    return zs_unit_bind_local(unit, param);
}

zs_status zs_unit_write_back(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        const zs_flat *flat = &unit->flats[param->flat];
        if (!zs_tensor_alive(param->tensor)) continue;
        const zs_storage *home = zs_unit_is_full(unit) ? flat->full : flat->shard;
        if (zs_tensor_on_storage(param->tensor, home)) continue;
        if (unit->held) return moved_error(unit, param, "after unshard()");
        ZS_TRY(write_back_param(unit, param));
    }
    return ZS_OK;
}

zs_status zs_unit_read_param(const zs_unit *unit, int64_t i, void *dst, zs_where where)
{
    const zs_param *param = &unit->params[i];
    const zs_flat *flat = &unit->flats[param->flat];
    const char *base = zs_flat_source(unit, flat)->full;
    if (base == NULL && flat->full_mem != NULL) base = flat->full_mem->ptr;
    bool readable = zs_unit_is_full(unit) && !zs_flat_is_lowered(unit, flat);
    if (base == NULL || !readable)
        return ZS_FAIL(ZS_ERR_STATE, "unit '%s' is not unsharded", zs_unit_label(unit->name));
    const zs_device *device = zs_engine_device(unit->engine);
    size_t begin = (size_t)param->offset * flat->layout.itemsize, bytes = (size_t)param->numel * flat->layout.itemsize;
    ZS_TRY(zs_device_copy(device, ZS_LANE_COMPUTE, dst, base + begin, bytes));
    return where.type == ZS_ON_CPU ? zs_device_wait(device) : ZS_OK;
}
