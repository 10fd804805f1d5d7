/* moved.c - parameters that scripts have moved: by `p.data = t`, load_state_dict(assign=True), .to().
 *
 * A parameter's memory stays where it is, as peers map it, so the new values are written there when the next pass
 * begins. Other tensors that lie there, such as an earlier `p.data`, would be overwritten: an error. The storage
 * then has more users than the unit knows.
 */
#include "unit/unit.h"

#include "device/device.h"
#include "unit/context.h"

#include <stdio.h>
#include <string.h>

zs_status zs_moved_error(const zs_unit *unit, const zs_param *param, const char *when)
{
    return ZS_FAIL(
        ZS_ERR_STATE,
        "parameter '%s' of unit '%s' was replaced %s (by p.data = ..., .to() or load_state_dict(assign=True)); write "
        "to it in place, replace it outside of forward and backward, or convert or resize the model before FSDP(...)",
        param->name, zs_unit_label(unit->name), when);
}

/* The current storage of a unit's parameters. */
static const zs_storage *storage_of(const zs_unit *unit, const zs_param *param)
{
    const zs_flat *flat = &unit->flats[param->flat];
    return zs_unit_is_full(unit) ? flat->full : flat->shard;
}

static bool is_moved(const zs_unit *unit, const zs_param *param)
{
    if (!zs_tensor_alive(param->tensor)) return false;
    zs_place place = {.storage = storage_of(unit, param), .offset = param->in_shard.begin, .ndim = param->ndim};
    if (zs_unit_is_full(unit) && !unit->record.is.fixed) {
        place.offset = param->offset;
        place.strides = param->strides;
    }
    return !zs_tensor_lies_at(param->tensor, &place);
}

bool zs_unit_is_moved(const zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++)
        if (is_moved(unit, &unit->params[i])) return true;
    return false;
}

/* Number of the storage's users that the unit knows. */
static int64_t known_users(const zs_unit *unit, const zs_storage *storage)
{
    int64_t n = 1;
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        n += storage_of(unit, param) == storage && zs_tensor_alive(param->tensor) && !is_moved(unit, param);
    }
    return n;
}

/* Fails if the parameter has left memory that others may use. */
static zs_status check_left_memory(const zs_unit *unit, const zs_param *param)
{
    bool at_rest = !zs_unit_is_full(unit) || unit->record.is.fixed;
    const zs_storage *storage = storage_of(unit, param);
    if (!at_rest || zs_storage_users(storage) <= known_users(unit, storage)) return ZS_OK;
    return ZS_FAIL(
        ZS_ERR_SHARD,
        "parameter '%s' of unit '%s' was replaced (by p.data = ...), but another tensor still uses memory of "
        "this unit's parameters, such as backup = p.data, and may be overwritten: back up a copy instead, "
        "backup = p.data.clone(), or delete that tensor",
        param->name, zs_unit_label(unit->name));
}

static bool same_sizes(const zs_tensor_info *info, int ndim, const int64_t *sizes)
{
    return info->ndim == ndim && memcmp(info->sizes, sizes, (size_t)ndim * sizeof *sizes) == 0;
}

/* Does it have all of this rank's shard along its first dimension? Elements in another shape are in another order. */
static bool is_shard(const zs_unit *unit, const zs_param *param, const zs_tensor_info *info)
{
    if (unit->record.is.replicated || info->numel != param->owned.numel) return false;
    return info->ndim > 0 ? info->sizes[0] == info->numel : param->ndim == 0;
}

static void print_shape(const zs_tensor_info *info, char *text, size_t room)
{
    size_t used = (size_t)snprintf(text, room, "(");
    for (int d = 0; d < info->ndim && d < ZS_MAX_DIM && used < room; d++)
        used += (size_t)snprintf(text + used, room - used, d > 0 ? ", %lld" : "%lld", (long long)info->sizes[d]);
    if (used < room) snprintf(text + used, room - used, info->ndim == 1 ? ",)" : ")");
}

static zs_status shape_error(const zs_unit *unit, const zs_param *param, const zs_tensor_info *info)
{
    char found[128], wanted[128], shard[80] = "";
    zs_tensor_info full = {.ndim = param->ndim};
    memcpy(full.sizes, param->sizes, (size_t)param->ndim * sizeof *param->sizes);
    print_shape(info, found, sizeof found);
    print_shape(&full, wanted, sizeof wanted);
    if (!unit->record.is.replicated)
        snprintf(shard, sizeof shard, ", or in one dimension this rank's shard of %lld elements",
                 (long long)param->owned.numel);
    return ZS_FAIL(
        ZS_ERR_VALUE,
        "parameter '%s' of unit '%s' was replaced (by p.data = ...) by a tensor of shape %s: expected its full "
        "shape %s%s",
        param->name, zs_unit_label(unit->name), found, wanted, shard);
}

static zs_status write_back_param(zs_unit *unit, zs_param *param)
{
    zs_flat *flat = &unit->flats[param->flat];
    zs_tensor_info info;
    ZS_TRY(zs_tensor_describe(param->tensor, &info));
    const zs_device *device = zs_context_device(unit->context);
    bool here = zs_same_where(info.where, device->where);
    if (info.dtype != flat->dtype || info.itemsize != flat->layout.itemsize || !here || !info.strided)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "parameter '%s' of unit '%s' changed its dtype or device after FSDP(...) (by .to(), .double(), "
                       ".half() or p.data = ...); convert the model before FSDP(...), or back; for files in another "
                       "dtype use zshard.save(path, model, dtype=...), or cast the tensors of state_dict()",
                       param->name, zs_unit_label(unit->name));
    if (info.numel > 0 && zs_tensor_mem(param->tensor) != NULL)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "parameter '%s' of unit '%s' was given the memory of another parameter or gradient (by p.data = "
                       "q.data), and FSDP cannot let two share it: give it a copy (p.data = q.data.clone()), or, to "
                       "tie two parameters, make them one nn.Parameter before FSDP(...)",
                       param->name, zs_unit_label(unit->name));
    char *dst = zs_flat_home(flat) + (size_t)param->in_shard.begin * flat->layout.itemsize;
    bool whole = same_sizes(&info, param->ndim, param->sizes);
    if (!whole && !is_shard(unit, param, &info)) return shape_error(unit, param, &info);
    int64_t begin = whole ? param->owned.begin : 0;
    ZS_TRY(zs_tensor_read(param->tensor, begin, param->owned.numel, dst, device->where));
    return zs_unit_bind_local(unit, param);
}

zs_status zs_unit_write_back(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        if (!is_moved(unit, param)) continue;
        if (unit->record.pinned) return zs_moved_error(unit, param, "after unshard()");
        ZS_TRY(check_left_memory(unit, param));
    }
    for (int64_t i = 0; i < unit->n_params; i++)
        if (is_moved(unit, &unit->params[i])) ZS_TRY(write_back_param(unit, &unit->params[i]));
    return ZS_OK;
}
