/* bucket.c - see bucket.h. */
#include "reduce/bucket.h"

#include <stdlib.h>

typedef struct bucket_slot {
    zs_lease lease;
    zs_bucket bucket;
} bucket_slot;

zs_bucket *zs_bucket_of(zs_lease *lease)
{
    return &((bucket_slot *)lease)->bucket;
}

static void free_bucket(zs_comm *comm, zs_lease *lease)
{
    zs_comm_bucket_free(comm, zs_bucket_of(lease));
    free((bucket_slot *)lease);
}

zs_status zs_bucket_new(zs_schedule *schedule, zs_comm *comm, size_t bytes, zs_lease **out)
{
    bucket_slot *slot = calloc(1, sizeof *slot);
    if (slot == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating bucket %zu", schedule->n_leases);
    zs_status status = zs_comm_bucket_new(comm, bytes, &slot->bucket);
    if (status != ZS_OK) {
        free(slot);
        return status;
    }
    slot->lease.bytes = slot->bucket.bytes;
    status = zs_schedule_add_lease(schedule, &slot->lease);
    if (status != ZS_OK) {
        free_bucket(comm, &slot->lease);
        return status;
    }
    *out = &slot->lease;
    return ZS_OK;
}

zs_status zs_bucket_wake(zs_lease *lease, const zs_device *device)
{
    zs_bucket *bucket = zs_bucket_of(lease);
    if (bucket->ptr != NULL) return ZS_OK;
    ZS_TRY(zs_device_mem_lend(device, bucket->bytes, &bucket->mem));
    bucket->ptr = bucket->mem->ptr;
    return ZS_OK;
}

void zs_buckets_rest(zs_schedule *schedule, const zs_device *device)
{
    for (size_t i = 0; i < schedule->n_leases && device->ops->queues; i++) {
        const zs_lease *lease = schedule->leases[i];
        zs_bucket *bucket = zs_bucket_of(schedule->leases[i]);
        if (lease->user != NULL || lease->posted) continue;
        zs_mem_release(bucket->mem);
        bucket->mem = NULL;
        bucket->ptr = NULL;
    }
}

void zs_buckets_free(zs_schedule *schedule, zs_comm *comm)
{
    while (schedule->n_leases > 0) {
        zs_lease *lease = schedule->leases[schedule->n_leases - 1];
        zs_schedule_drop_lease(schedule, lease);
        free_bucket(comm, lease);
    }
}

size_t zs_buckets_bytes(const zs_schedule *schedule, bool in_use)
{
    size_t total = 0;
    for (size_t i = 0; i < schedule->n_leases; i++) {
        const zs_lease *lease = schedule->leases[i];
        if (in_use && lease->user == NULL && !lease->posted) continue;
        if (zs_bucket_of(schedule->leases[i])->ptr != NULL) total += lease->bytes;
    }
    return total;
}

/* Frees idle buckets that are not needed; sets `met` [n]: which of `bytes` have a bucket. */
static void match(zs_schedule *schedule, zs_comm *comm, const size_t *bytes, size_t n, bool *met)
{
    for (size_t i = 0; i < schedule->n_leases;) {
        zs_lease *lease = schedule->leases[i];
        size_t w = 0;
        while (w < n && (met[w] || zs_comm_bucket_room(comm, bytes[w]) != lease->bytes))
            w++;
        if (w < n) met[w] = true;
        lease->extra = w == n;
        if (w < n || lease->user != NULL || lease->posted) {
            i++;
        } else {
            zs_schedule_drop_lease(schedule, lease);
            free_bucket(comm, lease);
        }
    }
}

zs_status zs_buckets_fit(zs_schedule *schedule, zs_comm *comm, const size_t *bytes, size_t n)
{
    bool *met = calloc(n + 1, sizeof *met);
    if (met == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory reserving buckets");
    match(schedule, comm, bytes, n, met);
    zs_status status = ZS_OK;
    zs_lease *made = NULL;
    for (size_t w = 0; w < n && status == ZS_OK; w++)
        if (!met[w]) status = zs_bucket_new(schedule, comm, bytes[w], &made);
    free(met);
    return status;
}
