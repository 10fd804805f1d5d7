/* reduce.c - see reduce.h. */
#include "unit/reduce.h"

#include "base/bits.h"
#include "unit/bucket.h"
#include "unit/in_backward.h"
#include "unit/local_grads.h"
#include "unit/schedule.h"

#include <stdlib.h>
#include <string.h>

static void clear_bits(const zs_unit *unit, uint64_t *bits)
{
    memset(bits, 0, unit->used_words * sizeof *bits);
}

static zs_status take_bucket(zs_unit *unit)
{
    zs_bucket_pool *pool = zs_engine_buckets(unit->engine);
    ZS_TRY(
        zs_bucket_drain(pool, unit, ZS_WAIT)); /* a second round in one backward goes on top of the first one's sum */
    ZS_TRY(zs_bucket_settle(pool, unit));
    return zs_bucket_take(pool, unit, zs_unit_bucket_bytes(unit));
}

/* Counts from nothing which gradients have come. */
static void expect_all(zs_unit *unit)
{
    clear_bits(unit, unit->arrived);
    unit->n_arrived = 0;
}

/* Makes room for gradients: a bucket, or where they stay local, memory for that. */
static zs_status open_round(zs_unit *unit)
{
    if (unit->bucket != NULL || unit->local != NULL) return ZS_OK;
    ZS_TRY(unit->syncs ? take_bucket(unit) : zs_local_grads_new(unit));
    clear_bits(unit, unit->used);
    expect_all(unit);
    return ZS_OK;
}

/* --- packing ------------------------------------------------------------------------------------------------------------ */

/* Where the round that is being packed has its gradient. */
static char *in_round(const zs_unit *unit, const zs_param *param)
{
    const zs_flat *flat = &unit->flats[param->flat];
    char *base = unit->local != NULL ? unit->local->ptr : unit->bucket->bucket.ptr;
    return base + flat->bucket_offset + (size_t)param->offset * flat->wire_size;
}

static zs_status set_aside(zs_unit *unit, zs_param *param)
{
    zs_grad_info grad;
    ZS_TRY(zs_grad_describe(param->tensor, &grad));
    param->has_grad = grad.defined;
    if (!grad.defined) return ZS_OK;
    const zs_flat *flat = &unit->flats[param->flat];
    bool shown = false;
    ZS_TRY(zs_grad_is(param->tensor, param->grad, &shown));
    if (!shown) {
        bool here = zs_same_where(grad.where, zs_engine_device(unit->engine)->where);
        if (!grad.dense || !here || grad.dtype != flat->dtype || grad.numel != param->owned.numel)
            return ZS_FAIL(ZS_ERR_VALUE,
                           "parameter '%s' of unit '%s' has a .grad of %lld elements that does not match this rank's "
                           "shard (a dense tensor of %lld elements, with the parameter's dtype and device); set .grad "
                           "to None before backward",
                           param->name, zs_unit_label(unit->name), (long long)grad.numel,
                           (long long)param->owned.numel);
        ZS_TRY(zs_in_backward_lend(unit));
        char *dst = (char *)flat->grad_mem->ptr + (size_t)param->in_shard.begin * flat->layout.itemsize;
        size_t bytes = (size_t)grad.numel * flat->layout.itemsize;
        ZS_TRY(zs_device_copy(zs_engine_device(unit->engine), ZS_LANE_COMPUTE, dst, grad.data, bytes));
    }
    return zs_grad_set(param->tensor, NULL);
}

/* Readies one parameter for a new gradient: .grad becomes None, what it was is kept. */
static zs_status put_away(zs_unit *unit, int64_t i)
{
    zs_param *param = &unit->params[i];
    bool hidden;
    ZS_TRY(zs_local_grads_hide(unit, param, &hidden));
    param->has_grad = param->below;
    param->below = false;
    if (hidden) return ZS_OK;
    if (unit->local != NULL) zs_clear_bit(unit->used, i); /* zero_grad() since: what was summed up here is not wanted */
    return set_aside(unit, param);
}

zs_status zs_reduce_begin(zs_unit *unit, int64_t arriving)
{
    if (unit->in_backward) return ZS_OK;
    unit->in_backward = true;
    unit->n_expected = 0;
    unit->has_frozen = false;
    if (unit->local != NULL) expect_all(unit);
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        param->has_grad = param->reduced = param->held = false;
        if (!zs_tensor_alive(param->tensor)) continue;
        bool wanted = zs_tensor_requires_grad(param->tensor);
        unit->has_frozen |= !wanted;
        if (param->grad == NULL) continue;
        if (wanted) unit->n_expected++;
        /* Replicated gradients accumulate in place, as under DDP: shapes agree. */
        if (!unit->replicated && i != arriving) ZS_TRY(put_away(unit, i));
        zs_grad_info grad = {0};
        if (unit->replicated) ZS_TRY(zs_grad_describe(param->tensor, &grad));
        param->held = param->has_grad || grad.defined;
    }
    return ZS_OK;
}

