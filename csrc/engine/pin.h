/* pin.h - units unsharded by hand: from unshard() to reshard(), or within summon_full_params().
 *
 * User code may take any time between the two, so it gets a copy, not a view of shards that their owners may write to
 * next. No session stays open, and no peer waits. Writes to the copy can be kept at the end: each rank takes its shard
 * of them.
 */
#ifndef ZS_PIN_H
#define ZS_PIN_H

#include "unit/pinned.h"

/* Makes the unit FULL on a copy; `exact`: in its parameters' own dtype. It stays FULL until it is resharded, as at the
 * end of each backward. Inside a session; collective. No-op if it is pinned already. ZS_ERR_STATE if `exact` and the
 * unit is unsharded in the compute dtype. */
zs_status zs_pin(zs_unit *unit, bool exact);

/* Before the unit's forward or backward: ZS_ERR_STATE if it is pinned with values other than those it computes with. */
zs_status zs_pin_check(const zs_unit *unit);

#endif
