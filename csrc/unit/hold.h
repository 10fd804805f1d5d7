/* hold.h - a unit that is whole by hand: from unshard() to reshard(), or within summon_full_params().
 *
 * The one idea: user code may take any time between the two, so what it holds is a copy of this unit's own, not a view of
 * shards that their owners may write to next. No session stays open, and no peer has to wait. What is written to the copy
 * can be taken over in the end: each rank keeps its slice.
 */
#ifndef ZS_HOLD_H
#define ZS_HOLD_H

#include "unit/held.h"

/* Makes the unit FULL on a copy, `exact`: in its parameters' own dtype. It stays so until zs_unit_reshard, which the end of
 * each backward calls too. Inside a session; collective. No-op if it is held already. */
zs_status zs_hold(zs_unit *unit, bool exact);

/* What was written to the copy is no error: `keep`: this rank's slice of it goes into the shard. Outside of sessions, before
 * zs_unit_reshard. No-op for a unit that is not held. */
zs_status zs_hold_accept(zs_unit *unit, bool keep);

/* ZS_ERR_STATE if the unit is held in another dtype than forward wants. */
zs_status zs_hold_check_forward(const zs_unit *unit);

#endif
