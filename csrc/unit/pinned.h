/* pinned.h - which units are unsharded by hand: the marks of pin.h, for what is below it. */
#ifndef ZS_PINNED_H
#define ZS_PINNED_H

#include "unit/unit.h"

/* Counts one unit more that is pinned. */
void zs_pinned_begin(void);

/* The unit is not pinned any more: for zs_unit_reshard, and for its death. No-op if it was not. */
void zs_pinned_end(zs_unit *unit);

/* Bytes of the copy, if it lies in no slot. */
size_t zs_pinned_bytes(const zs_unit *unit);

/* Is any unit of this process pinned? */
bool zs_pinned_any(void);

#endif
