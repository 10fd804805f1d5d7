/* hold.h - a unit that is whole by hand: from unshard() to reshard().
 *
 * The one idea: user code may take any time between the two, so what it holds is a copy of this unit's own, not a view of
 * shards that their owners may write to next. No session stays open, and no peer has to wait.
 */
#ifndef ZS_HOLD_H
#define ZS_HOLD_H

#include "unit.h"

/* Makes the unit FULL on a copy. It stays so until zs_unit_reshard, which the end of each backward calls too. Inside a session;
 * collective. No-op if it is held already. */
zs_status zs_hold(zs_unit *unit);

/* Forgets that the unit is held; for zs_unit_reshard, and for its death. */
void zs_hold_end(zs_unit *unit);

/* Bytes of the copy, if it lies in no slot. */
size_t zs_hold_bytes(const zs_unit *unit);

/* Is any unit of this process held? */
bool zs_hold_any(void);

#endif
