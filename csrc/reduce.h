/* reduce.h - one round of a unit's gradients: packed into a bucket as they become ready, posted, summed by their owners.
 *
 * The one idea: a gradient is copied once, straight from where autograd made it into memory that the peers can read, and
 * dropped. Whoever owns a slice then reads that slice of every rank's bucket and sums in rank order. A posted bucket is
 * summed as late as possible (when its slot is wanted, or at the end of backward), so that no rank waits for a peer that
 * is a unit behind.
 */
#ifndef ZS_REDUCE_H
#define ZS_REDUCE_H

#include "unit.h"

enum { ZS_BUCKETS_OUT = 2 }; /* buckets of one size that may be out before a rank waits for its peers */

/* The buckets of an engine; units borrow them for one round each. */
typedef struct zs_bucket_pool zs_bucket_pool;

/* New empty pool on `comm` (borrowed: the engine outlives the pool). */
zs_status zs_bucket_pool_new(zs_comm *comm, zs_bucket_pool **out);

/* Frees the pool and its buckets; NULL allowed. */
void zs_bucket_pool_free(zs_bucket_pool *pool);

/* Bytes of all buckets. */
size_t zs_bucket_pool_bytes(const zs_bucket_pool *pool);

/* Waits until the peers have read all posted buckets, which then are idle. */
zs_status zs_bucket_pool_settle(zs_bucket_pool *pool);

/* Readies a unit for gradients, once per backward: existing .grad (accumulation) moves into the grad shard, .grad becomes
 * None. `arriving` is a parameter whose new gradient is there already, or -1. */
zs_status zs_reduce_begin(zs_unit *unit, int64_t arriving);

/* Packs parameter `i`'s .grad into the unit's bucket and drops it; *complete when the round has all it expects. */
zs_status zs_reduce_pack(zs_unit *unit, int64_t i, bool *complete);

/* Posts the round, packed or empty. With `give_up`, tells the peers that this rank abandoned its backward. */
zs_status zs_reduce_post(zs_unit *unit, bool give_up);

/* Sums this rank's slices of all posted rounds into the grad shards, in the order of posting; waits for the peers to post
 * theirs. One order on all ranks, so that no two of them wait for each other. */
zs_status zs_reduce_drain_all(zs_bucket_pool *pool);

/* Forgets the rounds that are out, without their sums: for after a failure. */
void zs_reduce_forget_all(zs_bucket_pool *pool);

/* Gives each parameter that has a gradient its .grad, runs users' post-accumulate hooks on the new ones, and forgets the
 * backward's marks. */
zs_status zs_reduce_end(zs_unit *unit);

/* Drops a half-packed round. */
void zs_reduce_discard(zs_unit *unit);

/* Takes the unit out of its engine's pool, whatever it has there: it dies, or goes to another engine. */
void zs_reduce_forget(zs_unit *unit);

#endif
