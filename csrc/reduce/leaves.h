/* leaves.h - the gradients of a step's micro-batches, added in the order of a tree: deterministic="any-world".
 *
 * Each backward is a leaf of base/tree.h. A rank's sums so far are nodes of the tree: full gradients, in memory with
 * the layout of a section of a bucket. The last backward of a step packs its leaf into a bucket, which then gets all
 * nodes. A step that fails starts again from its first micro-batch.
 */
#ifndef ZS_LEAVES_H
#define ZS_LEAVES_H

#include "unit/context.h"
#include "unit/unit.h"

/* A backward begins. ZS_ERR_STATE if no micro-batch has begun that has had none. / It has ended well. */
zs_status zs_leaves_ready(zs_context *context);
void zs_leaves_count(zs_context *context);

/* Before an optimizer's step. ZS_ERR_STATE with part of the step's gradients: there are no sums yet. */
zs_status zs_leaves_check_step(const zs_context *context);

/* Restarts the step: its first backward comes next. */
void zs_leaves_restart(zs_context *context);

/* Before a micro-batch. ZS_ERR_STATE if a parameter has a .grad: it would be added to the sum. */
zs_status zs_leaves_check(const zs_unit *unit);

/* A backward has the unit's first gradient, and is not the step's last: it packs into unit->leaf. */
zs_status zs_leaves_begin(zs_unit *unit);

/* Such a backward has ended: adds its leaf, if it has one. */
zs_status zs_leaves_end(zs_unit *unit);

/* The step's last backward has packed its leaf into `bucket`: adds nodes to it, and puts the others behind it. */
zs_status zs_leaves_send(zs_unit *unit, char *bucket);

/* Drops the step's sums so far. */
void zs_leaves_drop(zs_unit *unit);

/* Frees a unit's memory for it; NULL allowed. */
void zs_leaves_free(zs_unit *unit);

/* Bytes of nodes that the unit has now / has at most. */
size_t zs_leaves_bytes(const zs_unit *unit);
size_t zs_leaves_most_bytes(const zs_unit *unit);

#endif
