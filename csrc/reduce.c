/* reduce.c - see reduce.h. */
#include "reduce.h"

#include "bucket.h"
#include "device.h"
#include "local_grads.h"
#include "schedule.h"

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

/* Makes room for gradients: a bucket, or where they stay local, memory for that. */
static zs_status open_round(zs_unit *unit)
{
    if (unit->bucket != NULL || unit->local != NULL) return ZS_OK;
    ZS_TRY(unit->syncs ? take_bucket(unit) : zs_local_grads_new(unit));
    clear_bits(unit, unit->used);
    clear_bits(unit, unit->arrived);
    unit->n_arrived = 0;
    return ZS_OK;
}

/* --- packing ------------------------------------------------------------------------------------------------------------ */

static bool get_bit(const uint64_t *bits, int64_t i)
{
    return (bits[i / 64] >> (i % 64)) & 1;
}

static void set_bit(uint64_t *bits, int64_t i)
{
    bits[i / 64] |= UINT64_C(1) << (i % 64);
}

static void clear_bit(uint64_t *bits, int64_t i)
{
    bits[i / 64] &= ~(UINT64_C(1) << (i % 64));
}

/* Where the round that is being packed has its gradient. */
static char *in_round(const zs_unit *unit, const zs_param *param)
{
    const zs_flat *flat = &unit->flats[param->flat];
    char *base = unit->local != NULL ? unit->local->ptr : unit->bucket->bucket.ptr;
    return base + flat->bucket_offset + (size_t)param->offset * flat->layout.itemsize;
}

static zs_status set_aside(zs_unit *unit, zs_param *param)
{
    zs_grad_info grad;
    ZS_TRY(zs_grad_describe(param->tensor, &grad));
    param->has_grad = grad.defined;
    if (!grad.defined) return ZS_OK;
    const zs_flat *flat = &unit->flats[param->flat];
    if (!zs_grad_is(param->tensor, param->grad)) {
        if (!grad.dense || grad.dtype != flat->dtype || grad.numel != param->owned.numel)
            return ZS_FAIL(
                ZS_ERR_VALUE,
                "parameter '%s' of unit '%s' has a .grad of %lld elements that is not this rank's slice of its "
                "gradient (%lld elements of the parameter's dtype); set it to None before backward",
                param->name, unit->name, (long long)grad.numel, (long long)param->owned.numel);
        char *dst = (char *)flat->grad_mem->ptr + (size_t)param->in_shard.begin * flat->layout.itemsize;
        memcpy(dst, grad.data, (size_t)grad.numel * flat->layout.itemsize);
    }
    zs_grad_set(param->tensor, NULL);
    return ZS_OK;
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
    if (unit->local != NULL) clear_bit(unit->used, i); /* zero_grad() since: what was summed up here is not wanted */
    return set_aside(unit, param);
}

zs_status zs_reduce_begin(zs_unit *unit, int64_t arriving)
{
    if (unit->in_backward) return ZS_OK;
    unit->in_backward = true;
    unit->n_expected = 0;
    if (unit->local != NULL) {
        clear_bits(unit, unit->arrived);
        unit->n_arrived = 0;
    }
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        param->has_grad = param->reduced = false;
        if (param->grad == NULL || !zs_tensor_alive(param->tensor)) continue;
        if (zs_tensor_requires_grad(param->tensor)) unit->n_expected++;
        /* Replicated gradients accumulate in place, as under DDP: shapes agree. */
        if (!unit->replicated && i != arriving) ZS_TRY(put_away(unit, i));
    }
    return ZS_OK;
}

void zs_reduce_keep(zs_unit *unit, int64_t i)
{
    set_bit(unit->kept, i);
}

zs_status zs_reduce_pack(zs_unit *unit, int64_t i, bool *complete)
{
    zs_param *param = &unit->params[i];
    ZS_TRY(open_round(unit));
    bool again = get_bit(unit->used, i);
    ZS_TRY(zs_grad_copy(param->tensor, in_round(unit, param), unit->flats[param->flat].dtype, again));
    zs_grad_set(param->tensor, NULL);
    if (!get_bit(unit->arrived, i)) unit->n_arrived++;
    set_bit(unit->arrived, i);
    set_bit(unit->used, i);
    *complete = unit->n_arrived == unit->n_expected;
    return ZS_OK;
}

