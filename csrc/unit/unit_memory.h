/* unit_memory.h - the memory of a unit's parameters and gradients, allocated when the unit is created (gradients of
 * parameters that are unfrozen later: then).
 *
 * Sizes come first, then memory, then values: a dry run's unit (zs_unit_spec) stops after the sizes. For unit_life.c
 * and kept_grads.c.
 */
#ifndef ZS_UNIT_MEMORY_H
#define ZS_UNIT_MEMORY_H

#include "unit/unit.h"

/* Decides where each parameter lies in its flat, and each gradient in a bucket. */
zs_status zs_unit_lay_out(zs_unit *unit);

/* Allocates that memory, zeroed: shards, or full memory where parameters are always unsharded; gradient shards and the
 * views of them; the transport's record. */
zs_status zs_unit_take_memory(zs_unit *unit);

/* Copies this rank's shard of each parameter into that memory. */
zs_status zs_unit_take_values(zs_unit *unit);

/* New view of a parameter's gradient, on memory with the layout of its flat's gradient shard. */
zs_status zs_unit_new_grad_view(const zs_unit *unit, const zs_param *param, const zs_storage *storage, zs_tensor **out);

#endif
