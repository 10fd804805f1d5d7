/* pin.h - a unit that is unsharded by hand: from unshard() to reshard(), or within summon_full_params().
 *
 * User code may take any time between the two, so what it holds is a copy of this unit's own, not a view of shards that
 * their owners may write to next. No session stays open, and no peer has to wait. What is written to the copy can be
 * taken over in the end: each rank keeps its slice.
 */
#ifndef ZS_PIN_H
#define ZS_PIN_H

#include "unit/pinned.h"

/* Makes the unit FULL on a copy, `exact`: in its parameters' own dtype. It stays so until it is resharded, as at the
 * end of each backward. Inside a session; collective. No-op if it is pinned already. ZS_ERR_STATE if `exact`, and it is
 * unsharded as its forward computes with it. */
zs_status zs_pin(zs_unit *unit, bool exact);

/* Before the unit's forward or backward: ZS_ERR_STATE if it is pinned with other numbers than it computes with. */
zs_status zs_pin_check(const zs_unit *unit);

#endif
