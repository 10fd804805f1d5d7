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

/* Readies a unit for gradients, once per backward: existing .grad (accumulation) moves into the grad shard, .grad becomes
 * None. `arriving` is a parameter whose new gradient is there already, or -1. */
zs_status zs_reduce_begin(zs_unit *unit, int64_t arriving);

/* Packs parameter `i`'s .grad into the unit's bucket and drops it; *complete when the round has all it expects. */
zs_status zs_reduce_pack(zs_unit *unit, int64_t i, bool *complete);

/* (Replicated units) Parameter `i`'s .grad stays as it is, to be reduced with a later backward's. */
void zs_reduce_keep(zs_unit *unit, int64_t i);

/* Posts the round, packed or empty, with what stayed local before. Where the engine gave up its backward it tells the peers
 * so. */
zs_status zs_reduce_post(zs_unit *unit);

/* Sums this rank's slice of the posted round into the grad shard once all ranks have posted theirs; *done says whether it
 * happened. Call it in the order of posting: zs_bucket_drain does. */
zs_status zs_reduce_drain(zs_unit *unit, zs_wait wait, bool *done);

/* (Replicated units) Sums and shares this rank's slice of the posted round, waiting for the peers' posts; no-op if done. */
zs_status zs_reduce_share(zs_unit *unit);

/* Does any .grad, or a view of one, refer to the unit's grad shards? */
bool zs_reduce_grads_wanted(const zs_unit *unit);

/* The backward has failed: its sums are to count for nothing. True if there are some that cannot be told any more from the
 * gradients that they went on top of; these are then shown, and not to be used. */
bool zs_reduce_undo(zs_unit *unit);

/* Gives each parameter that has a gradient its .grad. */
zs_status zs_reduce_hand_out(zs_unit *unit);

/* The same, and runs users' post-accumulate hooks on the new ones. */
zs_status zs_reduce_deliver(zs_unit *unit);

/* The same at the end of a backward, whose marks it forgets. */
zs_status zs_reduce_end(zs_unit *unit);

#endif
