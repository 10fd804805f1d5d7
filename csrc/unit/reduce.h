/* reduce.h - one round of a unit's gradients: packed into a bucket as they become ready, posted, summed by their owners.
 *
 * The one idea: a gradient is copied once, straight from where autograd made it into memory that the peers can read, and
 * dropped. Whoever owns a slice then reads that slice of every rank's bucket and sums in rank order. A posted bucket is
 * summed as late as possible (when its slot is wanted, or at the end of backward), so that no rank waits for a peer that
 * is a unit behind.
 */
#ifndef ZS_REDUCE_H
#define ZS_REDUCE_H

#include "unit/unit.h"

/* Packs parameter `i`'s .grad into the unit's bucket and drops it; *complete when the round has all it expects. */
zs_status zs_reduce_pack(zs_unit *unit, int64_t i, bool *complete);

/* (Replicated units) Parameter `i`'s .grad stays as it is, to be reduced with a later backward's. */
void zs_reduce_keep(zs_unit *unit, int64_t i);

/* Posts the round, packed or empty, with what stayed local before. Where the engine gave up its backward it tells the peers
 * so. */
zs_status zs_reduce_post(zs_unit *unit);

/* Sums this rank's slice of the posted round into the grad shard once all ranks have posted theirs; *done says whether it
 * happened, `sources` then who used what. Call it in the order of posting: zs_rounds_drain does. */
zs_status zs_reduce_sum(zs_unit *unit, zs_wait wait, zs_sources *sources, bool *done);

/* After that, with the round off the queue: lets the peers go on, and steps what is over on all ranks. ZS_ERR_DIVERGED if the
 * sum is none: a peer gave up, or holds other gradients. */
zs_status zs_reduce_release(zs_unit *unit, zs_sources *sources);

/* (Replicated units) Sums and shares this rank's slice of the posted round, waiting for the peers' posts; no-op if done. */
zs_status zs_reduce_share(zs_unit *unit);

#endif
