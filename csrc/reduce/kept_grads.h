/* kept_grads.h - gradients that a script keeps stay unchanged.
 *
 * Reference counts show which gradients a script keeps: of the tensor, and of its storage (which views and NumPy arrays
 * hold). New gradients then get other memory, and the old bytes are the script's. Two blocks alternate, so a variable
 * left over by a loop costs the memory of one unit's gradients, and no new pages at each step.
 */
#ifndef ZS_KEPT_GRADS_H
#define ZS_KEPT_GRADS_H

#include "unit/unit.h"

/* A parameter's views of its flat's gradients. */
typedef enum zs_view {
    ZS_VIEW_GRAD,  /* reduced ones */
    ZS_VIEW_SPARE, /* those in the alternate block */
    ZS_VIEW_LOCAL, /* those that stay on this rank for a while; see local_grads.h */
} zs_view;

/* Does a script keep some of a flat's gradients that no parameter has as .grad any more? */
bool zs_grads_are_kept(const zs_unit *unit, int f, zs_view which);

/* Puts the next gradients elsewhere if a script keeps some that no parameter has as .grad any more. Call before the
 * first gradient of a backward, and before existing ones are set aside. */
zs_status zs_kept_grads_renew(zs_unit *unit);

/* Frees a flat's alternate block. */
void zs_kept_grads_free(zs_flat *flat, zs_unit *unit);

#endif
