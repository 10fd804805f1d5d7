/* reduce_sum.c - the other half of a round: this rank's shard of all ranks' buckets, summed in rank order. See
 * reduce.h. */
#include "base/bits.h"
#include "base/tree.h"
#include "comm/traffic.h"
#include "comm/where.h"
#include "device/device.h"
#include "reduce/bucket.h"
#include "reduce/grad_memory.h"
#include "reduce/reduce.h"
#include "reduce/squares.h"
#include "unit/context.h"
#include "unit/offload.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum run_class { SKIP, SET, ADD } run_class; /* unused everywhere; first gradient; added to an earlier one */

typedef struct shard_run {
    int64_t begin, end; /* elements, counted in this rank's shard, or in the full gradient when that is fetched */
    run_class class;
} shard_run;

typedef struct summing {
    zs_unit *unit;
    zs_sources *sources;
    const zs_device *device;
    zs_stream stream;
    int rank, world;
    double scale;
    double again;      /* for earlier gradients: all ranks' sources are added to them, and scaled together */
    zs_exact *squares; /* of the flat at hand; NULL: not asked for */
} summing;

/* Destination of this rank's shard of the sum. */
static char *target_of(const summing *s, const zs_flat *flat)
{
    if (!s->unit->record.is.replicated) return flat->grad_mem->ptr;
    char *bucket = zs_bucket_of(s->unit->record.round.out)->ptr; /* its own, for the peers to fetch from */
    return bucket + flat->bucket_offset + (size_t)s->unit->shard * flat->wire_shard_bytes;
}

static zs_dtype dtype_of_sources(const summing *s, const zs_flat *flat)
{
    return s->sources->partial ? zs_dtype_of_partial_sum(flat->wire) : flat->wire;
}

/* Gradients from rank `r` in a section, from element `begin` of this rank's shard on; NULL: none. */
static const char *source_at(const summing *s, const zs_flat *flat, int r, int section, int64_t begin)
{
    const char *base = s->sources->data[r];
    size_t at = s->sources->at[flat->trainable_index] + (size_t)begin * zs_dtype_size(dtype_of_sources(s, flat));
    return base != NULL ? base + (size_t)section * s->sources->section + at : NULL;
}

static zs_status sum_run(const summing *s, const zs_flat *flat, shard_run run)
{
    if (run.class == SKIP || run.end <= run.begin) return ZS_OK;
    const zs_tree *tree = s->unit->context->tree;
    const int sections = zs_tree_sections(tree);
    const void *src[s->world * sections];
    zs_dtype dtype = dtype_of_sources(s, flat);
    for (int i = 0; i < s->world * sections; i++)
        src[i] = source_at(s, flat, i / sections, i % sections, run.begin);
    char *target = target_of(s, flat);
    zs_sum sum = {.src = src, .world = s->world * sections, .dtype = dtype, .scale = s->scale, .tree = tree};
    sum.per_host = s->sources->partial ? 0 : s->unit->context->ranks.all->per_host;
    sum.to = s->unit->record.is.replicated ? flat->wire : flat->dtype;
    sum.dst = target + (size_t)run.begin * (s->unit->record.is.replicated ? flat->wire_size : flat->layout.itemsize);
    sum.numel = run.end - run.begin;
    sum.accumulate = run.class == ADD;
    sum.squares = s->squares;
    bool there = src[0] == sum.dst && sum.dtype == sum.to && !sum.accumulate;
    zs_numbers grads = {sum.dst, sum.numel, sum.to};
    if (s->world == 1 && there && s->scale == 1.0 && tree == NULL) { /* the sum of one is that one */
        if (s->squares != NULL) zs_cpu_squares(&grads, s->squares);
        return ZS_OK;
    }
    if (sum.accumulate && s->again != 1.0) ZS_TRY(zs_device_scale(s->device, s->stream, &grads, s->again));
    return zs_device_sum(s->device, s->stream, &sum);
}

