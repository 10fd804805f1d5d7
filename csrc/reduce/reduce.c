/* reduce.c - see reduce.h. */
#include "reduce/reduce.h"

#include "base/bits.h"
#include "reduce/bucket.h"
#include "reduce/leaves.h"
#include "reduce/local_grads.h"
#include "unit/context.h"

#include <stdlib.h>
#include <string.h>

static void clear_bits(const zs_unit *unit, uint64_t *bits)
{
    memset(bits, 0, zs_unit_bitmap_words(unit) * sizeof *bits);
}

zs_status zs_reduce_begin(zs_unit *unit, bool local)
{
    const zs_device *device = zs_context_device(unit->context);
    if (unit->context->tree != NULL && unit->record.round.posted)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "unit '%s' got a gradient after all of its gradients had come: with deterministic='any-world', "
                       "each parameter may get one in a backward",
                       zs_unit_label(unit->name));
    if (!local)
        ZS_TRY(zs_bucket_wake(unit->record.round.packing, device));
    else
        ZS_TRY(unit->context->tree != NULL ? zs_leaves_begin(unit) : zs_local_grads_new(unit));
    clear_bits(unit, unit->used);
    clear_bits(unit, unit->arrived);
    return ZS_OK;
}

/* --- packing ------------------------------------------------------------------------------------------------------ */

static char *packing(const zs_unit *unit)
{
    zs_lease *lease = unit->record.round.packing;
    return lease != NULL ? zs_bucket_of(lease)->ptr : NULL;
}

/* The gradient's place in the round that is being packed. */
static zs_numbers in_round(const zs_unit *unit, const zs_param *param)
{
    if (unit->local != NULL) return zs_local_grads_of(unit, param);
    const zs_flat *flat = &unit->flats[param->flat];
    char *base = unit->leaf != NULL ? unit->leaf->ptr : packing(unit);
    char *at = base + flat->bucket_offset + (size_t)param->offset * flat->wire_size;
    return (zs_numbers){at, param->numel, flat->wire};
}

/* Copies numbers, cast where the dtypes differ. */
static zs_status put(const zs_device *device, const zs_cast *cast)
{
    if (cast->to != cast->from) return zs_device_cast(device, ZS_STREAM_COMPUTE, cast);
    size_t bytes = (size_t)cast->numel * zs_dtype_size(cast->to);
    return zs_device_copy(device, ZS_STREAM_COMPUTE, cast->dst, cast->src, bytes);
}

/* sum += a gradient of another dtype: torch's CPU loop for that takes ten times as long. */
static zs_status add_cast(const zs_device *device, const zs_grad_info *grad, const zs_numbers *sum)
{
    const void *src = grad->data;
    zs_sum job = {.src = &src, .world = 1, .dst = sum->data, .numel = grad->numel, .scale = 1.0, .accumulate = true};
    job.dtype = grad->dtype;
    job.to = sum->dtype;
    return zs_device_sum(device, ZS_STREAM_COMPUTE, &job);
}

/* Copies a new gradient into the round, or adds it to the earlier one: on a device that queues, with one call of our
 * own instead of several of torch's. */
static zs_status pack_grad(const zs_unit *unit, const zs_param *param, bool again)
{
    const zs_device *device = zs_context_device(unit->context);
    const zs_numbers place = in_round(unit, param);
    zs_grad_info grad = {0};
    if (again || device->ops->queues) ZS_TRY(zs_grad_describe(param->tensor, &grad));
    bool plain = grad.dense && grad.dtype != ZS_BYTES && zs_same_where(grad.where, device->where);
    if (plain && again && grad.dtype != place.dtype) return add_cast(device, &grad, &place);
    if (again || !plain) return zs_grad_copy(param->tensor, place.data, place.dtype, again);
    zs_cast cast = {place.data, grad.data, grad.numel, place.dtype, grad.dtype};
    return put(device, &cast);
}

zs_status zs_reduce_pack(zs_record *record, int64_t i, bool anew, bool *first)
{
    zs_unit *unit = zs_unit_of(record);
    zs_param *param = &unit->params[i];
    if (anew) clear_bits(unit, unit->arrived);
    ZS_TRY(pack_grad(unit, param, zs_get_bit(unit->used, i)));
    ZS_TRY(zs_grad_set(param->tensor, NULL));
    *first = !zs_get_bit(unit->arrived, i);
    zs_set_bit(unit->arrived, i);
    zs_set_bit(unit->used, i);
    return ZS_OK;
}

