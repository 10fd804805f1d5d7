/* engine.c - the parts of an engine: its units and their order, memory, buffers. See engine.h. */
#include "base/tree.h"
#include "engine/engine_inside.h"

#include "engine/engine.h"
#include "reduce/bucket.h"
#include "reduce/leaves.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- birth, death, list of units ---------------------------------------------------------------------------------- */

/* Ranks of a replica group must have the same place in their shard groups. */
static zs_status check_mesh(const zs_ranks *ranks)
{
    if (ranks->replica_group == NULL) return ZS_OK;
    int mine[2] = {ranks->shard_group->rank, ranks->shard_group->world}, all[2 * ranks->replica_group->world];
    ZS_TRY(zs_comm_exchange(ranks->replica_group, mine, sizeof mine, all));
    for (int r = 0; r < ranks->replica_group->world; r++)
        if (memcmp(&all[2 * r], mine, sizeof mine) != 0)
            return ZS_FAIL(ZS_ERR_VALUE,
                           "the process groups do not form a mesh: rank %d of %d of a shard group must replicate with "
                           "rank %d of the other shard groups, got rank %d of %d; pass device_mesh= instead",
                           mine[0], mine[1], mine[0], all[2 * r], all[2 * r + 1]);
    return ZS_OK;
}

/* Learns which shard each rank has. */
static zs_status find_shards(zs_engine *engine)
{
    const zs_ranks *ranks = &engine->context.ranks;
    int world = ranks->all->world, n_shards = ranks->shards->world;
    engine->context.n_shards = n_shards;
    engine->context.shard = ranks->replica_group == NULL
                                ? ranks->shards->rank
                                : ranks->shard_group->rank * ranks->replica_group->world + ranks->replica_group->rank;
    engine->context.shard_of = calloc((size_t)world, sizeof *engine->context.shard_of);
    if (engine->context.shard_of == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating an engine");
    for (int r = 0; r < world; r++)
        engine->context.shard_of[r] = r;
    if (ranks->shards == ranks->all && ranks->replica_group == NULL) return ZS_OK;
    ZS_TRY(check_mesh(ranks));
    int mine[2] = {engine->context.shard, n_shards}, all[2 * world];
    ZS_TRY(zs_comm_exchange(ranks->all, mine, sizeof mine, all));
    for (int r = 0; r < world; r++) {
        if (all[2 * r + 1] != n_shards || world % n_shards != 0)
            return ZS_FAIL(ZS_ERR_VALUE,
                           "all shard groups must have the same size, which must divide the world size: got %d ranks "
                           "here, %d on rank %d, world size %d; pass device_mesh= instead",
                           n_shards, all[2 * r + 1], r, world);
        engine->context.shard_of[r] = all[2 * r];
    }
    return ZS_OK;
}

static void retain_ranks(const zs_ranks *ranks)
{
    zs_comm_retain(ranks->all);
    zs_comm_retain(ranks->shards);
    zs_comm_retain(ranks->shard_group);
    if (ranks->replica_group != NULL) zs_comm_retain(ranks->replica_group);
}

static void release_ranks(const zs_ranks *ranks)
{
    zs_comm_release(ranks->replica_group);
    zs_comm_release(ranks->shard_group);
    zs_comm_release(ranks->shards);
    zs_comm_release(ranks->all);
}

uint64_t zs_engine_number(const zs_engine *engine)
{
    return engine->number;
}

const zs_ranks *zs_engine_ranks(const zs_engine *engine)
{
    return &engine->context.ranks;
}

static zs_status make_slot(void *shard_group, size_t bytes, zs_mem **out)
{
    zs_comm *comm = shard_group;
    return zs_comm_slot_new(comm, bytes, out);
}

static zs_slot_maker slots_of(zs_comm *comm)
{
    bool makes = !zs_comm_is_dry(comm) && zs_comm_makes_slots(comm);
    return (zs_slot_maker){makes ? make_slot : NULL, comm, zs_comm_slot_sharers(comm)};
}

zs_status zs_engine_make(const zs_ranks *ranks, const char *name, const zs_engine_hooks *hooks, const zs_actions *act,
                         zs_engine **out)
{
    zs_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating an engine");
    zs_schedule_init(&engine->context.schedule, act);
    zs_schedule_set_transports(&engine->context.schedule, !ranks->shard_group->ops->mapped, !ranks->all->ops->mapped,
                               ranks->all->world == 1);
    zs_refs_init(&engine->refs);
    static _Atomic uint64_t made;
    engine->number = atomic_fetch_add(&made, 1) + 1;
    engine->hooks = hooks;
    engine->context.calls = &hooks->calls;
    engine->context.ranks = *ranks;
    engine->history.window = engine->history.load_number = 1;
    zs_keep_gathered_set(engine, 0);
    retain_ranks(ranks);
    zs_comm_set_near(ranks->all, ranks->shard_group);
    zs_status status = ZS_OK;
    ZS_TRY_GOTO(status, find_shards(engine), fail);
    ZS_TRY_GOTO(status, zs_arena_new(ranks->all->device, &engine->context.arena), fail);
    zs_arena_made_by(engine->context.arena, slots_of(ranks->shard_group));
    ZS_TRY_GOTO(status, zs_comm_reader_new(ranks->shard_group, name, &engine->reader), fail);
    engine->context.model.number = ranks->shard_group->models;
    snprintf(engine->context.model.name, sizeof engine->context.model.name, "%s", name);
    *out = engine;
    return ZS_OK;
fail:
    zs_engine_release(engine);
    return status;
}

zs_engine *zs_engine_retain(zs_engine *engine)
{
    zs_refs_take(&engine->refs);
    return engine;
}

void zs_engine_release(void *pointer)
{
    zs_engine *engine = pointer;
    if (engine == NULL || !zs_refs_drop(&engine->refs)) return;
    zs_engine_list_remove(engine);
    zs_pace_backward_end(engine);
    zs_profile_drop(engine->step);
    zs_graph_ranges_free(&engine->ranges);
    if (engine->reader != NULL) zs_comm_reader_free(engine->context.ranks.shard_group, engine->reader);
    zs_buckets_free(&engine->context.schedule, engine->context.ranks.all);
    zs_schedule_free(&engine->context.schedule);
    zs_device_end_trail(zs_context_device(&engine->context), &engine->context.trail);
    zs_arena_free(engine->context.arena);
    zs_buffers_free(engine);
    free(engine->calls);
    free(engine->context.shard_of);
    zs_tree_free(engine->context.tree);
    zs_disk_release(engine->context.offload.disk);
    release_ranks(&engine->context.ranks);
    free(engine);
}

zs_status zs_engine_add(zs_engine *engine, zs_unit *unit)
{
    ZS_TRY(zs_schedule_add(&engine->context.schedule, &unit->record));
    zs_context_replan(&engine->context);
    zs_sample_forget(engine);
    zs_comm_write_end(engine->context.ranks.shard_group, engine->reader, false); /* its shards are empty yet */
    return ZS_OK;
}

void zs_engine_set_calls(zs_engine *engine, zs_call *calls, size_t n)
{
    free(engine->calls);
    engine->calls = calls;
    engine->n_calls = n;
    zs_context_replan(&engine->context);
    zs_keep_gathered_choose(engine);
}

static void forget_calls(zs_engine *engine, const zs_unit *unit)
{
    size_t kept = 0;
    for (size_t i = 0; i < engine->n_calls; i++)
        if (engine->calls[i].unit != unit) engine->calls[kept++] = engine->calls[i];
    engine->n_calls = kept;
}

void zs_engine_forget(zs_engine *engine, zs_unit *unit)
{
    zs_schedule_forget(&engine->context.schedule, &unit->record);
    zs_graph_ranges_forget(&engine->ranges, unit);
    forget_calls(engine, unit);
    zs_context_replan(&engine->context);
    zs_sample_forget(engine);
}

zs_status zs_engine_take_over(zs_engine *engine, zs_unit *unit)
{
    zs_engine *old = zs_engine_of(unit);
    if (memcmp(&old->context.ranks, &engine->context.ranks, sizeof old->context.ranks) != 0)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "unit '%s' uses another process group, transport or kind of strategy than the outer FSDP(...): "
                       "pass the same to all units; zero1, hybrid_full and an integer reshard_after_forward must be "
                       "used for all units or none",
                       zs_unit_label(unit->name));
    ZS_TRY(zs_engine_add(engine, unit));
    zs_engine_forget(old, unit);
    if (!zs_unit_class_is_current(unit)) {
        old->context.n_stale_classes--;
        engine->context.n_stale_classes++;
    }
    unit->context = &zs_engine_retain(engine)->context;
    zs_engine_release(old);
    return ZS_OK;
}

