/* engine.c - what an engine has: its units and their order, memory, buffers. See schedule.h. */
#include "engine.h"

#include "hold.h"

#include <stdlib.h>
#include <string.h>

/* --- birth, death, list of units ---------------------------------------------------------------------------------------- */

/* Learns which part of the model each rank has. */
static zs_status find_parts(zs_engine *engine)
{
    int world = engine->comm->world, parts = engine->shards->world;
    engine->part_of = calloc((size_t)world, sizeof *engine->part_of);
    if (engine->part_of == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for an engine");
    for (int r = 0; r < world; r++)
        engine->part_of[r] = r;
    if (engine->shards == engine->comm) return ZS_OK;
    int mine[2] = {engine->shards->rank, parts}, all[2 * world];
    ZS_TRY(engine->comm->ops->exchange(engine->comm, mine, sizeof mine, all));
    for (int r = 0; r < world; r++) {
        if (all[2 * r + 1] != parts || world % parts != 0)
            return ZS_FAIL(ZS_ERR_VALUE,
                           "the groups to shard over differ in size: %d ranks here, %d at rank %d, of %d in all", parts,
                           all[2 * r + 1], r, world);
        engine->part_of[r] = all[2 * r];
    }
    return ZS_OK;
}

zs_status zs_engine_new(zs_comm *comm, zs_comm *shards, const char *name, zs_engine **out)
{
    zs_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for an engine");
    engine->refs = 1;
    engine->comm = zs_comm_retain(comm);
    engine->shards = zs_comm_retain(shards);
    zs_status status = ZS_OK;
    ZS_TRY_GOTO(status, find_parts(engine), fail);
    ZS_TRY_GOTO(status, zs_arena_new(&engine->arena), fail);
    ZS_TRY_GOTO(status, zs_pool_new(&engine->grads), fail);
    ZS_TRY_GOTO(status, zs_bucket_pool_new(comm, &engine->buckets), fail);
    ZS_TRY_GOTO(status, shards->ops->reader_new(shards, name, &engine->reader), fail);
    *out = engine;
    return ZS_OK;
fail:
    zs_engine_release(engine);
    return status;
}

zs_engine *zs_engine_retain(zs_engine *engine)
{
    __atomic_fetch_add(&engine->refs, 1, __ATOMIC_RELAXED);
    return engine;
}

static void free_buffers(zs_engine *engine)
{
    for (size_t i = 0; i < engine->n_buffers; i++)
        zs_tensor_free(engine->buffers[i]);
    free(engine->buffers);
    engine->buffers = NULL;
    engine->n_buffers = 0;
}

void zs_engine_release(void *pointer)
{
    zs_engine *engine = pointer;
    if (engine == NULL || __atomic_sub_fetch(&engine->refs, 1, __ATOMIC_ACQ_REL) != 0) return;
    if (engine->reader != NULL) engine->shards->ops->reader_free(engine->shards, engine->reader);
    zs_bucket_pool_free(engine->buckets);
    zs_arena_free(engine->arena);
    zs_pool_free(engine->grads);
    free_buffers(engine);
    free(engine->units);
    free(engine->part_of);
    zs_comm_release(engine->shards);
    zs_comm_release(engine->comm);
    free(engine);
}

zs_comm *zs_engine_comm(const zs_engine *engine)
{
    return engine->comm;
}

zs_comm *zs_engine_shards(const zs_engine *engine)
{
    return engine->shards;
}

const int *zs_engine_part_of(const zs_engine *engine)
{
    return engine->part_of;
}

zs_arena *zs_engine_arena(const zs_engine *engine)
{
    return engine->arena;
}

zs_pool *zs_engine_grads(const zs_engine *engine)
{
    return engine->grads;
}

zs_bucket_pool *zs_engine_buckets(const zs_engine *engine)
{
    return engine->buckets;
}

bool zs_engine_gave_up(const zs_engine *engine)
{
    return engine->gave_up;
}

zs_status zs_engine_add(zs_engine *engine, zs_unit *unit)
{
    zs_unit **grown = realloc(engine->units, (engine->n + 1) * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for unit '%s'", unit->name);
    engine->units = grown;
    engine->units[engine->n++] = unit;
    return ZS_OK;
}

void zs_engine_forget(zs_engine *engine, zs_unit *unit)
{
    for (size_t i = 0; i < engine->n; i++) {
        if (engine->units[i] != unit) continue;
        memmove(&engine->units[i], &engine->units[i + 1], (engine->n - i - 1) * sizeof *engine->units);
        engine->n--;
        return;
    }
}

zs_status zs_engine_adopt(zs_engine *engine, zs_unit *unit)
{
    zs_engine *old = unit->engine;
    if (old == engine) return ZS_OK;
    if (old->phase != IDLE || engine->phase != IDLE)
        return ZS_FAIL(ZS_ERR_STATE, "FSDP(...) was called while a forward or backward of unit '%s' is running",
                       unit->name);
    if (old->comm != engine->comm || old->shards != engine->shards)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "unit '%s' was wrapped with another process group or transport than the outer FSDP(...)",
                       unit->name);
    ZS_TRY(zs_engine_add(engine, unit));
    zs_bucket_forget(old->buckets, unit);
    zs_engine_forget(old, unit);
    old->lent_grads = true;
    unit->engine = zs_engine_retain(engine);
    zs_engine_release(old);
    return ZS_OK;
}

zs_status zs_engine_set_order(zs_engine *engine, zs_unit *const *units, size_t n)
{
    if (n != engine->n) return ZS_FAIL(ZS_ERR_VALUE, "the order names %zu units of %zu", n, engine->n);
    for (size_t i = 0; i < n; i++) {
        if (units[i]->engine != engine) return ZS_FAIL(ZS_ERR_VALUE, "unit '%s' is not of this engine", units[i]->name);
    }
    memcpy(engine->units, units, n * sizeof *units);
    return ZS_OK;
}

zs_status zs_engine_sync_buffers(zs_engine *engine, zs_tensor **tensors, size_t n)
{
    free_buffers(engine);
    engine->buffers = tensors;
    engine->n_buffers = n;
    return ZS_OK;
}

/* --- facts ------------------------------------------------------------------------------------------------------------------ */

zs_engine_bytes zs_engine_memory(const zs_engine *engine)
{
    zs_engine_bytes bytes = {.slots = zs_arena_bytes(engine->arena),
                             .buckets = zs_bucket_pool_bytes(engine->buckets),
                             .transport = engine->comm->ops->bytes(engine->comm)};
    if (engine->shards != engine->comm) bytes.transport += engine->shards->ops->bytes(engine->shards);
    for (size_t i = 0; i < engine->n; i++) {
        bytes.shards += zs_unit_shard_bytes(engine->units[i]);
        bytes.grads += zs_unit_grad_bytes(engine->units[i]);
        bytes.slots += zs_hold_bytes(engine->units[i]);
    }
    return bytes;
}
