/* kept_grads.h - a gradient that a script keeps stays what it was.
 *
 * The one idea: what a script holds is seen by counts of references, to the tensor itself and to its storage (by which views
 * and NumPy arrays hold it). Then new gradients get other memory: the bytes under the old ones are the script's. The two
 * take turns, so that a variable that a loop has left over costs one unit's gradients, and no new pages at each step.
 */
#ifndef ZS_KEPT_GRADS_H
#define ZS_KEPT_GRADS_H

#include "unit/unit.h"

/* Has the next gradients lie elsewhere where a script keeps some that are no parameter's .grad any more. Call before the
 * first gradient of a backward, and before existing ones are set aside. */
zs_status zs_kept_grads_renew(zs_unit *unit);

/* Frees what takes turns with a flat's gradients. */
void zs_kept_grads_free(zs_flat *flat, zs_unit *unit);

#endif
