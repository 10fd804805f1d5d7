/* bucket.c - see bucket.h. */
#include "unit/bucket.h"

#include <stdlib.h>

/* --- the pool -------------------------------------------------------------------------------------------------------- */

zs_status zs_bucket_pool_new(zs_comm *comm, zs_bucket_pool **out)
{
    zs_bucket_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a bucket pool");
    pool->comm = comm;
    *out = pool;
    return ZS_OK;
}

void zs_bucket_pool_free(zs_bucket_pool *pool)
{
    if (pool == NULL) return;
    for (size_t i = 0; i < pool->n; i++) {
        pool->comm->ops->bucket_free(pool->comm, &pool->slots[i]->bucket);
        free(pool->slots[i]);
    }
    free(pool->slots);
    free(pool);
}

size_t zs_bucket_pool_bytes(const zs_bucket_pool *pool)
{
    size_t total = 0;
    for (size_t i = 0; i < pool->n; i++)
        total += pool->slots[i]->bucket.bytes;
    return total;
}

zs_status zs_bucket_add(zs_bucket_pool *pool, size_t bytes, zs_bucket_slot **out)
{
    zs_bucket_slot **grown = realloc(pool->slots, (pool->n + 1) * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating bucket %zu", pool->n);
    pool->slots = grown;
    zs_bucket_slot *slot = calloc(1, sizeof *slot);
    if (slot == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating bucket %zu", pool->n);
    zs_status status = pool->comm->ops->bucket_new(pool->comm, bytes, &slot->bucket);
    if (status != ZS_OK) {
        free(slot);
        return status;
    }
    pool->slots[pool->n++] = slot;
    *out = slot;
    return ZS_OK;
}

/* Gives back the idle slots that are not wanted; `met` [n] says which of `bytes` have a slot. */
static void match(zs_bucket_pool *pool, const size_t *bytes, size_t n, bool *met)
{
    size_t kept = 0;
    for (size_t i = 0; i < pool->n; i++) {
        zs_bucket_slot *slot = pool->slots[i];
        size_t w = 0;
        while (w < n && (met[w] || pool->comm->ops->bucket_room(bytes[w]) != slot->bucket.bytes))
            w++;
        if (w < n) met[w] = true;
        if (w < n || slot->user != NULL || slot->posted) {
            pool->slots[kept++] = slot;
        } else {
            pool->comm->ops->bucket_free(pool->comm, &slot->bucket);
            free(slot);
        }
    }
    pool->n = kept;
}

zs_status zs_bucket_pool_fit(zs_bucket_pool *pool, const size_t *bytes, size_t n)
{
    bool *met = calloc(n + 1, sizeof *met);
    if (met == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory reserving buckets");
    match(pool, bytes, n, met);
    zs_status status = ZS_OK;
    zs_bucket_slot *made = NULL;
    for (size_t w = 0; w < n && status == ZS_OK; w++)
        if (!met[w]) status = zs_bucket_add(pool, bytes[w], &made);
    free(met);
    return status;
}

void zs_bucket_drop(zs_unit *unit)
{
    if (unit->bucket == NULL) return;
    unit->bucket->user = NULL;
    unit->bucket = NULL;
}