/* Fills what nobody packed, so that owners may sum whole slices: unused parameters count as zero, and padding must not
 * carry another unit's bytes into the grad shard. */
static zs_status fill_rest(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        char *base = unit->bucket->bucket.ptr + flat->bucket_offset;
        size_t filled = 0;
        for (int64_t i = 0; i < unit->n_params; i++) {
            const zs_param *param = &unit->params[i];
            if (param->flat != f) continue;
            size_t begin = (size_t)param->offset * flat->layout.itemsize;
            size_t end = begin + (size_t)param->numel * flat->layout.itemsize;
            memset(base + filled, 0, begin - filled);
            filled = end;
            if (get_bit(unit->used, i)) continue;
            zs_grad_info grad = {0};
            bool first = unit->replicated && !unit->posted; /* later rounds of a backward carry only what is new */
            if (first && zs_tensor_alive(param->tensor)) ZS_TRY(zs_grad_describe(param->tensor, &grad));
            if (grad.defined) { /* DDP's rule: what has been accumulated before takes part in the mean */
                ZS_TRY(zs_grad_copy(param->tensor, base + begin, flat->dtype, false));
            } else {
                memset(base + begin, 0, end - begin);
            }
        }
        memset(base + filled, 0, zs_layout_full_bytes(&flat->layout) - filled);
    }
    return ZS_OK;
}

/* The gradients that stayed here go out with this round. */
static zs_status post_local(zs_unit *unit)
{
    ZS_TRY(zs_reduce_begin(unit, -1)); /* it may not have been used in this backward */
    ZS_TRY(take_bucket(unit));
    memcpy(unit->bucket->bucket.ptr, unit->local->ptr, zs_unit_bucket_bytes(unit));
    zs_local_grads_free(unit);
    return ZS_OK;
}

/* A replicated unit's .grad has them: it counts as used, if the user has left it there. */
static zs_status count_kept(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_grad_info grad = {0};
        if (!get_bit(unit->kept, i) || !zs_tensor_alive(unit->params[i].tensor)) continue;
        ZS_TRY(zs_grad_describe(unit->params[i].tensor, &grad));
        if (grad.defined) set_bit(unit->used, i);
    }
    clear_bits(unit, unit->kept);
    return ZS_OK;
}

/* A round without gradients; what stayed local stays so. */
static zs_status post_nothing(zs_unit *unit, uint64_t *used)
{
    zs_comm *comm = zs_engine_comm(unit->engine);
    ZS_TRY(zs_bucket_drain(zs_engine_buckets(unit->engine), unit, ZS_WAIT));
    clear_bits(unit, used);
    if (zs_engine_gave_up(unit->engine)) set_bit(used, unit->n_params);
    return comm->ops->post(comm, unit->cunit, NULL, used);
}