static bool used_anywhere(const summing *s, int64_t i)
{
    for (int r = 0; r < s->world; r++)
        if (zs_get_bit(s->sources->headers[r]->used, i)) return true;
    return false;
}

static run_class classify(const summing *s, int64_t i)
{
    if (!used_anywhere(s, i)) return SKIP;
    return s->unit->params[i].has_grad && !s->unit->record.is.replicated ? ADD : SET;
}

static bool are_finite(const void *data, int64_t numel, zs_dtype dtype)
{
    zs_exact sum = {0};
    zs_cpu_squares(&(zs_numbers){(void *)data, numel, dtype}, &sum);
    return isfinite(sum.beyond);
}

/* Records whether this rank's share of parameter `i` is nonfinite now, and the ranks that made it so. */
static void record_nonfinite(const summing *s, const zs_flat *flat, zs_param *param)
{
    const bool replicated = s->unit->record.is.replicated; /* shards split parameters */
    const int64_t first = replicated ? s->unit->shard * flat->layout.shard_numel : 0;
    const int64_t from = replicated ? param->offset - first : param->in_shard.begin;
    const int64_t end = from + (replicated ? param->numel : param->in_shard.numel);
    const int64_t begin = from > 0 ? from : 0, last = flat->layout.shard_numel;
    const int64_t numel = (end < last ? end : last) - begin;
    const char *sum = target_of(s, flat) + (size_t)begin * zs_dtype_size(replicated ? flat->wire : flat->dtype);
    if (numel <= 0 || are_finite(sum, numel, replicated ? flat->wire : flat->dtype)) return;
    param->nonfinite = true;
    const zs_dtype dtype = dtype_of_sources(s, flat);
    const int sections = zs_tree_sections(s->unit->context->tree);
    uint64_t on = 0;
    for (int i = 0; i < s->world * sections && i / sections < 64; i++) {
        const char *own = source_at(s, flat, i / sections, i % sections, begin);
        if (own == NULL || own == sum) continue; /* the sum has overwritten it */
        if (!are_finite(own, numel, dtype)) on |= UINT64_C(1) << i / sections;
    }
    if (replicated && on == 0 && s->rank < 64) on = UINT64_C(1) << s->rank; /* then its own was to blame */
    param->nonfinite_on |= on;
}

/* The flat is summed. Where its squares are not finite, looks again for the parameters and the ranks. */
static void look_for_nonfinite(const summing *s, int f)
{
    zs_unit *unit = s->unit;
    bool finite = s->squares == NULL || isfinite(s->squares->beyond);
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (param->flat != f) continue;
        if (!param->has_grad) { /* the flags belong to earlier gradients */
            param->nonfinite = false;
            param->nonfinite_on = 0;
        }
        if (!finite && used_anywhere(s, i)) record_nonfinite(s, &unit->flats[f], param);
    }
}

/* Sums the runs of neighboring parameters that are treated the same. The padding between them is summed with them, as
 * it is zero in buckets; but where the sum is added to gradients whose squares are asked for, it is left out: the
 * padding of their memory has any values. */
static zs_status sum_flat(summing *s, int f)
{
    zs_flat *flat = &s->unit->flats[f];
    shard_run run = {0, 0, SKIP};
    s->squares = zs_squares_renew(s->unit, flat);
    if (s->unit->record.is.replicated) { /* shards split parameters; all of it is summed, unused ones are zeros */
        run = (shard_run){0, flat->layout.shard_numel, SET};
    } else {
        for (int64_t i = 0; i < s->unit->n_params; i++) {
            const zs_param *param = &s->unit->params[i];
            if (param->flat != f) continue;
            run_class class = classify(s, i);
            zs_squares_count(s->unit, i, class != SKIP);
            if (param->in_shard.numel == 0) continue;
            if (class != run.class || (class == ADD && s->squares != NULL)) {
                ZS_TRY(sum_run(s, flat, run));
                run = (shard_run){param->in_shard.begin, param->in_shard.begin, class};
            }
            run.end = param->in_shard.begin + param->in_shard.numel;
        }
    }
    ZS_TRY(sum_run(s, flat, run));
    look_for_nonfinite(s, f);
    return ZS_OK;
}

