/* squares.h - sums of squares of a flat's gradients, taken while they are summed over the ranks, for their norm.
 *
 * A script clips its gradients by their norm at each step, or never. Once it has asked for a norm, later backwards'
 * sums also compute the squares, while the sums are in the cache. They hold until a gradient changes.
 */
#ifndef ZS_SQUARES_H
#define ZS_SQUARES_H

#include "unit/unit.h"

/* A script asks for the norm of the flat's gradients, or whether they are finite: it may do so again. */
zs_status zs_squares_ask(zs_flat *flat);

/* A backward begins, and will write gradients: the squares do not hold any more. */
void zs_squares_begin(zs_unit *unit);

/* A round is summed into the flat: where its squares are added; NULL: they are not wanted. Those of a replicated unit
 * are of this rank's share of the sum, and no flat's norm. */
zs_exact *zs_squares_renew(zs_unit *unit, zs_flat *flat);

/* Parameter `i` takes part in that round or, if it has an earlier gradient, makes the sum incomplete. */
void zs_squares_count(zs_unit *unit, int64_t i, bool takes_part);

/* The gradients are shown: from now on their versions count. */
void zs_squares_end(zs_unit *unit);

/* Are the squares those of all gradients of the flat, as they are now? */
bool zs_squares_hold(const zs_unit *unit, int f);

/* Do the squares show that all gradients of the flat are finite? That needs less: a factor of any size up to 1. */
bool zs_squares_finite(const zs_unit *unit, int f);

/* Adds them to `sum`; they hold. */
void zs_squares_add(const zs_flat *flat, zs_exact *sum);

/* The flat's gradients have another factor (device/pending.h) and new versions, and the squares held before: they still
 * do if the factor is a power of two, and still show whether the gradients are finite if it is 1 at most. */
void zs_squares_follow(zs_unit *unit, int f);

/* A gradient in this block may be written without a new version. NULL allowed. */
void zs_squares_spoil(const zs_mem *mem);

#endif
