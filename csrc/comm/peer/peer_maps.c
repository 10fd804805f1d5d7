/* peer_maps.c - mappings of the peers' memory, and when they are closed. See peer.h.
 *
 * The one idea: an allocation is mapped when it is first heard of, under its number, and closed when its owner says that it
 * has gone, which it says where the hosts meet anyway. Until all have closed it the owner keeps it, so no mapping is ever of
 * something else than it was.
 */
#include "comm/peer/peer.h"
#include "device/cuda_driver.h"
#include "device/device_cuda.h"

#include <stdlib.h>
#include <string.h>

enum { NAMED = 500 }; /* allocations that a rank gives up at a time: what fits into an exchange */

/* A peer's allocation. */
typedef struct mapping {
    int rank;
    uint64_t number;
    char *at;
    bool kept; /* the pad is in it */
} mapping;

/* A shard of this rank, and those that belong to it. */
typedef struct known {
    uint64_t number, offset; /* where it lies */
    char **at;               /* [world], then the numbers of the peers' allocations [world]; owned */
    uint64_t *numbers;
} known;

struct zs_peer_maps {
    int rank, world;
    mapping *maps;                         /* [n_maps] */
    zs_peer_alloc **told;                  /* [n_told] that the peers know of; counted references */
    known *shards;                         /* [n_shards] */
    size_t n_maps, n_told, n_shards, last; /* last: the shard that was asked for last */
};

