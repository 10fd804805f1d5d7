/* unit_bind.c - rebinds a unit's parameters, and gathers. Parameters that users moved: moved.c.
 *
 * Storage identity shows what happened. A parameter that is not on the storage that its unit bound it to was replaced
 * by the user; one whose version counter changed while its unit was FULL was written to in memory that is about to be
 * freed.
 */
#include "base/fold.h"
#include "device/device.h"
#include "pager/pager.h"
#include "unit/context.h"
#include "unit/offload.h"
#include "unit/unit.h"

#include <stdlib.h>

/* --- binding ------------------------------------------------------------------------------------------------------ */

/* Of which dtype the full buffer is now. */
static zs_dtype full_dtype(const zs_unit *unit, const zs_flat *flat)
{
    return zs_flat_is_lowered(unit, flat) ? flat->compute : flat->dtype;
}

static zs_status cast(const zs_unit *unit, const zs_flat *flat, void *dst, int64_t numel)
{
    zs_cast job = {dst, flat->mem.shard, numel, flat->compute, flat->dtype};
    return zs_device_cast(zs_context_device(unit->context), ZS_STREAM_COMPUTE, &job);
}

static zs_status cast_shard(const zs_unit *unit, const zs_flat *flat)
{
    ZS_TRY(zs_pager_want(flat->mem.shard, flat->mem.shard_bytes, ZS_PAGER_READ));
    zs_status status = zs_pager_want(flat->low.shard, flat->low.shard_bytes, ZS_PAGER_WRITE);
    if (status == ZS_OK) {
        status = cast(unit, flat, flat->low.shard, flat->layout.shard_numel);
        zs_pager_done(flat->low.shard, flat->low.shard_bytes);
    }
    zs_pager_done(flat->mem.shard, flat->mem.shard_bytes);
    return status;
}

zs_status zs_unit_cast(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].low.mem != NULL) ZS_TRY(cast_shard(unit, &unit->flats[f]));
    return ZS_OK;
}

bool zs_unit_has_casts(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].low.mem != NULL) return true;
    return false;
}

/* Does it come from all ranks, while a copy of another dtype is kept between steps? */
static bool comes_ordered(const zs_unit *unit, const zs_flat *flat, const zs_flat_mem *from)
{
    return !unit->record.is.replicated && flat->secondary.mem != NULL && from != &flat->secondary;
}

/* A gather fills slots that ranks share with equal bytes, and completes only with all of them; a gather of this rank
 * alone takes a private slot. */
static zs_status take_slot(const zs_unit *unit, const zs_flat *flat, const zs_flat_mem *from, zs_mem **slot)
{
    zs_arena *arena = unit->context->arena;
    size_t bytes = zs_flat_full_bytes(unit, flat);
    if (unit->record.is.replicated || comes_ordered(unit, flat, from)) return zs_arena_take_own(arena, bytes, slot);
    return zs_arena_take(arena, bytes, slot);
}

/* A gather into its slot. */
static zs_target target_of(const zs_unit *unit, const zs_flat *flat)
{
    return (zs_target){flat->full_mem, flat->full_mem->ptr, zs_flat_code(unit, flat), full_dtype(unit, flat)};
}

/* Begins to fill a slot: a gather, or where this rank has everything, a cast. */
static zs_status fill_slot(zs_unit *unit, zs_flat *flat, const zs_flat_mem *from)
{
    zs_comm *shard_group = unit->context->ranks.shard_group;
    zs_mem *slot = flat->full_mem;
    if (comes_ordered(unit, flat, from)) return zs_secondary_gather_exact(unit, flat, slot);
    if (!unit->record.is.replicated)
        return zs_comm_gather_start(shard_group, from, unit->name, target_of(unit, flat), &flat->gathering);
    if (zs_flat_is_lowered(unit, flat)) return cast(unit, flat, slot->ptr, zs_layout_full_numel(&flat->layout));
    const zs_device *device = zs_context_device(unit->context);
    return zs_device_copy(device, ZS_STREAM_COMPUTE, slot->ptr, flat->mem.shard, zs_layout_full_bytes(&flat->layout));
}

