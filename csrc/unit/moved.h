/* moved.h - parameters that scripts have moved to other memory than their unit's. */
#ifndef ZS_MOVED_H
#define ZS_MOVED_H

#include "unit/unit.h"

/* Returns the failure of a parameter that was moved `when` it must not be. */
zs_status zs_moved_error(const zs_unit *unit, const zs_param *param, const char *when);

/* The memory that the i-th parameter lay in before a move, which other tensors of the script may still use; false: it was not
 * moved, or nothing else can use that memory. Call it before zs_unit_write_back, which writes there. */
bool zs_moved_from(const zs_unit *unit, int64_t i, void **memory, size_t *bytes);

#endif
