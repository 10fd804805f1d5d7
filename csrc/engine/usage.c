/* usage.c - see usage.h. */
#include "engine/usage.h"

#include "base/profile.h"
#include "engine/engine_inside.h"
#include "reduce/bucket.h"
#include "reduce/leaves.h"
#include "unit/unit.h"

#include <string.h>

size_t zs_usage_of_transports(const zs_ranks *ranks, size_t (*of)(const zs_comm *))
{
    zs_comm *each[ZS_RANKS];
    size_t n = zs_ranks_list(ranks, each), total = 0;
    for (size_t i = 0; i < n; i++)
        total += of(each[i]);
    return total;
}

static size_t bytes_now(const zs_comm *comm)
{
    return zs_comm_bytes(comm);
}

void zs_usage_add_up(zs_engine_bytes *bytes)
{
    bytes->total = bytes->shards + bytes->kept + bytes->grads + bytes->slots + bytes->buckets + bytes->transport;
}

static size_t gradients_of(const zs_unit *unit)
{
    return zs_unit_held_grad_bytes(unit) + zs_leaves_bytes(unit);
}

zs_engine_bytes zs_engine_memory(const zs_engine *engine)
{
    zs_engine_bytes bytes = {.slots = zs_arena_bytes(engine->context.arena),
                             .buckets = zs_buckets_bytes(&engine->context.schedule, false),
                             .transport = zs_usage_of_transports(&engine->context.ranks, bytes_now)};
    const zs_disk *disk = NULL;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        const zs_unit_offload *offloads = &zs_engine_unit(engine, i)->offloads;
        if (!offloads->params) bytes.shards += zs_unit_shard_bytes(zs_engine_unit(engine, i));
        bytes.grads += gradients_of(zs_engine_unit(engine, i));
        if (offloads->disk != NULL && offloads->disk != disk) bytes.offloaded += zs_disk_bytes(offloads->disk);
        if (offloads->disk != NULL) disk = offloads->disk; /* units of one FSDP() call are adjacent */
        bytes.kept += zs_unit_secondary_bytes(zs_engine_unit(engine, i));
        bytes.slots += zs_pinned_bytes(zs_engine_unit(engine, i));
    }
    zs_usage_add_up(&bytes);
    return bytes;
}

/* Sets the numbers that change within a step, except for gradients. */
static void see_use(const zs_engine *engine, zs_engine_shown *shown)
{
    size_t lent = zs_arena_lent_bytes(engine->context.arena);
    size_t used = zs_buckets_bytes(&engine->context.schedule, true);
    shown->parts.slots = shown->pinned + lent;
    shown->parts.buckets = used;
    shown->idle = zs_arena_bytes(engine->context.arena) - lent;
    shown->idle += zs_buckets_bytes(&engine->context.schedule, false) - used;
}

static void show(zs_engine *engine, const zs_engine_shown *now)
{
    if (memcmp(now, &engine->shown, sizeof *now) == 0) return;
    engine->shown = *now;
    const zs_model *model = &engine->context.model;
    const zs_engine_bytes *parts = &now->parts;
    zs_profile_note(
        "zshard::memory shards=%zu kept=%zu grads=%zu slots=%zu buckets=%zu idle=%zu transport=%zu of %s %llu",
        parts->shards, parts->kept, parts->grads, parts->slots, parts->buckets, now->idle, parts->transport,
        model->name, (unsigned long long)model->number);
}

/* Updates the bytes of the unit's gradients. */
static void see_grads(zs_unit *unit, zs_engine_shown *shown)
{
    shown->parts.grads -= unit->shown_grads;
    unit->shown_grads = gradients_of(unit);
    shown->parts.grads += unit->shown_grads;
}

void zs_engine_trace_memory(zs_engine *engine)
{
    unsigned trace = zs_profile_trace();
    if (trace == 0) return;
    zs_engine_shown now = {.in_trace = trace, .parts = zs_engine_memory(engine)};
    now.pinned = now.parts.slots - zs_arena_bytes(engine->context.arena);
    now.parts.grads = 0;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        zs_engine_unit(engine, i)->shown_grads = 0;
        see_grads(zs_engine_unit(engine, i), &now);
    }
    see_use(engine, &now);
    show(engine, &now);
}

void zs_engine_trace_use(zs_unit *unit)
{
    zs_engine *engine = zs_engine_of(unit);
    unsigned trace = zs_profile_trace();
    if (trace == 0) return;
    if (engine->shown.in_trace != trace) {
        zs_engine_trace_memory(engine);
        return;
    }
    zs_engine_shown now = engine->shown;
    see_grads(unit, &now);
    see_use(engine, &now);
    show(engine, &now);
}

static void raise_to(size_t *peak, size_t now)
{
    if (now > *peak) *peak = now;
}

void zs_engine_note_peak(zs_engine *engine)
{
    zs_engine_bytes now = zs_engine_memory(engine), *peak = &engine->peak;
    raise_to(&peak->shards, now.shards);
    raise_to(&peak->kept, now.kept);
    raise_to(&peak->grads, now.grads);
    raise_to(&peak->slots, now.slots);
    raise_to(&peak->buckets, now.buckets);
    raise_to(&peak->transport, now.transport);
    raise_to(&peak->offloaded, now.offloaded);
    raise_to(&peak->total, now.total);
}

zs_engine_bytes zs_engine_peak(zs_engine *engine)
{
    zs_engine_note_peak(engine);
    return engine->peak;
}
