/* acts.h - the schedule's executor with memory, transports and tensors. */
#ifndef ZS_ACTS_H
#define ZS_ACTS_H

#include "schedule/schedule.h"

/* The actions of an engine's schedule. */
extern const zs_actions zs_engine_actions;

#endif
