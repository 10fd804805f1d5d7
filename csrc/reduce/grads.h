/* grads.h - the .grad of a unit's parameters, before and after a backward.
 *
 * During a backward .grad belongs to autograd alone. Earlier gradients lie in the grad shard, or in the unit's local
 * gradients; the result is shown when the backward ends.
 */
#ifndef ZS_GRADS_H
#define ZS_GRADS_H

#include "unit/unit.h"

/* Prepares a unit for gradients, once per backward: moves existing .grad (accumulation) into the grad shard, and sets
 * .grad to None. `arriving`: a parameter that already has its new gradient, or -1. `expected`: the gradients that the
 * backward will bring. */
zs_status zs_grads_begin(zs_record *record, int64_t arriving, zs_expected *expected);

/* The backward has failed: discards its sums. True if some were already added to earlier gradients; these are then
 * shown, and must not be used. */
bool zs_grads_undo(zs_unit *unit);

/* Sets the .grad of each parameter that has a gradient. */
zs_status zs_grads_hand_out(zs_unit *unit);

/* The same, and runs users' post-accumulate hooks on the new ones. */
zs_status zs_grads_deliver(zs_record *record);

#endif