static zs_status begin_flat(zs_unit *unit, zs_flat *flat)
{
    const zs_flat_mem *from = zs_flat_source(unit, flat);
    ZS_TRY(zs_offload_want_flat(unit, flat));
    if (from->full != NULL) return ZS_OK;
    zs_mem *slot = NULL;
    ZS_TRY(take_slot(unit, flat, from, &slot));
    flat->full_mem = zs_mem_retain(slot);
    return fill_slot(unit, flat, from);
}

static zs_status finish_gather(const zs_unit *unit, zs_flat *flat)
{
    zs_gathering *gathering = flat->gathering;
    zs_comm *shard_group = unit->context->ranks.shard_group;
    flat->gathering = NULL;
    return gathering != NULL ? zs_comm_gather_finish(shard_group, gathering) : ZS_OK;
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
    /* Clearing drops bytes and sets a message; it can fail only for lack of memory for the message, after dropping the
     * bytes. */
    (void)zs_storage_clear(flat->full, unit->sharded_message);
    zs_offload_done_flat(flat);
    if (flat->full_mem == NULL) return;
    zs_arena_give(unit->context->arena, flat->full_mem);
    zs_mem_release(flat->full_mem);
    flat->full_mem = NULL;
}

static zs_status bind_full(zs_unit *unit, int64_t i)
{
    zs_param *param = &unit->params[i];
    zs_flat *flat = &unit->flats[param->flat];
    if (!zs_tensor_on_storage(param->tensor, flat->shard))
        return zs_moved_error(unit, param, "between forward and backward");
    zs_place place = {flat->full, param->offset, param->ndim, param->sizes, full_dtype(unit, flat), param->strides};
    ZS_TRY(zs_tensor_bind(param->tensor, &place));
    param->version = zs_tensor_version(param->tensor);
    param->watched = false;
    return unit->context->calls->hook_param(unit, i);
}

/* If some parameters are not row-major: writes the flat in their memory order, into a slot of this rank's. */
static zs_status put_in_order(zs_unit *unit, zs_flat *flat)
{
    zs_arena *arena = unit->context->arena;
    zs_mem *gathered = flat->full_mem, *slot = NULL;
    const char *from = gathered != NULL ? gathered->ptr : zs_flat_source(unit, flat)->full;
    ZS_TRY(zs_arena_take_own(arena, zs_flat_full_bytes(unit, flat), &slot));
    flat->full_mem = zs_mem_retain(slot);
    size_t itemsize = zs_flat_is_lowered(unit, flat) ? flat->compute_size : flat->layout.itemsize;
    zs_status status = zs_storage_fill(flat->full, slot, slot->ptr);
    for (int64_t i = 0; i < unit->n_params && status == ZS_OK; i++) {
        const zs_param *param = &unit->params[i];
        bool here = &unit->flats[param->flat] == flat && zs_tensor_alive(param->tensor);
        if (here) status = zs_tensor_write(param->tensor, from + (size_t)param->offset * itemsize);
    }
    if (gathered == NULL) return status;
    zs_arena_give(arena, gathered);
    zs_mem_release(gathered);
    return status;
}

/* --- what Python sees --------------------------------------------------------------------------------------------- */

/* The next code with the GIL shows them so. */
void zs_unit_show_full(zs_unit *unit, bool full)
{
    if (unit->py_owner == NULL || unit->bound_full == full) return;
    unit->bound_full = full;
    unit->context->n_stale_classes += zs_unit_class_is_current(unit) ? -1 : 1;
}

void zs_unit_set_py_owner(zs_unit *unit, void *py_owner)
{
    zs_unit_note_class(unit);
    unit->py_owner = py_owner;
}

void zs_unit_note_class(zs_unit *unit)
{
    if (!zs_unit_class_is_current(unit)) unit->context->n_stale_classes--;
    unit->shown_full = unit->bound_full;
}

/* --- gathering ---------------------------------------------------------------------------------------------------- */

zs_status zs_unit_cancel(zs_record *record)
{
    zs_unit *unit = zs_unit_of(record);
    zs_status status = ZS_OK;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (zs_tensor_alive(param->tensor) && zs_tensor_on_storage(param->tensor, unit->flats[param->flat].full))
            (void)zs_unit_bind_local(unit, param);
    }
    zs_unit_show_full(unit, false);
    for (int f = 0; f < unit->n_flats; f++) {
        ZS_ALSO(status, finish_gather(unit, &unit->flats[f]));
        clear_full_storage(unit, &unit->flats[f]);
    }
    return status;
}

