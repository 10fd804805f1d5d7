/* shm_flats.c - the memory of shards, which outlives its model until all ranks have freed theirs.
 *
 * A rank that deletes its model may be ahead of others that still evaluate with its shards. All ranks create the
 * same flats in the same order, so each publishes in a bitmap which it has freed, and the last to free one frees the
 * pages of all. See shm.h. */
#define _GNU_SOURCE 1 /* fallocate */
#include "comm/shm/shm.h"

#include <fcntl.h>

static bool freed_by_all(const zs_shm *shm, size_t index)
{
    for (int r = 0; r < shm->base.world; r++)
        if ((atomic_load(&shm->peers[r].control->freed[index / 64]) >> index % 64 & 1) == 0) return false;
    return true;
}

/* The flat whose shard of this rank begins at this offset of the file; they were created in this order. */
static size_t index_of(const zs_shm *shm, uint64_t offset)
{
    size_t low = 0, high = atomic_load(&shm->n_flats);
    while (low + 1 < high) {
        size_t middle = (low + high) / 2;
        if (shm->flat_offsets[middle] <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Frees a flat of this rank, on any thread, under the file's lock. */
static bool give_back(void *pointer, uint64_t offset, uint64_t bytes)
{
    zs_shm *shm = pointer;
    size_t index = index_of(shm, offset);
    if (shm->flat_offsets[index] != offset) return false;
    atomic_fetch_or(&shm->own->freed[index / 64], UINT64_C(1) << index % 64);
    uint64_t start = offset - (uint64_t)shm->base.rank * bytes, all = (uint64_t)shm->base.world * bytes;
    if (freed_by_all(shm, index))
        fallocate(zs_file_fd(shm->flats), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)start, (off_t)all);
    return true;
}

zs_status zs_shm_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    ZS_TRY(zs_file_map_common(shm->flats, comm->rank, comm->world, shard_bytes, &out->mem));
    out->full = out->mem->ptr;
    out->shard = out->full + (size_t)comm->rank * shard_bytes;
    out->shard_bytes = shard_bytes;
    size_t n = atomic_load(&shm->n_flats);
    if (n >= ZS_SHM_FLATS) return ZS_OK; /* then it is freed with its model */
    shm->flat_offsets[n] = zs_file_offset_of(out->mem);
    atomic_store(&shm->n_flats, n + 1);
    zs_file_on_free(shm->flats, give_back, shm);
    return ZS_OK;
}

enum { FLATS, IN_FILE, IN_HEAP };

void zs_shm_numbers(const zs_comm *comm, uint64_t *out)
{
    const zs_shm *shm = (const zs_shm *)comm;
    out[FLATS] = atomic_load(&shm->n_flats);
    out[IN_FILE] = shm->flats == NULL ? 0 : zs_file_end(shm->flats);
    out[IN_HEAP] = shm->heap_used;
}

void zs_shm_continue_from(zs_comm *comm, const uint64_t *numbers)
{
    zs_shm *shm = (zs_shm *)comm;
    if (shm->flats == NULL) return;
    uint64_t end = zs_file_end(shm->flats);
    for (size_t i = atomic_load(&shm->n_flats); i < numbers[FLATS];
         i++) { /* other ranks allocated these: they need nothing of this one */
        shm->flat_offsets[i] = end;
        atomic_store(&shm->n_flats, i + 1);
        atomic_fetch_or(&shm->own->freed[i / 64], UINT64_C(1) << i % 64);
    }
    zs_file_skip_to(shm->flats, numbers[IN_FILE]);
    shm->heap_used = numbers[IN_HEAP];
}

void zs_shm_flats_end(zs_shm *shm)
{
    if (shm->flats == NULL) return;
    zs_file_on_free(shm->flats, NULL, NULL);
    zs_file_keep(shm->flats);
}
