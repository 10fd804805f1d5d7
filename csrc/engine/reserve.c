/* reserve.c - an engine's memory: the reservation before the first step, and the prediction.
 *
 * The arena and the pool are sized by a plan of a step (plan.h), so the prediction matches the memory. Untouched
 * address space costs nothing: reserving early is free.
 */
#include "engine/engine.h"
#include "engine/engine_inside.h"
#include "reduce/bucket.h"
#include "reduce/leaves.h"

#include <stdlib.h>

/* --- reserving ---------------------------------------------------------------------------------------------------- */

/* Writes the calls of a forward to `out`, and at the end of a reader's forward, the units read in it; returns their
 * number. Writes nothing if `out` is NULL. */
static size_t list_calls(const zs_engine *engine, zs_call *out)
{
    const size_t n_units = zs_engine_n_units(engine);
    size_t n = 0, first_read = 0; /* of the units; most models have none, and many units */
    while (first_read < n_units && zs_engine_unit(engine, first_read)->record.read.reader == NULL)
        first_read++;
    for (size_t c = 0; c < engine->n_calls; c++) {
        const zs_call *call = &engine->calls[c];
        for (size_t i = first_read; call->what == ZS_CALL_EXIT && i < n_units; i++) {
            zs_unit *unit = zs_engine_unit(engine, i);
            if (unit->record.read.reader != &call->unit->record) continue;
            if (out != NULL) out[n] = (zs_call){unit, ZS_CALL_READ};
            n++;
        }
        if (out != NULL) out[n] = *call;
        n++;
    }
    return n;
}

