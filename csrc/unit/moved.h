/* moved.h - parameters that scripts have moved to other memory than their unit's. */
#ifndef ZS_MOVED_H
#define ZS_MOVED_H

#include "unit/unit.h"

/* Returns the failure of a parameter that was moved `when` it must not be. */
zs_status zs_moved_error(const zs_unit *unit, const zs_param *param, const char *when);

#endif
