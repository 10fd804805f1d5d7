/* kept_grads.h - a gradient that a script keeps stays what it was.
 *
 * What a script holds is seen by counts of references, to the tensor itself and to its storage (by which views and
 * NumPy arrays hold it). Then new gradients get other memory: the bytes under the old ones are the script's. The two
 * take turns, so that a variable that a loop has left over costs one unit's gradients, and no new pages at each step.
 */
#ifndef ZS_KEPT_GRADS_H
#define ZS_KEPT_GRADS_H

#include "unit/unit.h"

/* A parameter's views of its flat's gradients. */
typedef enum zs_view {
    ZS_VIEW_GRAD,  /* reduced ones */
    ZS_VIEW_SPARE, /* those that take turns with them */
    ZS_VIEW_LOCAL, /* those that stay on this rank for a while; see local_grads.h */
} zs_view;

/* Does a script keep some of a flat's gradients that are no parameter's .grad any more? */
bool zs_grads_are_kept(const zs_unit *unit, int f, zs_view which);

/* Has the next gradients lie elsewhere where a script keeps some that are no parameter's .grad any more. Call before
 * the first gradient of a backward, and before existing ones are set aside. */
zs_status zs_kept_grads_renew(zs_unit *unit);

/* Frees what takes turns with a flat's gradients. */
void zs_kept_grads_free(zs_flat *flat, zs_unit *unit);

#endif
