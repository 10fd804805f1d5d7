/* round.c - see round.h: a round's states, the conditions of each call, and the errors of calls out of order. */
#define _GNU_SOURCE 1 /* strdup */
#include "comm/comm_local.h"

#include <stdlib.h>
#include <string.h>

/* --- sizes -------------------------------------------------------------------------------------------------------- */

size_t zs_round_header_bytes(size_t n_params)
{
    return sizeof(zs_round_header) + (n_params + 63) / 64 * sizeof(uint64_t);
}

size_t zs_spec_shards_bytes(const zs_cunit_spec *spec)
{
    size_t total = 0;
    for (int f = 0; f < spec->n_flats; f++)
        total += spec->shard_bytes[f];
    return total * (size_t)(spec->sections > 0 ? spec->sections : 1);
}

size_t zs_cunit_shard_at(const zs_cunit *unit, int f, int shard)
{
    size_t before = 0;
    for (int g = 0; g < f; g++)
        before += unit->spec.shard_bytes[g];
    return before * (size_t)unit->spec.n_shards + (size_t)shard * unit->spec.shard_bytes[f];
}

void zs_cunit_lay_side_by_side(zs_cunit *unit)
{
    unit->at[0] = 0;
    for (int f = 1; f < unit->spec.n_flats; f++)
        unit->at[f] = unit->at[f - 1] + unit->spec.shard_bytes[f - 1];
    unit->section = unit->shards_bytes / (size_t)unit->spec.sections;
}

/* --- units -------------------------------------------------------------------------------------------------------- */

static zs_status check_shards(const zs_cunit_spec *spec, int world)
{
    if (spec->shard_of == NULL && (spec->n_shards == 0 || spec->n_shards == world)) return ZS_OK;
    if (spec->shard_of == NULL || spec->n_shards < 1 || spec->mode != ZS_REDUCE_SCATTER)
        return ZS_FAIL(ZS_ERR_VALUE, "unit '%s': %d shards for %d ranks, but no map from ranks to shards", spec->name,
                       spec->n_shards, world);
    for (int r = 0; r < world; r++)
        if (spec->shard_of[r] < 0 || spec->shard_of[r] >= spec->n_shards)
            return ZS_FAIL(ZS_ERR_VALUE, "unit '%s': shard %d of rank %d is out of range for %d shards", spec->name,
                           spec->shard_of[r], r, spec->n_shards);
    return ZS_OK;
}

static zs_status check_spec(const zs_cunit_spec *spec, int world)
{
    ZS_TRY(check_shards(spec, world));
    if (spec->n_flats < 0 || spec->n_flats > ZS_MAX_FLATS)
        return ZS_FAIL(ZS_ERR_VALUE, "unit '%s' has %d trainable flat parameters; the limit is %d", spec->name,
                       spec->n_flats, (int)ZS_MAX_FLATS);
    for (int f = 0; f < spec->n_flats; f++)
        if (spec->shard_bytes[f] % 64 != 0)
            return ZS_FAIL(ZS_ERR_VALUE, "unit '%s': shard size must be a multiple of 64 bytes, got %zu", spec->name,
                           spec->shard_bytes[f]);
    return ZS_OK;
}

/* The shard that each rank sums. */
static int *shards_of_ranks(const zs_cunit_spec *spec, int world)
{
    int *shard_of = calloc((size_t)world, sizeof *shard_of);
    for (int r = 0; shard_of != NULL && r < world; r++)
        shard_of[r] = spec->shard_of != NULL ? spec->shard_of[r] : r;
    return shard_of;
}