static zs_status post_bucket(zs_unit *unit)
{
    zs_comm *comm = zs_engine_comm(unit->engine);
    if (unit->bucket == NULL) { /* replicated: there must be room for the sum */
        ZS_TRY(take_bucket(unit));
        clear_bits(unit, unit->used);
    }
    if (zs_engine_gave_up(unit->engine)) set_bit(unit->used, unit->n_params);
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

/* --- summing -------------------------------------------------------------------------------------------------------------- */

typedef enum slice_class { SKIP, SET, ADD } slice_class; /* unused everywhere; first gradient; on top of one */

typedef struct slice_run {
    int64_t begin, end; /* elements, counted in this rank's slice */
    slice_class class;
} slice_run;

typedef struct summing {
    zs_unit *unit;
    zs_sources *sources;
    int rank, world;
    double scale;
} summing;

static void sum_run(const summing *s, const zs_flat *flat, slice_run run)
{
    if (run.class == SKIP || run.end <= run.begin) return;
    const size_t item = flat->layout.itemsize;
    const void *src[s->world];
    for (int r = 0; r < s->world; r++) {
        const char *base = s->sources->data[r];
        size_t at = flat->bucket_offset + (size_t)s->unit->part * flat->slice_bytes + (size_t)run.begin * item;
        src[r] = base != NULL ? base + at : NULL;
    }
    char *target = flat->grad_mem->ptr;
    if (s->unit->replicated) /* the sum goes into this rank's own bucket, for the peers to fetch */
        target = s->unit->out->bucket.ptr + flat->bucket_offset + (size_t)s->unit->part * flat->slice_bytes;
    zs_sum sum = {.src = src, .world = s->world, .dtype = flat->dtype, .scale = s->scale};
    sum.dst = target + (size_t)run.begin * item;
    sum.numel = run.end - run.begin;
    sum.accumulate = run.class == ADD;
    zs_device_sum(&sum);
}

static bool used_anywhere(const summing *s, int64_t i)
{
    for (int r = 0; r < s->world; r++)
        if (get_bit(s->sources->used[r], i)) return true;
    return false;
}

static slice_class classify(const summing *s, int64_t i)
{
    if (!used_anywhere(s, i)) return SKIP;
    return s->unit->params[i].has_grad && !s->unit->replicated ? ADD : SET;
}

/* Sums the runs of neighbouring parameters that are treated alike, padding between them included. */
static void sum_flat(const summing *s, int f)
{
    const zs_flat *flat = &s->unit->flats[f];
    slice_run run = {0, 0, SKIP};
    if (s->unit->replicated) { /* slices cut across parameters; all of it is summed, unused ones are zeros */
        run = (slice_run){0, flat->layout.shard_numel, SET};
    } else {
        for (int64_t i = 0; i < s->unit->n_params; i++) {
            const zs_param *param = &s->unit->params[i];
            if (param->flat != f || param->in_shard.numel == 0) continue;
            slice_class class = classify(s, i);
            if (class != run.class) {
                sum_run(s, flat, run);
                run = (slice_run){param->in_shard.begin, param->in_shard.begin, class};
            }
            run.end = param->in_shard.begin + param->in_shard.numel;
        }
    }
    sum_run(s, flat, run);
}

static zs_status check_gave_up(const summing *s)
{
    for (int r = 0; r < s->world; r++) {
        if (r == s->rank || !get_bit(s->sources->used[r], s->unit->n_params)) continue;
        if (zs_engine_gave_up(s->unit->engine)) continue; /* this rank did so too: nothing is lost */
        return ZS_FAIL(
            ZS_ERR_DIVERGED,
            "rank %d gave up its backward (an exception there that was caught, most likely) before unit '%s', "
            "while rank %d went on; the gradients of this step are incomplete",
            r, s->unit->name, s->rank);
    }
    return ZS_OK;
}

/* Takes bytes [begin, stop) of a flat's whole sum from the rank that owns them; on top of an earlier round's, if any. */
static void fetch_piece(const summing *s, const zs_flat *flat, size_t begin, size_t stop, bool add)
{
    const char *base = s->sources->data[begin / flat->slice_bytes];
    const void *src = base + flat->bucket_offset + begin;
    char *dst = (char *)flat->grad_mem->ptr + begin;
    if (!add) {
        memcpy(dst, src, stop - begin);
        return;
    }
    zs_sum sum = {.src = &src, .world = 1, .dst = dst, .dtype = flat->dtype, .scale = 1.0, .accumulate = true};
    sum.numel = (int64_t)((stop - begin) / flat->layout.itemsize);
    zs_device_sum(&sum);
}

/* (no_shard) Fetches every rank's finished slice into the whole gradient. */
static void fetch_shared(const summing *s)
{
    for (int64_t i = 0; i < s->unit->n_params; i++) {
        const zs_param *param = &s->unit->params[i];
        const zs_flat *flat = &s->unit->flats[param->flat];
        if (!flat->trainable || !used_anywhere(s, i)) continue;
        size_t begin = (size_t)param->offset * flat->layout.itemsize;
        const size_t end = begin + (size_t)param->numel * flat->layout.itemsize;
        while (begin < end) {
            size_t border = (begin / flat->slice_bytes + 1) * flat->slice_bytes;
            size_t stop = border < end ? border : end;
            fetch_piece(s, flat, begin, stop, param->reduced);
            begin = stop;
        }
    }
}

static summing summing_of(zs_unit *unit, zs_sources *sources)
{
    zs_comm *comm = zs_engine_comm(unit->engine);
    return (summing){unit, sources, comm->rank, comm->world, 1.0 / comm->world};
}

/* First half: this rank's slice of the sum, once all ranks have posted. In replicated units it is then shared. */
static zs_status sum_own_slice(summing *s, zs_wait wait, bool *ready)
{
    zs_unit *unit = s->unit;
    zs_comm *comm = zs_engine_comm(unit->engine);
    bool given_up = zs_engine_gave_up(unit->engine); /* then .grad is the user's again: it is not touched */
    if (!given_up)
        ZS_TRY(zs_reduce_begin(unit, -1)); /* a unit that was not used here may have gradients to set aside */
    ZS_TRY(comm->ops->collect(comm, unit->cunit, wait, ready, s->sources));
    if (!*ready || (given_up && !unit->replicated)) return ZS_OK;
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].trainable) sum_flat(s, f);
    if (!unit->replicated) return ZS_OK;
    unit->shared = true;
    return comm->ops->share(comm, unit->cunit);
}