/* Does rank `r` report this flag of the round? */
static bool has_flag(const summing *s, int r, uint64_t flag)
{
    return (s->sources->headers[r]->flags & flag) != 0;
}

static zs_status check_gave_up(const summing *s)
{
    for (int r = 0; r < s->world; r++) {
        if (r == s->rank || !has_flag(s, r, ZS_ROUND_GAVE_UP)) continue;
        if (s->unit->context->schedule.gave_up) continue; /* this rank abandoned it too: nothing is lost */
        char failures[ZS_FAILURES];
        zs_comm_failures(s->unit->context->ranks.all, failures, sizeof failures);
        zs_status status =
            ZS_FAIL(ZS_ERR_DIVERGED,
                    "ranks diverged: rank %d abandoned its backward before unit '%s' (most likely an exception was "
                    "caught there), but rank %d continued%s; the gradients of this step are incomplete: call "
                    "zero_grad() and skip the step on all ranks",
                    r, zs_unit_label(s->unit->name), s->rank, failures);
        return zs_comm_locate(s->unit->context->ranks.all, status);
    }
    return ZS_OK;
}

/* Shards with sums of different backwards would not be a gradient. (Full gradients are averaged as DDP does.) */
static zs_status check_held(const summing *s)
{
    bool mine = has_flag(s, s->rank, ZS_ROUND_HELD);
    for (int r = 0; r < s->world; r++) {
        if (s->unit->record.is.replicated || has_flag(s, r, ZS_ROUND_HELD) == mine) continue;
        zs_comm_look_at_all(s->unit->context->ranks.all);
        zs_status status =
            ZS_FAIL(ZS_ERR_DIVERGED,
                    "ranks diverged: rank %d has gradients of earlier backwards for unit '%s', and rank %d has none "
                    "(zero_grad() was called on one of them only); call zero_grad() and skip the step on all ranks",
                    mine ? s->rank : r, zs_unit_label(s->unit->name), mine ? r : s->rank);
        return zs_comm_locate(s->unit->context->ranks.all, status);
    }
    return ZS_OK;
}

static const zs_fingerprint *fingerprint_of(const summing *s, int r)
{
    return &s->sources->headers[r]->fingerprint;
}

/* Gradients of parameters of different steps must not be summed. */
static zs_status check_fingerprints(const summing *s)
{
    zs_context *context = s->unit->context;
    zs_fingerprint *fingerprints = NULL;
    bool same = true;
    for (int r = 1; r < s->world && same; r++)
        same = memcmp(fingerprint_of(s, r), fingerprint_of(s, 0), sizeof *fingerprints) == 0;
    zs_status status = ZS_OK;
    if (same) {
        context->ranks.all->apart = false;
    } else {
        if ((fingerprints = malloc((size_t)s->world * sizeof *fingerprints)) == NULL)
            return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' steps");
        for (int r = 0; r < s->world; r++)
            fingerprints[r] = *fingerprint_of(s, r);
        status = zs_comm_check_fingerprints(context->ranks.all, fingerprints);
    }
    free(fingerprints);
    context->met = status == ZS_OK;
    context->met_fingerprint = *fingerprint_of(s, s->rank);
    return status;
}

/* Copies bytes [begin, stop) of a flat's full sum from the rank that owns them; adds them to an earlier round's, if
 * any. */
static zs_status fetch_piece(const summing *s, const zs_flat *flat, size_t begin, size_t stop, bool add)
{
    const char *base = s->sources->data[begin / flat->wire_shard_bytes];
    const void *src = base + flat->bucket_offset + begin;
    char *dst = (char *)flat->grad_mem->ptr + begin;
    if (!add) return zs_device_copy(s->device, s->stream, dst, src, stop - begin);
    zs_sum sum = {.src = &src, .world = 1, .dst = dst, .dtype = flat->wire, .scale = 1.0, .accumulate = true};
    sum.to = flat->wire;
    sum.numel = (int64_t)((stop - begin) / flat->layout.itemsize);
    return zs_device_sum(s->device, s->stream, &sum);
}