/* Fills a zeroed head. */
static zs_status init(zs_cunit *unit, const zs_cunit_spec *spec, const zs_comm *comm)
{
    size_t world = (size_t)comm->world;
    unit->spec = *spec;
    unit->spec.name = strdup(zs_unit_label(spec->name));
    unit->spec.n_shards = spec->n_shards > 0 ? spec->n_shards : comm->world;
    unit->spec.sections = spec->sections > 0 ? spec->sections : 1;
    unit->spec.shard_of = shards_of_ranks(spec, comm->world);
    unit->header_bytes = zs_round_header_bytes(spec->n_params);
    unit->header = calloc(1, unit->header_bytes);
    unit->data = calloc(world, sizeof *unit->data);
    unit->headers = calloc(world, sizeof *unit->headers);
    if (unit->spec.name == NULL || unit->spec.shard_of == NULL || unit->header == NULL || unit->data == NULL ||
        unit->headers == NULL)
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec->name);
    unit->shards_bytes = zs_spec_shards_bytes(spec);
    unit->section = zs_cunit_shard_at(unit, spec->n_flats, 0);
    for (int f = 0; f < spec->n_flats; f++)
        unit->at[f] = zs_cunit_shard_at(unit, f, unit->spec.shard_of[comm->rank]);
    return ZS_OK;
}

static void free_head(zs_cunit *unit)
{
    free((char *)unit->spec.name);
    free((int *)(uintptr_t)unit->spec.shard_of);
    free(unit->header);
    free(unit->data);
    free(unit->headers);
    free(unit);
}

zs_status zs_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out)
{
    const zs_round_ops *ops = comm->ops->rounds;
    ZS_TRY(check_spec(spec, comm->world));
    zs_cunit *unit = calloc(1, ops->unit_bytes > 0 ? ops->unit_bytes : sizeof *unit);
    if (unit == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec->name);
    zs_status status = init(unit, spec, comm);
    if (status != ZS_OK) {
        free_head(unit);
        return status;
    }
    if (ops->unit_init != NULL) status = ops->unit_init(comm, unit);
    if (status == ZS_OK)
        *out = unit;
    else
        zs_cunit_free(comm, unit);
    return status;
}

static void drop(zs_comm *comm, zs_cunit *unit)
{
    if (comm->ops->rounds->drop != NULL) comm->ops->rounds->drop(comm, unit);
}

void zs_cunit_free(zs_comm *comm, zs_cunit *unit)
{
    if (unit == NULL) return;
    bool failed = zs_last_status() != ZS_OK; /* of the caller, which is failing */
    const zs_round_ops *ops = comm->ops->rounds;
    if (ops->finish != NULL) ops->finish(comm, unit);
    if (!failed) zs_clear_error();
    drop(comm, unit);
    if (ops->unit_clear != NULL) ops->unit_clear(comm, unit);
    free_head(unit);
}

zs_status zs_cunit_rename(zs_comm *comm, zs_cunit *unit, const char *name)
{
    char *copy = strdup(zs_unit_label(name));
    if (copy == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a name");
    free((char *)unit->spec.name);
    unit->spec.name = copy;
    if (comm->ops->rounds->renamed != NULL) comm->ops->rounds->renamed(comm, unit);
    return ZS_OK;
}

/* --- a round ------------------------------------------------------------------------------------------------------ */

/* Ranks post and end their rounds in one order, and a failure is one on all ranks. */
static bool is_collective(const zs_comm *comm)
{
    return !comm->ops->mapped;
}

static zs_status check_usable(zs_comm *comm)
{
    return comm->ops->rounds->usable != NULL ? comm->ops->rounds->usable(comm) : ZS_OK;
}

static zs_status check_post(const zs_cunit *unit, const zs_bucket *bucket)
{
    size_t needed = unit->shards_bytes * (size_t)unit->spec.n_shards;
    if (unit->state != ZS_ROUND_NONE)
        return ZS_FAIL(ZS_ERR_STATE, "unit '%s': cannot post round %llu before round %llu was released",
                       unit->spec.name, (unsigned long long)unit->round + 1, (unsigned long long)unit->round);
    if (bucket == NULL && unit->spec.mode == ZS_REDUCE_ALL)
        return ZS_FAIL(ZS_ERR_VALUE, "unit '%s': cannot reduce without a bucket for the sum", unit->spec.name);
    if (bucket != NULL && bucket->bytes < needed)
        return ZS_FAIL(ZS_ERR_VALUE, "unit '%s': a bucket of %zu bytes is too small (needs %zu)", unit->spec.name,
                       bucket->bytes, needed);
    return ZS_OK;
}

/* ZS_ERR_STATE, with `call` and the unit, unless the round is in `state`. */
static zs_status expect(const zs_cunit *unit, zs_round_state state, const char *call)
{
    static const char *const standing[] = {"not posted", "posted", "collected", "shared", "collected and shared"};
    if (unit->state == state) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE, "unit '%s', round %llu: cannot call %s while the round is %s (must be %s)",
                   unit->spec.name, (unsigned long long)unit->round, call, standing[unit->state], standing[state]);
}

