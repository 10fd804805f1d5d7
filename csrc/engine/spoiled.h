/* spoiled.h - gradients that a failed backward added to others: they must not be used. */
#ifndef ZS_SPOILED_H
#define ZS_SPOILED_H

#include "engine/engine.h"

/* ZS_ERR_STATE, naming the parameter, if one shows such a gradient. */
zs_status zs_engine_check_spoiled(zs_engine *engine);

#endif