/* Fetches a run of the full gradient, shard by shard. */
static zs_status fetch_run(const summing *s, const zs_flat *flat, shard_run run)
{
    if (run.class == SKIP) return ZS_OK;
    size_t begin = (size_t)run.begin * flat->layout.itemsize;
    const size_t end = (size_t)run.end * flat->layout.itemsize;
    while (begin < end) {
        size_t border = (begin / flat->wire_shard_bytes + 1) * flat->wire_shard_bytes;
        size_t stop = border < end ? border : end;
        ZS_TRY(fetch_piece(s, flat, begin, stop, run.class == ADD));
        begin = stop;
    }
    return ZS_OK;
}

/* Fetches the runs of neighboring parameters that are treated the same, and the padding between them: on a GPU each
 * costs a call of the driver. */
static zs_status fetch_flat(const summing *s, int f)
{
    const zs_flat *flat = &s->unit->flats[f];
    shard_run run = {0, 0, SKIP};
    for (int64_t i = 0; i < s->unit->n_params; i++) {
        const zs_param *param = &s->unit->params[i];
        if (param->flat != f || param->numel == 0) continue;
        run_class class = !used_anywhere(s, i) ? SKIP : param->reduced ? ADD : SET;
        if (class != run.class) {
            ZS_TRY(fetch_run(s, flat, run));
            run = (shard_run){param->offset, param->offset, class};
        }
        run.end = param->offset + param->numel;
    }
    return fetch_run(s, flat, run);
}

/* Counts traffic if the peers' buckets are mapped: this rank reads a shard of each. */
static void count_reads(const summing *s)
{
    if (!zs_comm_shares_memory(s->unit->context->ranks.all)) return;
    size_t bytes = 0;
    for (int f = 0; f < s->unit->n_flats; f++)
        if (s->unit->flats[f].trainable) bytes += s->unit->flats[f].wire_shard_bytes;
    for (int r = 0; r < s->world; r++)
        if (r != s->rank && s->sources->data[r] != NULL) zs_traffic_count(ZS_TRAFFIC_REDUCE, bytes, 0);
}

/* (no_shard) Fetches every rank's finished shard into the full gradient. */
static zs_status fetch_shared(const summing *s)
{
    count_reads(s);
    for (int f = 0; f < s->unit->n_flats; f++)
        if (s->unit->flats[f].trainable) ZS_TRY(fetch_flat(s, f));
    return ZS_OK;
}

static summing summing_of(zs_unit *unit, zs_sources *sources)
{
    zs_comm *comm = unit->context->ranks.all;
    double of_model = unit->context->divided_by, divisor = unit->divisor != 0.0 ? unit->divisor : of_model;
    if (divisor == 0.0) divisor = comm->world;
    summing s = {unit, sources, comm->device, comm->ops->stream, comm->rank, comm->world, 1.0 / divisor, 0, NULL};
    s.again = divisor / comm->world;
    return s;
}

/* Do all ranks report that their backward will not need the unit again? */
static bool over_everywhere(const summing *s)
{
    bool everywhere = s->unit->record.early.over;
    for (int r = 0; r < s->world && everywhere; r++)
        everywhere = has_flag(s, r, ZS_ROUND_OVER);
    return everywhere;
}

/* Do the sums of this round count? Not if this rank abandoned the backward: .grad belongs to the user again. But a
 * unit that is over on all ranks is stepped on all, or the ranks would no longer have one model. Check it once the
 * round has been collected. */
static bool counts(const summing *s)
{
    return !s->unit->context->schedule.gave_up || over_everywhere(s);
}