static void fill_sources(const zs_cunit *unit, zs_sources *out)
{
    *out = (zs_sources){unit->partial, unit->data, unit->at, unit->section, unit->headers};
}

bool zs_cunit_is_out(const zs_cunit *unit)
{
    return unit->state != ZS_ROUND_NONE;
}

zs_round_header *zs_cunit_header(zs_cunit *unit)
{
    return unit->header;
}

void zs_cunit_undo_post(zs_comm *comm, zs_cunit *unit)
{
    if (unit->state == ZS_ROUND_NONE) return;
    unit->round--;
    unit->state = ZS_ROUND_NONE;
    drop(comm, unit);
}

/* Runs a part of a round that is a collective. */
static zs_status entered(zs_comm *comm, zs_cunit *unit, zs_status (*part)(zs_comm *, zs_cunit *))
{
    ZS_COLLECTIVE(comm, part(comm, unit));
}

zs_status zs_cunit_post(zs_comm *comm, zs_cunit *unit, const zs_bucket *bucket)
{
    ZS_TRY(check_usable(comm));
    ZS_TRY(check_post(unit, bucket));
    unit->round++;
    unit->state = ZS_ROUND_POSTED;
    unit->bucket = bucket;
    unit->data[comm->rank] = bucket != NULL ? bucket->ptr : NULL;
    unit->headers[comm->rank] = unit->header;
    if (bucket != NULL) unit->header->flags |= ZS_ROUND_BUCKET;
    if (comm->ops->rounds->send == NULL) return ZS_OK;
    zs_status status = entered(comm, unit, comm->ops->rounds->send);
    if (status != ZS_OK) zs_cunit_undo_post(comm, unit);
    return status;
}

/* Has the posted round begun? A failure to begin is reported here. */
static zs_status begun(zs_comm *comm, zs_cunit *unit, zs_wait wait, bool *done)
{
    *done = true;
    return comm->ops->rounds->begun != NULL ? comm->ops->rounds->begun(comm, unit, wait, done) : ZS_OK;
}

/* Ends a round that all have posted but this rank cannot map; the others wait for it. Returns ZS_ERR_MEMORY. */
static zs_status end_unmapped(zs_comm *comm, zs_cunit *unit)
{
    unit->state = ZS_ROUND_COLLECTED;
    if (unit->spec.mode == ZS_REDUCE_SCATTER) {
        (void)zs_cunit_release(comm, unit);
    } else {
        unit->header->flags |= ZS_ROUND_NO_SUM;
        (void)zs_cunit_share(comm, unit);
    }
    return ZS_ERR_MEMORY;
}