/* Fills the gaps, so that owners can sum full shards: unused parameters count as zero, and padding must not carry
 * another unit's bytes into the grad shard. */
static zs_status fill_rest(zs_unit *unit)
{
    const zs_device *device = zs_context_device(unit->context);
    for (int f = 0; f < unit->n_flats; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        char *base = packing(unit) + flat->bucket_offset;
        size_t filled = 0;
        for (int64_t i = 0; i < unit->n_params; i++) {
            const zs_param *param = &unit->params[i];
            if (param->flat != f) continue;
            size_t begin = (size_t)param->offset * flat->wire_size;
            size_t end = begin + (size_t)param->numel * flat->wire_size;
            ZS_TRY(zs_device_zero(device, ZS_STREAM_COMPUTE, base + filled, begin - filled));
            filled = end;
            if (zs_get_bit(unit->used, i)) continue;
            zs_grad_info grad = {0};
            bool first = unit->record.is.replicated &&
                         !unit->record.round.posted; /* later rounds of a backward have only new gradients */
            if (first && zs_tensor_alive(param->tensor)) ZS_TRY(zs_grad_describe(param->tensor, &grad));
            if (grad.defined) { /* DDP's rule: gradients accumulated before take part in the mean */
                ZS_TRY(zs_grad_copy(param->tensor, base + begin, flat->wire, false));
            } else {
                ZS_TRY(zs_device_zero(device, ZS_STREAM_COMPUTE, base + begin, end - begin));
            }
        }
        ZS_TRY(zs_device_zero(device, ZS_STREAM_COMPUTE, base + filled, zs_flat_wire_bytes(flat) - filled));
    }
    return ZS_OK;
}

zs_status zs_reduce_send_local(zs_record *record)
{
    zs_unit *unit = zs_unit_of(record);
    const zs_device *device = zs_context_device(unit->context);
    ZS_TRY(zs_bucket_wake(unit->record.round.packing, device));
    for (int f = 0; f < unit->n_flats; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        zs_cast cast = {.dst = packing(unit) + flat->bucket_offset, .to = flat->wire, .from = flat->dtype};
        cast.src = (char *)unit->local->ptr + flat->local_offset;
        cast.numel = zs_layout_full_numel(&flat->layout);
        ZS_TRY(put(device, &cast));
    }
    zs_local_grads_free(unit);
    return ZS_OK;
}

zs_status zs_reduce_keep(zs_unit *unit, int64_t i)
{
    const zs_param *param = &unit->params[i];
    zs_set_bit(unit->kept, i);
    return zs_grad_cast(param->tensor, unit->flats[param->flat].dtype);
}

/* A replicated unit's .grad contains them: it counts as used, if the user has left it there. */
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

/* Posts a bucket, or NULL, with this rank's header of the round. */
static zs_status post(zs_unit *unit, const zs_bucket *bucket)
{
    const zs_context *context = unit->context;
    zs_round_header *header = zs_cunit_header(unit->cunit);
    bool held = false;
    for (int64_t i = 0; i < unit->n_params && unit->in_backward; i++)
        held |= unit->params[i].held;
    header->flags = (held ? ZS_ROUND_HELD : 0) | (context->schedule.gave_up ? ZS_ROUND_GAVE_UP : 0) |
                    (unit->record.early.over ? ZS_ROUND_OVER : 0);
    header->fingerprint = context->fingerprint;
    if (bucket != NULL)
        memcpy(header->used, unit->used, zs_unit_bitmap_words(unit) * sizeof *unit->used);
    else
        clear_bits(unit, header->used);
    return zs_cunit_post(context->ranks.all, unit->cunit, bucket);
}

zs_status zs_reduce_post(zs_unit *unit)
{
    zs_lease *lease = unit->record.round.packing;
    if (lease == NULL) { /* local gradients stay local */
        clear_bits(unit, unit->local != NULL ? unit->arrived : unit->used);
        return post(unit, NULL);
    }
    ZS_TRY(fill_rest(unit));
    ZS_TRY(count_kept(unit));
    bool adds = unit->context->tree != NULL && !unit->context->schedule.gave_up;
    if (adds) ZS_TRY(zs_leaves_send(unit, packing(unit)));
    return post(unit, zs_bucket_of(lease));
}