static zs_status sum_flats(summing *s)
{
    count_reads(s);
    for (int f = 0; f < s->unit->n_flats; f++)
        if (s->unit->flats[f].trainable) ZS_TRY(sum_flat(s, f));
    return ZS_OK;
}

/* Makes sure that the grad shard, or the full gradients, have memory. */
static zs_status want_grads(zs_unit *unit)
{
    ZS_TRY(zs_grad_memory_take(unit));
    return zs_offload_want_grads(unit);
}

zs_status zs_reduce_share(zs_unit *unit, zs_wait wait, bool *ready)
{
    zs_comm *comm = unit->context->ranks.all;
    zs_sources sources = {0};
    summing s = summing_of(unit, &sources);
    zs_status collected = zs_cunit_collect(comm, unit->cunit, wait, ready, &sources);
    if (collected == ZS_ERR_MEMORY && *ready) { /* it has shared that; zs_reduce_sum fails, on all ranks */
        zs_clear_error();
        return ZS_OK;
    }
    ZS_TRY(collected);
    if (!*ready) return ZS_OK;
    zs_profile *range = zs_unit_profile(unit, "sum_gradients");
    zs_status status = sum_flats(&s);
    zs_profile_end(range);
    return status == ZS_OK ? zs_cunit_share(comm, unit->cunit) : status;
}

/* Collects the round and stores this rank's shard of the sum, or all of it for a replicated unit, in the gradients. */
static zs_status take_sum(summing *s, zs_wait wait, bool *ready)
{
    zs_unit *unit = s->unit;
    zs_comm *comm = unit->context->ranks.all;
    bool replicated = unit->record.is.replicated;
    ZS_TRY((replicated ? zs_cunit_collect_shared : zs_cunit_collect)(comm, unit->cunit, wait, ready, s->sources));
    if (!*ready || !counts(s)) return ZS_OK;
    ZS_TRY(want_grads(unit));
    zs_profile *range = zs_unit_profile(unit, replicated ? "all_gather_gradients" : "sum_gradients");
    zs_status status = replicated ? fetch_shared(s) : sum_flats(s);
    zs_profile_end(range);
    ZS_TRY(status);
    for (int64_t i = 0; i < unit->n_params; i++)
        if (unit->params[i].grad != NULL && used_anywhere(s, i))
            unit->params[i].has_grad = unit->params[i].reduced = true;
    return ZS_OK;
}

/* The round has failed on all ranks: it is over. A rank that has abandoned its backward loses nothing. */
static zs_status end_failed(const zs_unit *unit, zs_status status)
{
    if (!unit->context->schedule.gave_up) return status;
    zs_clear_error();
    return ZS_OK;
}

zs_status zs_reduce_sum(zs_record *record, zs_wait wait, bool *done, bool *over)
{
    zs_unit *unit = zs_unit_of(record);
    zs_comm *comm = unit->context->ranks.all;
    zs_sources sources = {0};
    summing s = summing_of(unit, &sources);
    bool ready = false;
    zs_status taken = take_sum(&s, wait, &ready);
    *done = ready || (taken == ZS_ERR_DIVERGED && !zs_cunit_is_out(unit->cunit));
    if (taken != ZS_OK) {
        if (ready && zs_cunit_is_out(unit->cunit)) (void)zs_cunit_release(comm, unit->cunit); /* peers wait for it */
        return *done ? end_failed(unit, taken) : taken;
    }
    if (!ready) return ZS_OK;
    zs_offload_done_grads(unit);
    /* A user with models on a disk is short of memory, while that of the packed gradients lies idle on the heap. */
    if (unit->offloads.disk != NULL) zs_mem_heap_freed(zs_unit_bucket_bytes(unit));
    zs_status status = check_gave_up(&s);
    if (!unit->context->schedule.gave_up) {
        ZS_THEN(status, check_held(&s));
        ZS_THEN(status, check_fingerprints(&s));
    }
    *over = over_everywhere(&s);
    ZS_TRY(zs_cunit_release(comm, unit->cunit));
    return status;
}
