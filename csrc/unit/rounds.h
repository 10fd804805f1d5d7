/* rounds.h - the queue of rounds that are out, and who gets a bucket for the next.
 *
 * The one idea: rounds are summed in the order of posting, as late as may be: when a bucket is wanted and there is no other,
 * or at the end of the backward.
 */
#ifndef ZS_ROUNDS_H
#define ZS_ROUNDS_H

#include "unit/bucket.h"

/* Lends `unit` a bucket of at least `bytes`, summing and waiting for older rounds where needed. */
zs_status zs_rounds_take_bucket(zs_bucket_pool *pool, zs_unit *unit, size_t bytes);

/* The unit's bucket (NULL for an empty round) was posted: enters the round into the queue. */
void zs_rounds_posted(zs_bucket_pool *pool, zs_unit *unit);

/* Sums rounds in the order of posting until that of `unit` is, or until a wait yields. One order on all ranks, so that
 * ranks in step never wait for each other. */
zs_status zs_rounds_drain(zs_bucket_pool *pool, const zs_unit *unit, zs_wait wait);

/* Sums all rounds. All ranks must have posted, or be about to post without waiting for this one; their orders may differ:
 * what a peer may wait for is shared first. */
zs_status zs_rounds_drain_all(zs_bucket_pool *pool);

/* Makes the bucket of the unit's last round idle, waiting until its peers have read it. */
zs_status zs_rounds_settle(zs_bucket_pool *pool, zs_unit *unit);

/* The same for all units. */
zs_status zs_rounds_settle_all(zs_bucket_pool *pool);

/* Takes the unit out of the pool, whatever it has there: it dies, or goes to another engine. */
void zs_rounds_forget(zs_bucket_pool *pool, zs_unit *unit);

/* Empties the queue without sums: for after a failure. */
void zs_rounds_forget_all(zs_bucket_pool *pool);

#endif
