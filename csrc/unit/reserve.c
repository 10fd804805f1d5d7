/* reserve.c - an engine's memory: what is reserved before the first step, and what will be held.
 *
 * The one idea: a plan (plan.h) says what a step takes, and the arena and the pool are made to fit it, so that what is
 * predicted is what there is. Address space that nobody has touched costs nothing: reserving early is free.
 */
#include "unit/bucket.h"
#include "unit/engine.h"
#include "unit/in_backward.h"
#include "unit/schedule.h"

#include <stdlib.h>

/* --- reserving -------------------------------------------------------------------------------------------------------- */

void zs_engine_set_calls(zs_engine *engine, zs_call *calls, size_t n)
{
    free(engine->calls);
    engine->calls = calls;
    engine->n_calls = n;
    zs_engine_replan(engine);
}

zs_status zs_engine_reserve(zs_engine *engine)
{
    if (engine->reserved || engine->phase != IDLE || engine->n_open > 0) return ZS_OK;
    zs_engine_note_peak(engine);
    zs_plan plan;
    zs_status status = zs_plan_make(engine, false, &plan);
    ZS_THEN(status, zs_arena_fit(engine->arena, plan.slots));
    ZS_THEN(status, zs_bucket_pool_fit(engine->buckets, plan.buckets, plan.n_buckets));
    zs_comm *all = engine->ranks.all;
    if (status == ZS_OK && all->ops->reserve != NULL) status = all->ops->reserve(all, plan.areas);
    zs_plan_free(&plan);
    engine->reserved = status == ZS_OK;
    return status;
}

/* --- predicted ----------------------------------------------------------------------------------------------------------- */

static size_t bytes_without_units(const zs_comm *comm)
{
    zs_room room = comm->ops->room(NULL, comm->world);
    return room.fixed + room.talk;
}

static void add_unit(const zs_unit *unit, bool stepped, zs_engine_bytes *bytes)
{
    const zs_comm *all = zs_engine_comm(unit->engine);
    *(unit->offloads.params ? &bytes->offloaded : &bytes->shards) += zs_unit_shard_bytes(unit);
    bytes->kept += zs_unit_kept_bytes(unit);
    if (!zs_unit_reduces(unit)) return;
    size_t *grads = unit->offloads.grads ? &bytes->offloaded : &bytes->grads;
    for (int f = 0; f < unit->n_flats && (!stepped || unit->offloads.grads); f++)
        if (unit->flats[f].trainable) *grads += zs_flat_own_bytes(unit, &unit->flats[f]);
    zs_cunit_spec spec = zs_unit_round_spec(unit);
    if (spec.n_slices > 0) bytes->transport += all->ops->room(&spec, all->world).record;
}

zs_status zs_engine_predict(zs_engine *engine, bool stepped, zs_engine_bytes *out)
{
    zs_plan plan;
    zs_status status = zs_plan_make(engine, stepped, &plan);
    const zs_comm *all = engine->ranks.all;
    zs_engine_bytes bytes = {.transport = zs_usage_of_transports(&engine->ranks, bytes_without_units)};
    for (size_t i = 0; i < engine->n && status == ZS_OK; i++)
        add_unit(engine->units[i], stepped || engine->units[i]->borrows, &bytes);
    if (status == ZS_OK) {
        bytes.slots = zs_arena_bytes(plan.slots);
        bytes.transport += zs_arena_bytes(plan.areas) - all->ops->room(NULL, all->world).talk;
    }
    for (size_t i = 0; i < plan.n_buckets; i++)
        bytes.buckets += all->ops->bucket_room(plan.buckets[i]);
    zs_plan_free(&plan);
    zs_usage_add_up(&bytes);
    *out = bytes;
    return status;
}