void zs_reduce_keep(zs_unit *unit, int64_t i)
{
    zs_set_bit(unit->kept, i);
}

/* Copies a new gradient into the round: on a device that queues by one call of its own, where torch would take several. */
static zs_status pack_grad(const zs_unit *unit, const zs_param *param, bool again)
{
    const zs_device *device = zs_engine_device(unit->engine);
    const zs_flat *flat = &unit->flats[param->flat];
    zs_grad_info grad = {0};
    if (device->ops->queues) ZS_TRY(zs_grad_describe(param->tensor, &grad));
    bool plain = grad.dense && grad.dtype != ZS_BYTES && zs_same_where(grad.where, device->where);
    if (again || !plain) return zs_grad_copy(param->tensor, in_round(unit, param), flat->wire, again);
    if (grad.dtype == flat->wire) {
        size_t bytes = (size_t)grad.numel * flat->wire_size;
        return zs_device_copy(device, ZS_LANE_COMPUTE, in_round(unit, param), grad.data, bytes);
    }
    zs_cast cast = {in_round(unit, param), grad.data, grad.numel, flat->wire, grad.dtype};
    return zs_device_cast(device, ZS_LANE_COMPUTE, &cast);
}

zs_status zs_reduce_pack(zs_unit *unit, int64_t i, bool *complete)
{
    zs_param *param = &unit->params[i];
    ZS_TRY(open_round(unit));
    /* The round was complete, and its turn to be posted has not come; a weight that is recomputed once more adds to it. */
    if (unit->n_arrived == unit->n_expected) expect_all(unit);
    bool again = zs_get_bit(unit->used, i);
    ZS_TRY(pack_grad(unit, param, again));
    ZS_TRY(zs_grad_set(param->tensor, NULL));
    if (!zs_get_bit(unit->arrived, i)) unit->n_arrived++;
    zs_set_bit(unit->arrived, i);
    zs_set_bit(unit->used, i);
    *complete = unit->n_arrived == unit->n_expected;
    return ZS_OK;
}

/* Fills what nobody packed, so that owners may sum whole slices: unused parameters count as zero, and padding must not
 * carry another unit's bytes into the grad shard. */
static zs_status fill_rest(zs_unit *unit)
{
    const zs_device *device = zs_engine_device(unit->engine);
    for (int f = 0; f < unit->n_flats; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        char *base = unit->bucket->bucket.ptr + flat->bucket_offset;
        size_t filled = 0;
        for (int64_t i = 0; i < unit->n_params; i++) {
            const zs_param *param = &unit->params[i];
            if (param->flat != f) continue;
            size_t begin = (size_t)param->offset * flat->wire_size;
            size_t end = begin + (size_t)param->numel * flat->wire_size;
            ZS_TRY(zs_device_zero(device, ZS_LANE_COMPUTE, base + filled, begin - filled));
            filled = end;
            if (zs_get_bit(unit->used, i)) continue;
            zs_grad_info grad = {0};
            bool first = unit->replicated && !unit->posted; /* later rounds of a backward carry only what is new */
            if (first && zs_tensor_alive(param->tensor)) ZS_TRY(zs_grad_describe(param->tensor, &grad));
            if (grad.defined) { /* DDP's rule: what has been accumulated before takes part in the mean */
                ZS_TRY(zs_grad_copy(param->tensor, base + begin, flat->wire, false));
            } else {
                ZS_TRY(zs_device_zero(device, ZS_LANE_COMPUTE, base + begin, end - begin));
            }
        }
        ZS_TRY(zs_device_zero(device, ZS_LANE_COMPUTE, base + filled, zs_flat_wire_bytes(flat) - filled));
    }
    return ZS_OK;
}

/* The gradients that stayed here go out with this round. */
static zs_status post_local(zs_unit *unit)
{
    ZS_TRY(zs_reduce_begin(unit, -1)); /* it may not have been used in this backward */
    ZS_TRY(take_bucket(unit));
    const zs_device *device = zs_engine_device(unit->engine);
    size_t bytes = zs_unit_bucket_bytes(unit);
    ZS_TRY(zs_device_copy(device, ZS_LANE_COMPUTE, unit->bucket->bucket.ptr, unit->local->ptr, bytes));
    zs_local_grads_free(unit);
    return ZS_OK;
}

/* A replicated unit's .grad has them: it counts as used, if the user has left it there. */
static zs_status count_kept(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_grad_info grad = {0};
        if (!zs_get_bit(unit->kept, i) || !zs_tensor_alive(unit->params[i].tensor)) continue;
        ZS_TRY(zs_grad_describe(unit->params[i].tensor, &grad));
        if (grad.defined) zs_set_bit(unit->used, i);
    }
    clear_bits(unit, unit->kept);
    return ZS_OK;
}

