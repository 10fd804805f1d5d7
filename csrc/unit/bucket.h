/* bucket.h - the buckets of an engine, and the queue of rounds that are out.
 *
 * The one idea: a bucket is lent to a unit for one round, and comes back when this rank has summed its slice and all peers
 * have read theirs. Two of a size are enough for ranks in step; one more is made where every rank would otherwise wait
 * for every other.
 */
#ifndef ZS_BUCKET_H
#define ZS_BUCKET_H

#include "unit/unit.h"

enum { ZS_BUCKETS_OUT = 2 }; /* buckets of one size that may be out before a rank waits for its peers */

struct zs_bucket_slot {
    zs_bucket bucket;
    zs_unit *user; /* borrowed: the unit that packs into it or whose posted round it carries; NULL if idle or lost */
    bool posted;   /* peers may be reading it. Without a user: lost, since nobody can tell when they are done */
    uint64_t posted_at; /* order of posting, to reuse the oldest */
};

typedef struct zs_bucket_pool zs_bucket_pool;

/* New empty pool on `comm` (borrowed: the engine outlives the pool). */
zs_status zs_bucket_pool_new(zs_comm *comm, zs_bucket_pool **out);

/* Frees the pool and its buckets; NULL allowed. */
void zs_bucket_pool_free(zs_bucket_pool *pool);

/* Has the pool hold buckets with room for these numbers of bytes, as its transport rounds them: those that are missing are
 * made, idle ones that are not wanted are given back. */
zs_status zs_bucket_pool_fit(zs_bucket_pool *pool, const size_t *bytes, size_t n);

/* Bytes of all buckets. */
size_t zs_bucket_pool_bytes(const zs_bucket_pool *pool);

/* Lends `unit` a bucket of at least `bytes`, summing and waiting for older rounds where needed. */
zs_status zs_bucket_take(zs_bucket_pool *pool, zs_unit *unit, size_t bytes);

/* Takes the unit's bucket back before it was posted. No-op if it has none. */
void zs_bucket_drop(zs_unit *unit);

/* The unit's bucket (NULL for an empty round) was posted: enters the round into the queue. */
void zs_bucket_posted(zs_bucket_pool *pool, zs_unit *unit);

/* The unit's round is summed here: takes it off the queue. */
void zs_bucket_summed(zs_bucket_pool *pool, zs_unit *unit);

/* Makes the bucket of the unit's last round idle, waiting until its peers have read it. */
zs_status zs_bucket_settle(zs_bucket_pool *pool, zs_unit *unit);

/* The same for all units. */
zs_status zs_bucket_settle_all(zs_bucket_pool *pool);

/* Sums rounds in the order of posting until that of `unit` is, or until a wait yields. One order on all ranks, so that
 * ranks in step never wait for each other. */
zs_status zs_bucket_drain(zs_bucket_pool *pool, const zs_unit *unit, zs_wait wait);

/* Sums all rounds. All ranks must have posted, or be about to post without waiting for this one; their orders may differ:
 * what a peer may wait for is shared first. */
zs_status zs_bucket_drain_all(zs_bucket_pool *pool);

/* Takes the unit out of the pool, whatever it has there: it dies, or goes to another engine. */
void zs_bucket_forget(zs_bucket_pool *pool, zs_unit *unit);

/* Empties the queue without sums: for after a failure. */
void zs_bucket_forget_rounds(zs_bucket_pool *pool);

#endif