/* `events`: NULL, or the list for the acts of a step. */
static zs_status make_plan(const zs_engine *engine, bool stepped, zs_dry_events *events, zs_plan *plan)
{
    size_t n_calls = list_calls(engine, NULL);
    zs_call *calls = malloc((n_calls + 1) * sizeof *calls);
    *plan = (zs_plan){0};
    if (calls == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a plan");
    (void)list_calls(engine, calls);

    size_t n = zs_engine_n_units(engine);
    zs_unit *units[n + 1];
    for (size_t i = 0; i < n; i++)
        units[i] = zs_engine_unit(engine, i);
    const int *ahead = engine->context.schedule.ahead;
    zs_plan_spec spec = {.units = units, .n_units = n, .calls = calls, .n_calls = n_calls};
    spec.ahead[0] = ahead[0];
    spec.ahead[1] = ahead[1];
    spec.stepped = stepped;
    spec.events = events;
    zs_status status = zs_plan_make(&engine->context, &spec, plan);
    free(calls);
    return status;
}

static zs_status fit(zs_engine *engine)
{
    zs_plan plan;
    zs_status status = make_plan(engine, false, NULL, &plan);
    ZS_THEN(status, zs_arena_fit(engine->context.arena, plan.slots));
    ZS_THEN(status, zs_buckets_fit(&engine->context.schedule, engine->context.ranks.all, plan.buckets, plan.n_buckets));
    ZS_THEN(status, zs_comm_reserve(engine->context.ranks.all, plan.areas));
    zs_plan_free(&plan);
    return status;
}

zs_status zs_engine_reserve(zs_engine *engine)
{
    if (engine->context.reserved || engine->context.schedule.stage != ZS_IDLE || engine->context.schedule.n_open > 0)
        return ZS_OK;
    zs_engine_note_peak(engine);
    zs_status status = fit(engine);
    engine->context.reserved = status == ZS_OK;
    if (status == ZS_OK) engine->keep_gathered.reserved = engine->keep_gathered.bytes;
    if (status == ZS_ERR_MEMORY && engine->keep_gathered.bytes > 0)
        zs_rephrase("%s; %zu MiB of it are for parameters that stay gathered: pass FSDP(keep_gathered=False)",
                    zs_last_message(), engine->keep_gathered.bytes >> 20);
    return status;
}

/* --- predicted ---------------------------------------------------------------------------------------------------- */

static size_t bytes_without_units(const zs_comm *comm)
{
    zs_room room = zs_comm_room(comm, NULL);
    return room.fixed + room.talk;
}

/* Bytes of full gradients that a unit has at most before its last backward of a step: leaves, or those of no_sync(). */
static size_t most_before_sum(const zs_unit *unit)
{
    if (unit->context->tree != NULL) return zs_leaves_most_bytes(unit);
    return unit->record.was_unsynced && !unit->record.is.replicated ? zs_unit_local_bytes(unit) : 0;
}

static void add_unit(const zs_unit *unit, bool stepped, zs_engine_bytes *bytes)
{
    const zs_comm *all = unit->context->ranks.all;
    *(unit->offloads.params ? &bytes->offloaded : &bytes->shards) += zs_unit_shard_bytes(unit);
    bytes->kept += zs_unit_secondary_bytes(unit);
    if (!zs_unit_reduces(unit)) return;
    size_t *grads = unit->offloads.grads ? &bytes->offloaded : &bytes->grads;
    size_t own = !stepped || unit->offloads.grads ? zs_unit_grad_bytes(unit) : 0, most = most_before_sum(unit);
    if (!unit->offloads.grads) most = most > own ? most - own : 0; /* these go before the unit's sum comes */
    *grads += own;
    bytes->grads += most;
    zs_cunit_spec spec = zs_unit_round_spec(unit);
    if (spec.n_flats > 0) bytes->transport += zs_comm_room(all, &spec).record;
}

zs_status zs_engine_predict(zs_engine *engine, bool stepped, zs_engine_bytes *out)
{
    zs_plan plan;
    zs_status status = make_plan(engine, stepped, NULL, &plan);
    const zs_comm *all = engine->context.ranks.all;
    zs_engine_bytes bytes = {.transport = zs_usage_of_transports(&engine->context.ranks, bytes_without_units)};
    for (size_t i = 0; i < zs_engine_n_units(engine) && status == ZS_OK; i++)
        add_unit(zs_engine_unit(engine, i), stepped || zs_engine_unit(engine, i)->borrows, &bytes);
    if (status == ZS_OK) {
        bytes.slots = zs_arena_bytes(plan.slots);
        bytes.transport += zs_arena_bytes(plan.areas) - zs_comm_room(all, NULL).talk;
    }
    for (size_t i = 0; i < plan.n_buckets; i++)
        bytes.buckets += zs_comm_bucket_room(all, plan.buckets[i]);
    zs_plan_free(&plan);
    zs_usage_add_up(&bytes);
    *out = bytes;
    return status;
}

zs_status zs_engine_predict_events(const zs_engine *engine, zs_dry_events *out)
{
    zs_plan plan;
    zs_status status = make_plan(engine, false, out, &plan);
    zs_plan_free(&plan);
    return status;
}

/* Of flats that are mapped from the ranks' shards. In memory: the own shard, and what lies before and behind it (a
 * core dump holds the own shard, so the system keeps them apart); on a disk: each rank's file. */
static size_t mappings_of(const zs_unit *unit)
{
    const zs_ranks *ranks = &unit->context->ranks;
    size_t shards = unit->offloads.params ? (size_t)ranks->shards->world : 3, count = 0;
    bool mapped = zs_comm_shares_memory(ranks->shards);
    bool kept = ranks->replica_group != NULL && zs_comm_shares_memory(ranks->shard_group);
    for (int f = 0; f < unit->n_flats && !unit->record.is.replicated; f++) {
        size_t copies = unit->flats[f].compute != unit->flats[f].dtype ? 2 : 1;
        count += (mapped ? copies * shards : 0) + (kept ? 3 : 0);
    }
    return count;
}

zs_status zs_engine_predict_mappings(const zs_engine *engine, size_t *out)
{
    zs_plan plan;
    const zs_comm *all = engine->context.ranks.all;
    zs_status status = make_plan(engine, false, NULL, &plan);
    *out = all->ops->mapped ? plan.n_buckets * (size_t)all->world : 0; /* the own ones, and those of all peers */
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        *out += mappings_of(zs_engine_unit(engine, i));
    zs_plan_free(&plan);
    return status;
}