zs_status zs_peer_maps_new(int rank, int world, zs_peer_maps **out)
{
    zs_peer_maps *maps = calloc(1, sizeof *maps);
    if (maps == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the table of peer mappings");
    maps->rank = rank;
    maps->world = world;
    *out = maps;
    return ZS_OK;
}

static void forget_shard(zs_peer_maps *maps, size_t i)
{
    free(maps->shards[i].at);
    free(maps->shards[i].numbers);
    maps->shards[i] = maps->shards[--maps->n_shards];
}

void zs_peer_maps_keep(zs_peer_maps *maps)
{
    for (size_t i = 0; i < maps->n_maps; i++)
        maps->maps[i].kept = true;
}

void zs_peer_maps_close(zs_peer_maps *maps, bool all)
{
    size_t kept = 0;
    while (maps->n_shards > 0)
        forget_shard(maps, maps->n_shards - 1);
    for (size_t i = 0; i < maps->n_maps; i++)
        if (maps->maps[i].kept && !all)
            maps->maps[kept++] = maps->maps[i];
        else
            ZS_CU_FREE(cuIpcCloseMemHandle, (zs_cu_ptr)(uintptr_t)maps->maps[i].at);
    maps->n_maps = kept;
}

void zs_peer_maps_free(zs_peer_maps *maps, bool parted)
{
    if (maps == NULL) return;
    zs_peer_maps_close(maps, true);
    for (size_t i = 0; i < maps->n_told && parted; i++)
        zs_peer_alloc_release(maps->told[i]);
    free(maps->maps);
    free(maps->told);
    free(maps->shards);
    free(maps);
}

/* Room for one more of `n`; grows by doubling, so that steps allocate nothing. */
static zs_status grow(void **array, size_t n, size_t size)
{
    if (n > 0 && (n < 8 || (n & (n - 1)) != 0)) return ZS_OK;
    void *grown = realloc(*array, (n < 8 ? 8 : 2 * n) * size);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory growing a peer table beyond %zu entries", n);
    *array = grown;
    return ZS_OK;
}

/* --- addresses ------------------------------------------------------------------------------------------------------------- */

/* Takes over a reference to `alloc`. */
static zs_status note_told(zs_peer_maps *maps, zs_peer_alloc *alloc)
{
    bool told = false;
    for (size_t i = 0; i < maps->n_told; i++)
        told = told || maps->told[i] == alloc;
    zs_status status = told ? ZS_OK : grow((void **)&maps->told, maps->n_told, sizeof(zs_peer_alloc *));
    if (told || status != ZS_OK)
        zs_peer_alloc_release(alloc);
    else
        maps->told[maps->n_told++] = alloc;
    return status;
}

zs_status zs_peer_tell(zs_peer_maps *maps, const void *ptr, zs_peer_address *out)
{
    zs_peer_alloc *alloc = zs_peer_alloc_at(ptr);
    if (alloc == NULL)
        return ZS_FAIL(ZS_ERR_STATE,
                       "peers cannot map the memory at %p: zshard did not allocate it (please report this)", ptr);
    zs_status status = zs_peer_alloc_address(alloc, ptr, out);
    if (status == ZS_OK) return note_told(maps, alloc);
    zs_peer_alloc_release(alloc);
    return status;
}

zs_status zs_peer_map(zs_peer_maps *maps, int r, const zs_peer_address *address, char **out)
{
    for (size_t i = 0; i < maps->n_maps; i++) {
        if (maps->maps[i].rank != r || maps->maps[i].number != address->number) continue;
        *out = maps->maps[i].at + address->offset;
        return ZS_OK;
    }
    zs_cu_ptr ptr = 0;
    ZS_TRY(grow((void **)&maps->maps, maps->n_maps, sizeof *maps->maps));
    ZS_TRY(ZS_CU(cuIpcOpenMemHandle, &ptr, address->handle, ZS_CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    maps->maps[maps->n_maps++] =
        (mapping){r, address->number, (char *)(uintptr_t)ptr, false}; /* NOLINT: of the device */
    *out = (char *)(uintptr_t)ptr + address->offset;                  /* NOLINT */
    return ZS_OK;
}

/* --- shards ---------------------------------------------------------------------------------------------------------------- */

/* Shards are asked for in the order of modules or its reverse, so the last one's neighbours are looked at first. */
static const known *find_shard(zs_peer_maps *maps, uint64_t number, uint64_t offset)
{
    size_t n = maps->n_shards;
    for (size_t i = 0; i < n; i++) {
        size_t step = (i + 1) / 2, at = (maps->last + (i % 2 == 1 ? step : n - step)) % n;
        const known *shard = &maps->shards[at];
        if (shard->number != number || shard->offset != offset) continue;
        maps->last = at;
        return shard;
    }
    return NULL;
}

/* Ranks that are not of one mind about what is new would wait for each other here: the control transport has deadlines. */
static zs_status meet_shards(zs_peer *self, const void *shard, known *out)
{
    zs_peer_maps *maps = self->maps;
    zs_peer_address mine, all[maps->world];
    ZS_TRY(zs_peer_tell(maps, shard, &mine));
    ZS_TRY(zs_comm_exchange(self->control, &mine, sizeof mine, all));
    for (int r = 0; r < maps->world; r++) {
        out->numbers[r] = all[r].number;
        out->at[r] = (char *)(uintptr_t)shard;
        if (r != maps->rank) ZS_TRY(zs_peer_map(maps, r, &all[r], &out->at[r]));
    }
    out->number = mine.number;
    out->offset = mine.offset;
    return ZS_OK;
}

static zs_status add_shard(zs_peer *self, const void *shard)
{
    zs_peer_maps *maps = self->maps;
    size_t world = (size_t)maps->world;
    known made = {.at = calloc(world, sizeof *made.at), .numbers = calloc(world, sizeof *made.numbers)};
    zs_status status = made.at != NULL && made.numbers != NULL
                           ? grow((void **)&maps->shards, maps->n_shards, sizeof *maps->shards)
                           : ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the shards of %zu ranks", world);
    ZS_THEN(status, meet_shards(self, shard, &made));
    if (status == ZS_OK) {
        maps->last = maps->n_shards;
        maps->shards[maps->n_shards++] = made;
        return ZS_OK;
    }
    free(made.at);
    free(made.numbers);
    return status;
}

zs_status zs_peer_shards(zs_peer *self, const void *shard, char *const **out)
{
    zs_peer_maps *maps = self->maps;
    zs_peer_address own;
    ZS_TRY(zs_peer_tell(maps, shard, &own));
    const known *found = find_shard(maps, own.number, own.offset);
    if (found == NULL) {
        ZS_TRY(add_shard(self, shard));
        found = &maps->shards[maps->last];
    }
    *out = found->at;
    return ZS_OK;
}

/* --- what has gone ----------------------------------------------------------------------------------------------------------- */

/* What a rank says that it wants to give up. */
typedef struct going {
    uint32_t n, unused;
    uint64_t numbers[NAMED];
} going;

uint32_t zs_peer_gone(zs_backend *backend)
{
    const zs_peer_maps *maps = ((zs_peer *)backend)->maps;
    uint32_t gone = 0;
    for (size_t i = 0; i < maps->n_told; i++)
        gone += zs_peer_alloc_idle(maps->told[i]);
    return gone;
}

/* Rank `r` gives up what has that number: this rank reads it no more. */
static void close_mapping(zs_peer_maps *maps, int r, uint64_t number)
{
    for (size_t i = maps->n_shards; i-- > 0;)
        if (maps->shards[i].numbers[r] == number) forget_shard(maps, i);
    for (size_t i = 0; i < maps->n_maps; i++) {
        if (maps->maps[i].rank != r || maps->maps[i].number != number) continue;
        ZS_CU_FREE(cuIpcCloseMemHandle, (zs_cu_ptr)(uintptr_t)maps->maps[i].at);
        maps->maps[i--] = maps->maps[--maps->n_maps];
    }
    maps->last = 0;
}

static void give_up(zs_peer_maps *maps, const going *own)
{
    for (uint32_t k = 0; k < own->n; k++)
        for (size_t i = 0; i < maps->n_told; i++) {
            if (zs_peer_alloc_number(maps->told[i]) != own->numbers[k]) continue;
            zs_peer_alloc_release(maps->told[i]);
            maps->told[i] = maps->told[--maps->n_told];
            break;
        }
}

zs_status zs_peer_settle(zs_backend *backend)
{
    zs_peer *self = (zs_peer *)backend;
    zs_peer_maps *maps = self->maps;
    zs_comm *control = self->control;
    ZS_TRY(zs_peer_check(backend));
    going *own = calloc(1 + (size_t)maps->world, sizeof *own), *all = own + 1;
    if (own == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory closing peer mappings");
    for (size_t i = 0; i < maps->n_told && own->n < NAMED; i++)
        if (zs_peer_alloc_idle(maps->told[i])) own->numbers[own->n++] = zs_peer_alloc_number(maps->told[i]);
    zs_status status = zs_comm_exchange(control, own, sizeof *own, all);
    ZS_THEN(status, zs_peer_drain(self, control->timeout));
    for (int r = 0; r < maps->world && status == ZS_OK; r++)
        for (uint32_t k = 0; k < all[r].n; k++)
            close_mapping(maps, r, all[r].numbers[k]);
    char closed = 1, said[maps->world];
    ZS_THEN(status, zs_comm_exchange(control, &closed, 1, said));
    if (status == ZS_OK) give_up(maps, own);
    free(own);
    return status;
}
