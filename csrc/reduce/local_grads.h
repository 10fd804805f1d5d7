/* local_grads.h - gradients that stay on their rank for a while: no_sync().
 *
 * Unreduced gradients are summed in private memory, in the parameters' own dtype, and `.grad` shows them unsharded. The
 * round that finally reduces them packs into the same memory, and posts a copy, cast to the dtype on the wire. Changes
 * to `.grad` in between count: setting it to None drops the gradient.
 */
#ifndef ZS_LOCAL_GRADS_H
#define ZS_LOCAL_GRADS_H

#include "device/device.h"
#include "unit/unit.h"

/* Allocates the memory. Sharded units only: replicated ones keep their gradients in `.grad`. */
zs_status zs_local_grads_new(zs_unit *unit);

/* A parameter's local gradient, whole. */
zs_numbers zs_local_grads_of(const zs_unit *unit, const zs_param *param);

/* Sums later gradients elsewhere if a script keeps some that no parameter has as .grad any more. Call before the first
 * gradient of a backward, and before existing ones are hidden. */
zs_status zs_local_grads_renew(zs_unit *unit);

/* Does any unit of this process have such memory? From any thread. */
bool zs_local_grads_any(void);

/* Frees it; no-op if there is none. */
void zs_local_grads_free(zs_unit *unit);

/* Removes a parameter's `.grad` if it is the view of its local gradient; *hidden is false if it is anything else that a
 * user put there. A user's change applies to the reduced gradient too: `below` becomes false if the view is now zero;
 * ZS_ERR_VALUE for other changes, which only the owner of a shard could repeat. */
zs_status zs_local_grads_hide(const zs_unit *unit, zs_param *param, bool *hidden);

/* Sets a parameter's `.grad` to the view of its local gradient. */
zs_status zs_local_grads_show(zs_param *param);

#endif
