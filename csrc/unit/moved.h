/* moved.h - parameters that scripts have moved off the memory of their unit. */
#ifndef ZS_MOVED_H
#define ZS_MOVED_H

#include "unit/unit.h"

/* Fails: a parameter was moved `when` it must not be. */
zs_status zs_moved_error(const zs_unit *unit, const zs_param *param, const char *when);

#endif