zs_status zs_engine_set_order(zs_engine *engine, zs_unit *const *units, size_t n)
{
    zs_record *records[n + 1];
    if (n != zs_engine_n_units(engine))
        return ZS_FAIL(ZS_ERR_VALUE, "set_order() expects all units of the engine: got %zu of %zu", n,
                       zs_engine_n_units(engine));
    for (size_t i = 0; i < n; i++) {
        if (units[i]->context != &engine->context)
            return ZS_FAIL(ZS_ERR_VALUE, "unit '%s' belongs to another engine", zs_unit_label(units[i]->name));
        records[i] = &units[i]->record;
    }
    zs_schedule_set_order(&engine->context.schedule, records);
    zs_sample_written(engine);
    zs_mem_heap_freed(0); /* of the units that have just been made */
    zs_context_replan(&engine->context);
    return ZS_OK;
}

void zs_engine_set_prefetch(zs_engine *engine, zs_prefetch prefetch)
{
    zs_schedule_set_ahead(&engine->context.schedule, prefetch.ahead);
    zs_context_replan(&engine->context);
}

void zs_engine_set_codes(zs_engine *engine, zs_wire grads, zs_wire params)
{
    engine->context.grads_code = grads;
    engine->context.params_code = params;
}

zs_status zs_engine_add_leaves(zs_engine *engine, int n_leaves)
{
    zs_context *context = &engine->context;
    ZS_TRY(zs_tree_new(n_leaves, context->ranks.all->world, &context->tree));
    context->divided_by = n_leaves;
    context->schedule.adds_leaves = true;
    return ZS_OK;
}

void zs_engine_restart_step(zs_engine *engine)
{
    if (engine->context.tree == NULL) return;
    zs_leaves_restart(&engine->context);
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        zs_leaves_drop(zs_engine_unit(engine, i));
}

zs_status zs_engine_begin_leaf(zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        ZS_TRY(zs_leaves_check(zs_engine_unit(engine, i)));
    engine->context.leaf = ZS_LEAF_BEGUN;
    return ZS_OK;
}

bool zs_engine_leaf_is_done(const zs_engine *engine)
{
    return engine->context.leaf == ZS_LEAF_DONE;
}

bool zs_engine_codes_gradients(const zs_engine *engine)
{
    return engine->context.grads_code != ZS_WIRE_EXACT && engine->context.ranks.all->per_host > 0;
}

void zs_engine_rescale(const zs_engine *engine, double factor)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        const zs_unit *unit = zs_engine_unit(engine, i);
        if (unit->cunit != NULL) zs_cunit_rescale(engine->context.ranks.all, unit->cunit, factor);
    }
}
