/* local_grads.h - gradients that stay on their rank for a while: no_sync().
 *
 * While gradients are not reduced, they are summed in memory of the bucket's layout that belongs to this rank
 * alone, and `.grad` shows them whole. The round that comes at last packs into the same memory, and posts a copy of it.
 * What the user does with a `.grad` in between counts: None, and its gradients are gone.
 */
#ifndef ZS_LOCAL_GRADS_H
#define ZS_LOCAL_GRADS_H

#include "unit/unit.h"

/* Makes the memory. Sharded units only: replicated ones keep theirs in `.grad`, as always. */
zs_status zs_local_grads_new(zs_unit *unit);

/* Has later gradients summed elsewhere where a script keeps some that are no parameter's .grad any more. Call before
 * the first gradient of a backward, and before existing ones are hidden. */
zs_status zs_local_grads_renew(zs_unit *unit);

/* Does any unit of this process have such memory? From any thread. */
bool zs_local_grads_any(void);

/* Gives it back; no-op if there is none. */
void zs_local_grads_free(zs_unit *unit);

/* Takes a parameter's `.grad` away if it is the view of its local gradient; *hidden is false if it is anything else,
 * as the user may have put there. What the user has done to it holds for the reduced gradient under it as well:
 * `below` becomes false if it is zero now; ZS_ERR_VALUE for other changes, which only the owner of a slice could
 * repeat. */
zs_status zs_local_grads_hide(const zs_unit *unit, zs_param *param, bool *hidden);

/* Gives a parameter the view of its local gradient as `.grad`. */
zs_status zs_local_grads_show(zs_param *param);

#endif
