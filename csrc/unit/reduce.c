/* reduce.c - see reduce.h. */
#include "unit/reduce.h"

#include "base/bits.h"
#include "unit/engine_facts.h"
#include "unit/grads.h"
#include "unit/in_backward.h"
#include "unit/local_grads.h"
#include "unit/rounds.h"

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
        zs_rounds_drain(pool, unit, ZS_WAIT)); /* a second round in one backward goes on top of the first one's sum */
    ZS_TRY(zs_rounds_settle(pool, unit));
    return zs_rounds_take_bucket(pool, unit, zs_unit_bucket_bytes(unit));
}

/* Makes room for gradients: a bucket, or where they stay local, memory for that. */
static zs_status open_round(zs_unit *unit)
{
    if (unit->bucket != NULL || unit->local != NULL) return ZS_OK;
    ZS_TRY(unit->syncs ? take_bucket(unit) : zs_local_grads_new(unit));
    clear_bits(unit, unit->used);
    zs_grads_expect_all(unit);
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
    if (unit->n_arrived == unit->n_expected) zs_grads_expect_all(unit);
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
    ZS_TRY(zs_grads_begin(unit, -1)); /* it may not have been used in this backward */
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
    ZS_TRY(zs_rounds_drain(zs_engine_buckets(unit->engine), unit, ZS_WAIT));
    if (!zs_engine_gave_up(unit->engine)) ZS_TRY(zs_grads_begin(unit, -1)); /* what it holds is to be known */
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
    zs_rounds_posted(zs_engine_buckets(unit->engine), unit);
    return ZS_OK;
}
