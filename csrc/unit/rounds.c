/* rounds.c - see rounds.h. */
#include "unit/rounds.h"

#include "unit/reduce.h"

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

static void dequeue(zs_bucket_pool *pool, zs_unit *unit)
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

/* Sums the unit's round, which is the oldest that is not summed, and lets the peers go on. */
static zs_status drain_one(zs_bucket_pool *pool, zs_unit *unit, zs_wait wait, bool *done)
{
    zs_sources sources;
    ZS_TRY(zs_reduce_sum(unit, wait, &sources, done));
    if (!*done) return ZS_OK;
    dequeue(pool, unit); /* before users' hooks run */
    return zs_reduce_release(unit, &sources);
}

zs_status zs_rounds_drain(zs_bucket_pool *pool, const zs_unit *unit, zs_wait wait)
{
    bool done = true;
    while (done && unit->outstanding)
        ZS_TRY(drain_one(pool, pool->first_out, wait, &done));
    return ZS_OK;
}

zs_status zs_rounds_drain_all(zs_bucket_pool *pool)
{
    zs_status status = ZS_OK;
    for (zs_unit *unit = pool->first_out; unit != NULL; unit = unit->next_out)
        ZS_TRY(zs_reduce_share(unit));
    while (pool->first_out != NULL) {
        bool done = false;
        zs_status one = drain_one(pool, pool->first_out, ZS_WAIT, &done);
        if (one != ZS_OK && !done) return one;
        ZS_ALSO(status, one); /* a round that a peer gave up is over; the others are to be ended too */
    }
    return status;
}

void zs_rounds_forget_all(zs_bucket_pool *pool)
{
    while (pool->first_out != NULL)
        dequeue(pool, pool->first_out);
}

/* --- their buckets ------------------------------------------------------------------------------------------------------ */

/* Makes a posted slot idle if its round is summed here and read by all peers. */
static zs_status reclaim(zs_bucket_pool *pool, zs_bucket_slot *slot, zs_wait wait)
{
    bool ready = false;
    if (slot->user == NULL) return ZS_OK;
    if (wait != ZS_WAIT_NOT)
        ZS_TRY(zs_rounds_drain(pool, slot->user, wait));
    else if (slot->user->outstanding)
        ZS_TRY(drain_one(pool, slot->user, wait, &ready));
    if (slot->user->outstanding) return ZS_OK;
    ZS_TRY(pool->comm->ops->reusable(pool->comm, slot->user->cunit, wait, &ready));
    if (!ready) return ZS_OK;
    slot->user->out = NULL;
    slot->user = NULL;
    slot->posted = false;
    return ZS_OK;
}

zs_status zs_rounds_settle(zs_bucket_pool *pool, zs_unit *unit)
{
    return unit->out != NULL ? reclaim(pool, unit->out, ZS_WAIT) : ZS_OK;
}

zs_status zs_rounds_settle_all(zs_bucket_pool *pool)
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

zs_status zs_rounds_take_bucket(zs_bucket_pool *pool, zs_unit *unit, size_t bytes)
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
    if (view.idle == NULL) ZS_TRY(zs_bucket_add(pool, bytes, &view.idle));
    unit->bucket = view.idle;
    unit->bucket->user = unit;
    unit->bucket->posted = false;
    return ZS_OK;
}

void zs_rounds_posted(zs_bucket_pool *pool, zs_unit *unit)
{
    enqueue(pool, unit);
    if (unit->bucket == NULL) return;
    unit->bucket->posted = true;
    unit->bucket->posted_at = pool->posts++;
    unit->out = unit->bucket;
    unit->bucket = NULL;
}

void zs_rounds_forget(zs_bucket_pool *pool, zs_unit *unit)
{
    zs_bucket_drop(unit);
    if (unit->outstanding) dequeue(pool, unit);
    if (unit->out != NULL) unit->out->user = NULL;
    unit->out = NULL;
}
