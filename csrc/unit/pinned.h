/* pinned.h - counts the units that pin.h has unsharded by hand, for the layers below it. */
#ifndef ZS_PINNED_H
#define ZS_PINNED_H

#include "unit/unit.h"

/* Counts one more pinned unit. */
void zs_pinned_begin(void);

/* The unit stops being pinned: for zs_unit_reshard, before the schedule clears record.pinned, and for freeing it. No-op
 * if it is not pinned. */
void zs_pinned_end(zs_unit *unit);

/* Bytes of the copy, if it lies in no slot. */
size_t zs_pinned_bytes(const zs_unit *unit);

/* Is any unit of this process pinned? From any thread. */
bool zs_pinned_any(void);

#endif