/* Says of the round what is to be said beyond its parameters. */
static void mark(zs_unit *unit, uint64_t *used)
{
    bool held = false;
    for (int64_t i = 0; i < unit->n_params && unit->in_backward; i++)
        held |= unit->params[i].held;
    if (held) zs_set_bit(used, zs_unit_round_bit(unit, ZS_ROUND_HELD));
    if (zs_engine_gave_up(unit->engine)) zs_set_bit(used, zs_unit_round_bit(unit, ZS_ROUND_GAVE_UP));
    zs_in_backward_mark(unit, used);
}

/* A round without gradients; what stayed local stays so. */
static zs_status post_nothing(zs_unit *unit, uint64_t *used)
{
    zs_comm *comm = zs_engine_comm(unit->engine);
    ZS_TRY(zs_bucket_drain(zs_engine_buckets(unit->engine), unit, ZS_WAIT));
    if (!zs_engine_gave_up(unit->engine)) ZS_TRY(zs_reduce_begin(unit, -1)); /* what it holds is to be known */
    clear_bits(unit, used);
    mark(unit, used);
    return comm->ops->post(comm, unit->cunit, NULL, used);
}

static zs_status post_bucket(zs_unit *unit)
{
    zs_comm *comm = zs_engine_comm(unit->engine);
    if (unit->bucket == NULL) { /* replicated: there must be room for the sum */
        ZS_TRY(take_bucket(unit));
        clear_bits(unit, unit->used);
    }
    mark(unit, unit->used);
    ZS_TRY(fill_rest(unit));
    ZS_TRY(count_kept(unit));
    return comm->ops->post(comm, unit->cunit, &unit->bucket->bucket, unit->used);
}

zs_status zs_reduce_post(zs_unit *unit)
{
    bool give_up = zs_engine_gave_up(unit->engine);
    if (unit->local != NULL && !give_up) ZS_TRY(post_local(unit));
    bool nothing = unit->bucket == NULL && !unit->replicated;
    ZS_TRY(nothing ? post_nothing(unit, unit->local != NULL ? unit->arrived : unit->used) : post_bucket(unit));
    unit->posted = true;
    unit->shared = false;
    zs_bucket_posted(zs_engine_buckets(unit->engine), unit);
    return ZS_OK;
}

/* --- the end of a backward -------------------------------------------------------------------------------------------- */

zs_status zs_reduce_hand_out(zs_unit *unit)
{
    zs_status status = ZS_OK;
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (!zs_tensor_alive(param->tensor)) continue;
        /* Of a unit that took no part its user may have dropped them meanwhile. */
        bool local = unit->in_backward && param->local != NULL && zs_get_bit(unit->used, i);
        if (param->has_grad) unit->grads_held = true;
        zs_status one = ZS_OK;
        if (local)
            one = zs_local_grads_show(param);
        else if (param->has_grad)
            one = zs_grad_set(param->tensor, param->grad);
        if (status == ZS_OK) status = one;
        if (unit->in_backward) param->below = local && param->has_grad;
        param->has_grad = false;
    }
    unit->in_backward = false;
    return status;
}

bool zs_reduce_undo(zs_unit *unit)
{
    bool spoiled = false;
    for (int64_t i = 0; i < unit->n_params && unit->in_backward; i++) {
        zs_param *param = &unit->params[i];
        bool packed = unit->replicated && param->grad != NULL && zs_get_bit(unit->used, i);
        if (!param->reduced && !packed) continue;
        spoiled |= param->held; /* what it held is not there without what came on top */
        param->has_grad = param->held;
        param->reduced = false;
    }
    return spoiled;
}

zs_status zs_reduce_deliver(zs_unit *unit)
{
    zs_status status = zs_reduce_hand_out(unit);
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        bool run = param->reduced && zs_tensor_alive(param->tensor) && zs_hook_has_users(param->tensor);
        if (run && status == ZS_OK) status = zs_hook_run_users(param->tensor);
        param->has_grad = param->reduced = false;
    }
    return status;
}

zs_status zs_reduce_end(zs_unit *unit)
{
    zs_status status = zs_reduce_deliver(unit);
    unit->posted = false;
    return status;
}

/* Is any of the flat's gradients still somebody's? Besides its own handle and its parameters' views nobody should be. */
static bool grads_wanted(const zs_unit *unit, int f)
{
    int64_t own = 1;
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        if (param->flat != f || param->grad == NULL) continue;
        if (param->below) return true;
        bool shown = false;
        if (zs_tensor_alive(param->tensor) && zs_grad_is(param->tensor, param->grad, &shown) != ZS_OK) return true;
        if (shown) return true;
        own++;
    }
    return zs_storage_users(unit->flats[f].grads) > own;
}

bool zs_reduce_grads_wanted(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats && unit->grads_held; f++)
        if (unit->flats[f].grads != NULL && grads_wanted(unit, f)) return true;
    return false;
}
