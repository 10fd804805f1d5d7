/* bucket.c - see bucket.h. */
#include "unit/bucket.h"

#include "unit/reduce.h"

#include <stdlib.h>

struct zs_bucket_pool {
    zs_comm *comm;          /* borrowed */
    zs_bucket_slot **slots; /* owned */
    size_t n;
    uint64_t posts;
    zs_unit *first_out; /* units with a round out, in the order of posting; borrowed */
    zs_unit *last_out;
};

/* --- the queue of rounds that are out --------------------------------------------------------------------------------- */

static void enqueue(zs_bucket_pool *pool, zs_unit *unit)
{
    unit->outstanding = true;
    unit->next_out = NULL;
    if (pool->first_out == NULL)
        pool->first_out = unit;
    else
        pool->last_out->next_out = unit;
    pool->last_out = unit;
}

zs_status zs_bucket_drain(zs_bucket_pool *pool, const zs_unit *unit, zs_wait wait)
{
    bool done = true;
    while (done && unit->outstanding)
        ZS_TRY(zs_reduce_drain(pool->first_out, wait, &done));
    return ZS_OK;
}

zs_status zs_bucket_drain_all(zs_bucket_pool *pool)
{
    zs_status status = ZS_OK;
    for (zs_unit *unit = pool->first_out; unit != NULL; unit = unit->next_out)
        ZS_TRY(zs_reduce_share(unit));
    while (pool->first_out != NULL) {
        bool done = false;
        zs_status one = zs_reduce_drain(pool->first_out, ZS_WAIT, &done);
        if (one != ZS_OK && !done) return one;
        if (status == ZS_OK) status = one; /* a round that a peer gave up is over; the others are to be ended too */
    }
    return status;
}

void zs_bucket_summed(zs_bucket_pool *pool, zs_unit *unit)
{
    unit->outstanding = false;
    zs_unit *before = NULL;
    for (zs_unit *each = pool->first_out; each != unit; each = each->next_out)
        before = each;
    if (before == NULL)
        pool->first_out = unit->next_out;
    else
        before->next_out = unit->next_out;
    if (pool->last_out == unit) pool->last_out = before;
    unit->next_out = NULL;
}

void zs_bucket_forget_rounds(zs_bucket_pool *pool)
{
    while (pool->first_out != NULL)
        zs_bucket_summed(pool, pool->first_out);
}

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

static zs_status add_slot(zs_bucket_pool *pool, size_t bytes, zs_bucket_slot **out)
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
        if (!met[w]) status = add_slot(pool, bytes[w], &made);
    free(met);
    return status;
}

/* Makes a posted slot idle if its round is summed here and read by all peers. */
static zs_status reclaim(zs_bucket_pool *pool, zs_bucket_slot *slot, zs_wait wait)
{
    bool ready = false;
    if (slot->user == NULL) return ZS_OK;
    if (wait != ZS_WAIT_NOT)
        ZS_TRY(zs_bucket_drain(pool, slot->user, wait));
    else if (slot->user->outstanding)
        ZS_TRY(zs_reduce_drain(slot->user, wait, &ready));
    if (slot->user->outstanding) return ZS_OK;
    ZS_TRY(pool->comm->ops->reusable(pool->comm, slot->user->cunit, wait, &ready));
    if (!ready) return ZS_OK;
    slot->user->out = NULL;
    slot->user = NULL;
    slot->posted = false;
    return ZS_OK;
}

zs_status zs_bucket_settle(zs_bucket_pool *pool, zs_unit *unit)
{
    return unit->out != NULL ? reclaim(pool, unit->out, ZS_WAIT) : ZS_OK;
}

zs_status zs_bucket_settle_all(zs_bucket_pool *pool)
{
    for (size_t i = 0; i < pool->n; i++)
        if (pool->slots[i]->posted) ZS_TRY(reclaim(pool, pool->slots[i], ZS_WAIT));
    return ZS_OK;
}

typedef struct pool_view {
    zs_bucket_slot *idle;   /* smallest idle slot that is large enough */
    zs_bucket_slot *oldest; /* large enough slot that was posted first */
    int fitting;            /* slots that are large enough */
} pool_view;

static pool_view look(const zs_bucket_pool *pool, size_t bytes)
{
    pool_view view = {0};
    for (size_t i = 0; i < pool->n; i++) {
        zs_bucket_slot *slot = pool->slots[i];
        if (slot->bucket.bytes < bytes) continue;
        view.fitting++;
        if (slot->user == NULL && !slot->posted && (view.idle == NULL || slot->bucket.bytes < view.idle->bucket.bytes))
            view.idle = slot;
        if (slot->user != NULL && slot->posted && (view.oldest == NULL || slot->posted_at < view.oldest->posted_at))
            view.oldest = slot;
    }
    return view;
}

zs_status zs_bucket_take(zs_bucket_pool *pool, zs_unit *unit, size_t bytes)
{
    pool_view view = look(pool, bytes);
    /* Collectives end in the order of posting, the oldest first. To look for others would only leave it to timing how
     * many buckets there are in the end. */
    bool any_may_be_done = pool->comm->ops->mapped;
    for (size_t i = 0; i < pool->n && any_may_be_done && view.idle == NULL; i++) {
        if (pool->slots[i]->posted) ZS_TRY(reclaim(pool, pool->slots[i], ZS_WAIT_NOT));
    }
    view = look(pool, bytes);
    if (view.idle == NULL && view.fitting >= ZS_BUCKETS_OUT && view.oldest != NULL) {
        /* Comes back without it only if all ranks wait: ranks that differ in order need one slot more. */
        ZS_TRY(reclaim(pool, view.oldest, ZS_WAIT_OR_YIELD));
        view = look(pool, bytes);
    }
    if (view.idle == NULL) ZS_TRY(add_slot(pool, bytes, &view.idle));
    unit->bucket = view.idle;
    unit->bucket->user = unit;
    unit->bucket->posted = false;
    return ZS_OK;
}

void zs_bucket_drop(zs_unit *unit)
{
    if (unit->bucket == NULL) return;
    unit->bucket->user = NULL;
    unit->bucket = NULL;
}

void zs_bucket_posted(zs_bucket_pool *pool, zs_unit *unit)
{
    enqueue(pool, unit);
    if (unit->bucket == NULL) return;
    unit->bucket->posted = true;
    unit->bucket->posted_at = pool->posts++;
    unit->out = unit->bucket;
    unit->bucket = NULL;
}

void zs_bucket_forget(zs_bucket_pool *pool, zs_unit *unit)
{
    zs_bucket_drop(unit);
    if (unit->outstanding) zs_bucket_summed(pool, unit);
    if (unit->out != NULL) unit->out->user = NULL;
    unit->out = NULL;
}