zs_status zs_unit_gather(zs_unit *unit)
{
    zs_status status = ZS_OK;
    for (int f = 0; f < unit->n_flats && status == ZS_OK; f++)
        status = begin_flat(unit, &unit->flats[f]);
    if (status != ZS_OK) (void)zs_unit_cancel(&unit->record);
    return status;
}

zs_status zs_unit_bind(zs_unit *unit)
{
    zs_status status = ZS_OK;
    for (int f = 0; f < unit->n_flats && status == ZS_OK; f++)
        status = finish_flat(unit, &unit->flats[f]);
    for (int64_t i = 0; i < unit->n_params && status == ZS_OK; i++)
        if (zs_tensor_alive(unit->params[i].tensor)) status = bind_full(unit, i);
    for (int f = 0; f < unit->n_flats && status == ZS_OK; f++)
        if (unit->flats[f].reordered) status = put_in_order(unit, &unit->flats[f]);
    if (status == ZS_OK)
        zs_unit_show_full(unit, true);
    else
        (void)zs_unit_cancel(&unit->record);
    return status;
}

/* --- writes that leave no trace ----------------------------------------------------------------------------------- */

/* A digest of the parameter's elements, on any device. */
static zs_status digest(const zs_param *param, uint64_t *out)
{
    zs_tensor_info info;
    ZS_TRY(zs_tensor_describe(param->tensor, &info));
    size_t bytes = (size_t)info.numel * info.itemsize, words = bytes / sizeof(uint64_t);
    uint64_t *copy = calloc(words + 1, sizeof *copy);
    if (copy == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory looking at parameter '%s'", param->name);
    zs_status status = zs_tensor_read(param->tensor, 0, info.numel, copy, (zs_where){ZS_ON_CPU, 0});
    *out = 0;
    for (size_t i = 0; status == ZS_OK && i <= words; i++)
        *out = zs_fold(*out, copy[i]);
    free(copy);
    return status;
}

/* Puts a copy under the full storage where that is a mapping of the peers' shards, or a slot that they share. */
static zs_status copy_flat(zs_unit *unit, zs_flat *flat)
{
    zs_arena *arena = unit->context->arena;
    bool is_shared = false;
    (void)zs_arena_has(arena, flat->full_mem, &is_shared);
    if (flat->full_mem != NULL && !is_shared) return ZS_OK;
    zs_mem *shared = flat->full_mem;
    zs_mem *copy = NULL;
    size_t bytes = zs_flat_full_bytes(unit, flat);
    const zs_device *device = zs_context_device(unit->context);
    ZS_TRY(zs_device_mem_new(device, bytes, &copy));
    const char *from = shared != NULL ? shared->ptr : zs_flat_source(unit, flat)->full;
    zs_status status = zs_device_copy(device, ZS_STREAM_COMPUTE, copy->ptr, from, bytes);
    ZS_THEN(status, zs_storage_fill(flat->full, copy, copy->ptr));
    if (status != ZS_OK) {
        zs_mem_release(copy);
        return status;
    }
    if (shared != NULL) {
        zs_arena_give(arena, shared);
        zs_mem_release(shared);
    }
    flat->full_mem = copy; /* freed like a slot; the arena ignores it */
    return ZS_OK;
}

zs_status zs_unit_watch(zs_unit *unit, int64_t i)
{
    zs_param *param = &unit->params[i];
    if (!zs_unit_is_full(unit) || unit->record.is.replicated || param->watched) return ZS_OK;
    ZS_TRY(copy_flat(unit, &unit->flats[param->flat]));
    ZS_TRY(digest(param, &param->content));
    param->watched = true;
    return ZS_OK;
}

/* Has a script written to it by a `.data`? */
static zs_status check_watched(zs_param *param, bool *written)
{
    uint64_t now;
    if (!param->watched) return ZS_OK;
    param->watched = false;
    ZS_TRY(digest(param, &now));
    *written |= now != param->content;
    return ZS_OK;
}

/* --- sharded again ------------------------------------------------------------------------------------------------ */

static zs_status bind_sharded(zs_unit *unit, zs_param *param)
{
    zs_flat *flat = &unit->flats[param->flat];
    bool moved = !zs_tensor_on_storage(param->tensor, flat->full);
    bool written = !moved && zs_tensor_version(param->tensor) != param->version;
    zs_status looked = moved ? ZS_OK : check_watched(param, &written);
    ZS_TRY(zs_unit_bind_local(unit, param));
    ZS_TRY(looked);
    if (written) zs_secondary_spoil(unit);
    if (moved) return zs_moved_error(unit, param, "while it was unsharded");
    if (written)
        return ZS_FAIL(
            ZS_ERR_STATE,
            "parameter '%s' of unit '%s' was modified in place while it was unsharded (in its unit's forward or "
            "backward, also by p.data or Embedding(max_norm=...), or after unshard()), which each rank would do on its "
            "own; write to it between steps, where elementwise operations work; to write to it in a forward, make its "
            "module a unit of its own (auto_wrap_policy), and write before that is called",
            param->name, zs_unit_label(unit->name));
    return ZS_OK;
}

zs_status zs_unit_reshard(zs_unit *unit)
{
    zs_pinned_end(unit);
    zs_status status = ZS_OK;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (zs_tensor_alive(param->tensor)) ZS_ALSO(status, bind_sharded(unit, param));
    }
    zs_unit_show_full(unit, false);
    for (int f = 0; f < unit->n_flats; f++)
        clear_full_storage(unit, &unit->flats[f]);
    unit->exact = false;
    return status;
}