zs_status zs_cunit_collect(zs_comm *comm, zs_cunit *unit, zs_wait wait, bool *ready, zs_sources *out)
{
    /* If another collective follows, all ranks reach this in one order: no check first. */
    bool follows = is_collective(comm) && unit->spec.mode == ZS_REDUCE_ALL;
    zs_wait how = follows ? ZS_WAIT : wait;
    *ready = false;
    ZS_TRY(check_usable(comm));
    ZS_TRY(begun(comm, unit, how, ready));
    if (!*ready) return ZS_OK;
    zs_status status = expect(unit, ZS_ROUND_POSTED, "collect");
    if (status == ZS_OK && comm->ops->rounds->arrive != NULL) {
        status = comm->ops->rounds->arrive(comm, unit, how, ready);
        if (status != ZS_OK && is_collective(comm)) { /* a failed collective cannot be repeated */
            unit->state = ZS_ROUND_NONE;
            drop(comm, unit);
        }
    }
    if (status == ZS_ERR_MEMORY && *ready && !is_collective(comm)) return end_unmapped(comm, unit);
    *ready = *ready && status == ZS_OK;
    if (!*ready) return status;
    unit->state = ZS_ROUND_COLLECTED;
    fill_sources(unit, out);
    return ZS_OK;
}

zs_status zs_cunit_share(zs_comm *comm, zs_cunit *unit)
{
    ZS_TRY(check_usable(comm));
    ZS_TRY(expect(unit, ZS_ROUND_COLLECTED, "share"));
    if (comm->ops->rounds->share != NULL) ZS_TRY(entered(comm, unit, comm->ops->rounds->share));
    for (int r = 0; r < comm->world && is_collective(comm); r++)
        unit->data[r] = unit->bucket->ptr;
    unit->state = ZS_ROUND_SHARED;
    return ZS_OK;
}

/* Have all ranks shared a sum? */
static zs_status check_sums(const zs_comm *comm, const zs_cunit *unit)
{
    int none = (unit->header->flags & ZS_ROUND_NO_SUM) != 0 ? comm->rank : -1; /* then it lacks the peers' headers */
    for (int r = 0; r < comm->world && none < 0; r++)
        if ((unit->headers[r]->flags & ZS_ROUND_NO_SUM) != 0) none = r;
    if (none < 0) return ZS_OK;
    return ZS_FAIL(
        ZS_ERR_MEMORY,
        "unit '%s': rank %d cannot map the gradients that the other ranks have posted, so all ranks lack its "
        "part of the sum; call zero_grad() and skip the step on all ranks, and give rank %d more address "
        "space (ulimit -v) or mappings (vm.max_map_count)",
        unit->spec.name, none, none);
}

zs_status zs_cunit_collect_shared(zs_comm *comm, zs_cunit *unit, zs_wait wait, bool *ready, zs_sources *out)
{
    *ready = false;
    ZS_TRY(expect(unit, ZS_ROUND_SHARED, "collect_shared"));
    *ready = true;
    if (comm->ops->rounds->arrive_shared != NULL) ZS_TRY(comm->ops->rounds->arrive_shared(comm, unit, wait, ready));
    if (!*ready) return ZS_OK;
    unit->state = ZS_ROUND_GATHERED;
    fill_sources(unit, out);
    return is_collective(comm) ? ZS_OK : check_sums(comm, unit);
}

zs_status zs_cunit_release(zs_comm *comm, zs_cunit *unit)
{
    ZS_TRY(check_usable(comm));
    ZS_TRY(expect(unit, unit->spec.mode == ZS_REDUCE_ALL ? ZS_ROUND_GATHERED : ZS_ROUND_COLLECTED, "release"));
    zs_status status = comm->ops->rounds->release != NULL ? comm->ops->rounds->release(comm, unit) : ZS_OK;
    drop(comm, unit);
    unit->state = ZS_ROUND_NONE;
    return status;
}

zs_status zs_cunit_reusable(zs_comm *comm, zs_cunit *unit, zs_wait wait, bool *ready)
{
    /* If peers have their own copies, only the sum that share() gathers arrives in the bucket. */
    *ready = unit->spec.mode == ZS_REDUCE_SCATTER || unit->state == ZS_ROUND_NONE;
    return comm->ops->rounds->reusable != NULL ? comm->ops->rounds->reusable(comm, unit, wait, ready) : ZS_OK;
}

void zs_cunit_rescale(zs_comm *comm, zs_cunit *unit, double factor)
{
    if (comm->ops->rounds->rescale != NULL) comm->ops->rounds->rescale(comm, unit, factor);
}
