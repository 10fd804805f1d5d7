/* secondary.c - secondary shards: a copy of the parameters that stays between steps, sharded over fewer ranks.
 *
 * The optimizer's shards are spread over all ranks; forward and backward gather from a copy that the shard group shares
 * (a host's ranks, or with zero1 each rank alone). The replica group, whose ranks have the same secondary shard, renews
 * it when shards have changed. A rank notices that alone: the copy has its previous values. See unit.h. */
#include "unit/unit.h"

#include "device/arena.h"
#include "unit/context.h"

#include <stdlib.h>

enum { EXCHANGED = 4096 }; /* bytes that one exchange takes */

/* This rank's part of the copy. */
static const zs_flat_mem *source_of(const zs_flat *flat)
{
    return flat->low.mem != NULL ? &flat->low : &flat->mem;
}

zs_status zs_secondary_new(zs_unit *unit, zs_flat *flat)
{
    zs_comm *replica_group = unit->context->ranks.replica_group, *shard_group = unit->context->ranks.shard_group;
    if (replica_group == NULL) return ZS_OK;
    size_t shard_bytes = (size_t)flat->layout.shard_numel * flat->compute_size;
    return zs_comm_flat_new(shard_group, shard_bytes * (size_t)replica_group->world, &flat->secondary);
}

static zs_status is_stale(const zs_flat *flat, const zs_comm *replica_group, unsigned char *stale)
{
    const zs_flat_mem *own = source_of(flat);
    const char *given = flat->secondary.shard + (size_t)replica_group->rank * own->shard_bytes;
    bool same = false;
    if (!flat->spoiled) ZS_TRY(zs_device_same(zs_device_of(own->mem), given, own->shard, own->shard_bytes, &same));
    *stale = !same;
    return ZS_OK;
}

/* Number of flats with a secondary shard. */
static size_t count_secondary(zs_record *const *records, size_t n)
{
    size_t found = 0;
    for (size_t i = 0; i < n; i++)
        for (int f = 0; f < zs_unit_of(records[i])->n_flats; f++)
            found += zs_unit_of(records[i])->flats[f].secondary.mem != NULL;
    return found;
}

/* One byte for each of them: must it be renewed? */
static zs_status look(const zs_comm *replica_group, zs_record *const *records, size_t n, unsigned char *stale)
{
    for (size_t i = 0; i < n; i++)
        for (int f = 0; f < zs_unit_of(records[i])->n_flats; f++)
            if (zs_unit_of(records[i])->flats[f].secondary.mem != NULL)
                ZS_TRY(is_stale(&zs_unit_of(records[i])->flats[f], replica_group, stale++));
    return ZS_OK;
}

/* Informs each rank of the copies that any of them must renew. */
static zs_status agree(zs_comm *replica_group, unsigned char *stale, size_t n)
{
    unsigned char *all = malloc((size_t)replica_group->world * EXCHANGED);
    if (all == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing parameters");
    zs_status status = ZS_OK;
    for (size_t begin = 0; begin < n && status == ZS_OK; begin += EXCHANGED) {
        size_t size = n - begin < EXCHANGED ? n - begin : EXCHANGED;
        status = zs_comm_exchange(replica_group, stale + begin, size, all);
        for (size_t i = 0; i < (size_t)replica_group->world * size && status == ZS_OK; i++)
            stale[begin + i % size] |= all[i];
    }
    free(all);
    return status;
}

static zs_status renew(zs_comm *replica_group, const zs_unit *unit, zs_flat *flat)
{
    flat->spoiled = true;
    ZS_TRY(zs_comm_gather(replica_group, source_of(flat), unit->name,
                          (zs_target){.mem = flat->secondary.mem, .full = flat->secondary.shard}));
    flat->spoiled = false;
    return ZS_OK;
}

static zs_status renew_all(zs_comm *replica_group, zs_record *const *records, size_t n, const unsigned char *stale)
{
    for (size_t i = 0; i < n; i++) {
        for (int f = 0; f < zs_unit_of(records[i])->n_flats; f++)
            if (zs_unit_of(records[i])->flats[f].secondary.mem != NULL && *stale++)
                ZS_TRY(renew(replica_group, zs_unit_of(records[i]), &zs_unit_of(records[i])->flats[f]));
    }
    return ZS_OK;
}

zs_status zs_secondary_refresh(zs_comm *replica_group, zs_record *const *records, size_t n)
{
    size_t n_flats = count_secondary(records, n);
    unsigned char *stale = malloc(n_flats + 1);
    if (stale == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing parameters");
    zs_status status = look(replica_group, records, n, stale);
    bool named = zs_call_begin("forward()");
    ZS_THEN(status, agree(replica_group, stale, n_flats));
    if (named) zs_call_end();
    ZS_THEN(status, renew_all(replica_group, records, n, stale));
    free(stale);
    return status;
}

/* Shards come in the order of ranks, and are wanted in their own. */
zs_status zs_secondary_gather_exact(zs_unit *unit, const zs_flat *flat, zs_mem *slot)
{
    zs_comm *shards = unit->context->ranks.shards;
    const int *shard_of = unit->context->shard_of;
    size_t bytes = flat->mem.shard_bytes;
    zs_mem *ordered = NULL;
    const zs_device *device = zs_device_of(slot);
    ZS_TRY(zs_arena_take_own(unit->context->arena, bytes * (size_t)shards->world, &ordered));
    zs_status status =
        zs_comm_gather(shards, &flat->mem, unit->name, (zs_target){.mem = ordered, .full = ordered->ptr});
    for (int r = 0; r < shards->world && status == ZS_OK; r++)
        status = zs_device_copy(device, ZS_STREAM_COMPUTE, (char *)slot->ptr + (size_t)shard_of[r] * bytes,
                                (char *)ordered->ptr + (size_t)r * bytes, bytes);
    zs_arena_give(unit->context->arena, ordered);
    return status;
}

void zs_secondary_spoil(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++)
        unit->flats[f].spoiled = true;
}
