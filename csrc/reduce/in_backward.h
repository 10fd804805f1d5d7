/* in_backward.h - units that are stepped during backward, each as soon as its gradients are reduced.
 *
 * A unit may be stepped once no rank needs its parameters again in this backward, because peers may read this rank's
 * shard in place. A rank knows that of a unit whose module was called once since the last backward, when all its
 * gradients have come; of any unit, at the end of its backward. Its round then carries that ("over"), and a unit that
 * is over on all ranks is stepped where its sum is made. The others are stepped after the backward, when no peer reads,
 * like by optimizer.step().
 *
 * Gradients of such units have no separate memory: they borrow a slot from the sum to the step.
 */
#ifndef ZS_IN_BACKWARD_H
#define ZS_IN_BACKWARD_H

#include "unit/unit.h"

/* Steps a unit's parameters; called without the GIL, on the thread that ends the unit's round: autograd's, or the one
 * that settles a failed backward. */
typedef struct zs_stepper {
    zs_status (*step)(void *ctx); /* updates the unit's parameters that it knows and that have a .grad */
    /* A backward begins, an error refuses it / it has ended and all units are stepped. Both NULL: another unit's
     * stepper does it. */
    zs_status (*begin)(void *ctx);
    zs_status (*over)(void *ctx);
    void (*release)(void *ctx);
    void *ctx;
} zs_stepper;

/* Makes `stepper` (taken over, also on failure) step the unit in each later backward that reduces its gradients.
 * `stepped` [n_params]: the parameters that it updates, whose .grad is then None; the others keep theirs. ZS_ERR_STATE
 * in a backward, or if one of them has a .grad, or the unit a stepper. */
zs_status zs_in_backward_attach(zs_unit *unit, const zs_stepper *stepper, const bool *stepped);

/* Undoes it; no-op without a stepper. Not in a backward. */
void zs_in_backward_detach(zs_unit *unit);

/* Is the unit alone (world of one) and hooked only for being stepped? */
bool zs_in_backward_alone(const zs_unit *unit);

/* --- events of a unit, from the schedule; no-ops without a stepper ------------------------------------------------ */

/* A backward of its model is about to begin. */
zs_status zs_in_backward_begin(const zs_unit *unit);

/* It has begun; _finish or _abandon ends it, and returns what its steps borrow on a disk. */
void zs_in_backward_open(zs_unit *unit);

/* ZS_ERR_STATE if the unit is over in this backward, but needed again. */
zs_status zs_in_backward_check(const zs_unit *unit);

/* Steps it with the sums, and returns their memory. No rank reads its shard. */
zs_status zs_in_backward_step(zs_unit *unit);

/* (Alone) The gradient of one more parameter is there; *all if it was the last. */
zs_status zs_in_backward_arrived(zs_unit *unit, int64_t i, bool *all);

/* The backward has ended and no peer reads: steps the unit if it is not stepped yet, unless the backward was abandoned
 * (not `good`), and prepares it for the next. */
zs_status zs_in_backward_finish(zs_unit *unit, bool good);

/* The backward has raised, or had no result. */
void zs_in_backward_abandon(zs_unit *unit);

#endif
