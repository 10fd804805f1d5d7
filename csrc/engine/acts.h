/* acts.h - what an engine does when its schedule says so: the executor with memory, transports and tensors. */
#ifndef ZS_ACTS_H
#define ZS_ACTS_H

#include "schedule/schedule.h"

/* An engine's schedule's. */
extern const zs_actions zs_engine_actions;

#endif
