/* pinned.h - which units are unsharded by hand: the marks of pin.h, for what is below it. */
#ifndef ZS_PINNED_H
#define ZS_PINNED_H

#include "unit/unit.h"

/* Counts one unit more that is pinned. */
void zs_pinned_begin(void);

/* The unit will not be pinned any more: for zs_unit_reshard, before the schedule clears record.pinned, and for its
 * death. No-op if it is not. */
void zs_pinned_end(zs_unit *unit);

/* Bytes of the copy, if it lies in no slot. */
size_t zs_pinned_bytes(const zs_unit *unit);

/* Is any unit of this process pinned? From any thread. */
bool zs_pinned_any(void);

#endif
