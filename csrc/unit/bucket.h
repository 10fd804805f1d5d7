/* bucket.h - the buckets of an engine. Whose turn it is to have one is the matter of rounds.h.
 *
 * The one idea: a bucket is lent to a unit for one round, and comes back when this rank has summed its slice and all peers
 * have read theirs. Two of a size are enough for ranks in step; one more is made where every rank would otherwise wait
 * for every other.
 */
#ifndef ZS_BUCKET_H
#define ZS_BUCKET_H

#include "unit/engine_facts.h"
#include "unit/unit.h"

enum { ZS_BUCKETS_OUT = 2 }; /* buckets of one size that may be out before a rank waits for its peers */

struct zs_bucket_slot {
    zs_bucket bucket;
    zs_unit *user; /* borrowed: the unit that packs into it or whose posted round it carries; NULL if idle or lost */
    bool posted;   /* peers may be reading it. Without a user: lost, since nobody can tell when they are done */
    uint64_t posted_at; /* order of posting, to reuse the oldest */
};

/* All of an engine. */
struct zs_bucket_pool {
    zs_comm *comm;          /* borrowed */
    zs_bucket_slot **slots; /* owned */
    size_t n;
    uint64_t posts;
    zs_unit *first_out; /* for rounds.c: units with a round out, in the order of posting; borrowed */
    zs_unit *last_out;
};

/* New empty pool on `comm` (borrowed: the engine outlives the pool). */
zs_status zs_bucket_pool_new(zs_comm *comm, zs_bucket_pool **out);

/* Frees the pool and its buckets; NULL allowed. */
void zs_bucket_pool_free(zs_bucket_pool *pool);

/* Has the pool hold buckets with room for these numbers of bytes, as its transport rounds them: those that are missing are
 * made, idle ones that are not wanted are given back. */
zs_status zs_bucket_pool_fit(zs_bucket_pool *pool, const size_t *bytes, size_t n);

/* Bytes of all buckets. */
size_t zs_bucket_pool_bytes(const zs_bucket_pool *pool);

/* One more bucket of at least `bytes`. */
zs_status zs_bucket_add(zs_bucket_pool *pool, size_t bytes, zs_bucket_slot **out);

/* Takes the unit's bucket back before it was posted. No-op if it has none. */
void zs_bucket_drop(zs_unit *unit);

#endif
