/* held.h - which units are whole by hand: the marks of hold.h, for what is below it. */
#ifndef ZS_HELD_H
#define ZS_HELD_H

#include "unit/unit.h"

/* Notes that the unit is held. */
void zs_hold_mark(zs_unit *unit);

/* Forgets that the unit is held; for zs_unit_reshard, and for its death. */
void zs_hold_end(zs_unit *unit);

/* Bytes of the copy, if it lies in no slot. */
size_t zs_hold_bytes(const zs_unit *unit);

/* Is any unit of this process held? */
bool zs_hold_any(void);

#endif