/* --- units that are pinned ---------------------------------------------------------------------------------------- */

void zs_unit_set_exact(zs_unit *unit, bool exact)
{
    unit->exact = exact;
}

zs_status zs_unit_copy_full(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++)
        ZS_TRY(copy_flat(unit, &unit->flats[f]));
    return ZS_OK;
}

static zs_status take_slice(const zs_unit *unit, const zs_param *param)
{
    const zs_flat *flat = &unit->flats[param->flat];
    const zs_device *device = zs_context_device(unit->context);
    size_t itemsize = flat->layout.itemsize;
    char *dst = zs_flat_home(flat) + (size_t)param->in_shard.begin * itemsize;
    if (flat->reordered)
        return zs_tensor_read(param->tensor, param->owned.begin, param->owned.numel, dst, device->where);
    const char *src = (char *)flat->full_mem->ptr + (size_t)(param->offset + param->owned.begin) * itemsize;
    size_t bytes = (size_t)param->owned.numel * itemsize;
    return zs_device_copy(device, ZS_STREAM_COMPUTE, dst, src, bytes);
}

zs_status zs_unit_accept(zs_unit *unit, bool keep)
{
    if (!unit->record.pinned) return ZS_OK;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (!zs_tensor_alive(param->tensor)) continue;
        bool there = zs_tensor_on_storage(param->tensor, unit->flats[param->flat].full);
        if (keep && there) ZS_TRY(take_slice(unit, param));
        param->version = zs_tensor_version(param->tensor);
        param->watched = false;
    }
    return ZS_OK;
}

zs_status zs_unit_read_param(const zs_unit *unit, int64_t i, void *dst, zs_where where)
{
    const zs_param *param = &unit->params[i];
    const zs_flat *flat = &unit->flats[param->flat];
    const char *base = zs_flat_source(unit, flat)->full;
    if (base == NULL && flat->full_mem != NULL) base = flat->full_mem->ptr;
    bool exact = !zs_flat_is_lowered(unit, flat) && zs_flat_code(unit, flat) == ZS_WIRE_EXACT;
    bool readable = zs_unit_is_full(unit) && exact;
    if (base == NULL || !readable)
        return ZS_FAIL(ZS_ERR_STATE, "unit '%s' is not unsharded", zs_unit_label(unit->name));
    bool moved = unit->record.pinned && !zs_tensor_on_storage(param->tensor, flat->full);
    if (moved) return zs_moved_error(unit, param, "while it was unsharded");
    /* A pinned unit has a copy, which a script may have written to. */
    if (unit->record.pinned || (flat->reordered && zs_flat_source(unit, flat)->full == NULL))
        return zs_tensor_read(param->tensor, 0, param->numel, dst, where);
    const zs_device *device = zs_context_device(unit->context);
    size_t begin = (size_t)param->offset * flat->layout.itemsize, bytes = (size_t)param->numel * flat->layout.itemsize;
    ZS_TRY(zs_device_copy(device, ZS_STREAM_COMPUTE, dst, base + begin, bytes));
    return where.type == ZS_ON_CPU ? zs_device_wait(device) : ZS_OK;
}
