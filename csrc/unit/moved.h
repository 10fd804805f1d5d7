/* moved.h - parameters that scripts have moved off the memory of their unit. */
#ifndef ZS_MOVED_H
#define ZS_MOVED_H

#include "unit/unit.h"

/* Fails: a parameter was moved `when` it must not be. */
zs_status zs_moved_error(const zs_unit *unit, const zs_param *param, const char *when);

/* The memory that the i-th parameter has left, where other tensors of the script's may still lie; false: it has not,
 * or nobody can. Call it before zs_unit_write_back, which writes there. */
bool zs_moved_from(const zs_unit *unit, int64_t i, void **memory, size_t *bytes);

#endif
