/* reduce.h - one round of a unit's gradients: packed into a bucket as they become ready, posted, summed by their
 * owners.
 *
 * A gradient is copied once, from where autograd created it into memory that peers can read, and dropped. Each rank
 * then reads its shard of every rank's bucket, and sums in rank order. These are actions of the schedule, which decides
 * when (schedule/rounds.c).
 */
#ifndef ZS_REDUCE_H
#define ZS_REDUCE_H

#include "unit/unit.h"

/* Begins an empty round in round.packing, or (`local`) in new memory for local gradients. */
zs_status zs_reduce_begin(zs_unit *unit, bool local);

/* Packs parameter `i`'s .grad into the round and drops it: overwrites its place in the round (`anew`), or adds to it.
 * *first: the round had none. */
zs_status zs_reduce_pack(zs_record *record, int64_t i, bool anew, bool *first);

/* (Replicated units) Parameter `i`'s .grad stays, in the parameter's dtype at rest, to be reduced with a later
 * backward's. */
zs_status zs_reduce_keep(zs_unit *unit, int64_t i);

/* Copies local gradients into round.packing, cast to the dtype on the wire, and frees their memory. */
zs_status zs_reduce_send_local(zs_record *record);

/* Posts round.packing, or if there is none, a round without gradients. The round also carries that the backward was
 * abandoned. */
zs_status zs_reduce_post(zs_unit *unit);

/* (Replicated units) Sums this rank's shard of the posted round once all ranks have posted theirs, and shares the sum.
 */
zs_status zs_reduce_share(zs_unit *unit, zs_wait wait, bool *ready);

/* Once all ranks have posted: sums this rank's shard into the grad shard (replicated units: fetches all sums), sets
 * *done, and lets the peers continue. *over: the unit may be stepped on all ranks. With *done, ZS_ERR_DIVERGED if there
 * is no valid sum: a peer gave up, or holds other gradients. Call it in the order of posting, or with ZS_WAIT_NOT. */
zs_status zs_reduce_sum(zs_record *record, zs_wait wait, bool *done, bool *over);

#endif