zs_status zs_reduce_share(zs_unit *unit)
{
    if (!unit->replicated || unit->shared) return ZS_OK;
    zs_sources sources = {0};
    summing s = summing_of(unit, &sources);
    bool ready = false;
    return sum_own_slice(&s, ZS_WAIT, &ready);
}

/* Both halves; on success the sources tell who used what. */
static zs_status complete_round(summing *s, zs_wait wait, bool *ready)
{
    zs_unit *unit = s->unit;
    zs_comm *comm = zs_engine_comm(unit->engine);
    if (!unit->shared) ZS_TRY(sum_own_slice(s, wait, ready));
    if (!unit->shared) return ZS_OK;
    ZS_TRY(comm->ops->collect_shared(comm, unit->cunit, wait, ready, s->sources));
    if (*ready && !zs_engine_gave_up(unit->engine)) fetch_shared(s);
    return ZS_OK;
}

zs_status zs_reduce_drain(zs_unit *unit, zs_wait wait, bool *done)
{
    zs_comm *comm = zs_engine_comm(unit->engine);
    zs_sources sources = {0};
    summing s = summing_of(unit, &sources);
    *done = false;
    ZS_TRY(complete_round(&s, wait, done));
    if (!*done) return ZS_OK;
    for (int64_t i = 0; i < unit->n_params && !zs_engine_gave_up(unit->engine); i++)
        if (unit->params[i].grad != NULL && used_anywhere(&s, i))
            unit->params[i].has_grad = unit->params[i].reduced = true;
    zs_status status = check_gave_up(&s);
    zs_bucket_summed(zs_engine_buckets(unit->engine), unit);
    ZS_TRY(comm->ops->release(comm, unit->cunit));
    if (unit->state == ZS_REDUCING) ZS_TRY(zs_unit_move(unit, unit->replicated ? ZS_FULL : ZS_SHARDED));
    return status;
}

void zs_reduce_hand_out(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (!zs_tensor_alive(param->tensor)) continue;
        bool local = param->local != NULL && get_bit(unit->used, i);
        if (param->has_grad) unit->grads_held = true;
        if (local)
            zs_local_grads_show(param);
        else if (param->has_grad)
            zs_grad_set(param->tensor, param->grad);
        if (unit->in_backward) param->below = local && param->has_grad;
        param->has_grad = false;
    }
    unit->in_backward = false;
}

zs_status zs_reduce_end(zs_unit *unit)
{
    zs_status status = ZS_OK;
    zs_reduce_hand_out(unit);
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        bool run = param->reduced && zs_tensor_alive(param->tensor) && zs_hook_has_users(param->tensor);
        if (run && status == ZS_OK) status = zs_hook_run_users(param->tensor);
        param->has_grad = param->reduced = false;
    }
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
        if (zs_tensor_alive(param->tensor) && zs_grad_is(param->tensor, param->grad)) return true;
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
