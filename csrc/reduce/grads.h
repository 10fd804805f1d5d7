/* grads.h - what a unit's parameters have as .grad, before and after a backward.
 *
 * During a backward .grad belongs to autograd alone. What was there before lies in the grad shard, or in the
 * unit's local gradients; what the backward makes of it is shown when it ends.
 */
#ifndef ZS_GRADS_H
#define ZS_GRADS_H

#include "unit/unit.h"

/* Readies a unit for gradients, once per backward: existing .grad (accumulation) moves into the grad shard, .grad
 * becomes None. `arriving` is a parameter whose new gradient is there already, or -1. `expected`: what the backward
 * is to bring. */
zs_status zs_grads_begin(zs_record *record, int64_t arriving, zs_expected *expected);

/* Which of the unit's parameters hold a reduced gradient, on top of which the next would go: `held` [n_params], 0 or
 * 1. */
zs_status zs_grads_held(const zs_unit *unit, unsigned char *held);

/* Before a backward that brings no gradients here: drops what has stayed on this rank alone, and reduced gradients
 * of parameters that are not `held` elsewhere; of all if `none`. */
zs_status zs_grads_follow(zs_unit *unit, const unsigned char *held, bool none);

/* Does any .grad, or a view of one, refer to the unit's grad shards? */
bool zs_grads_wanted(const zs_unit *unit);

/* The backward has failed: its sums are to count for nothing. True if there are some that cannot be told any more
 * from the gradients that they went on top of; these are then shown, and not to be used. */
bool zs_grads_undo(zs_unit *unit);

/* Gives each parameter that has a gradient its .grad. */
zs_status zs_grads_hand_out(zs_unit *unit);

/* The same, and runs users' post-accumulate hooks on the new ones. */
zs_status zs_grads_deliver(zs_record *record);

#endif
