/* unit_memory.h - what a unit's parameters and gradients lie in: made at its birth, but for gradients of what is
 * thawed.
 *
 * Sizes first, memory after, values last; so that a unit of a dry run (zs_unit_spec) is one that stopped after the
 * first. For unit_life.c, and kept_grads.c.
 */
#ifndef ZS_UNIT_MEMORY_H
#define ZS_UNIT_MEMORY_H

#include "unit/unit.h"

/* Decides where each parameter lies in its flat, and each gradient in a bucket. */
zs_status zs_unit_lay_out(zs_unit *unit);

/* Takes the memory for that, all zeros: shards, or where parameters are always whole, that; grad shards, with the
 * views of them; the transport's record. */
zs_status zs_unit_take_memory(zs_unit *unit);

/* Copies this rank's part of each parameter from where it lies now into that memory. */
zs_status zs_unit_take_values(zs_unit *unit);

/* New view of a parameter's gradient, on memory that is laid out as its flat's grad shard is. */
zs_status zs_unit_new_grad_view(const zs_unit *unit, const zs_param *param, const zs_storage *storage, zs_tensor **out);

#endif
