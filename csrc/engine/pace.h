/* pace.h - what a trace shows of a backward, and the counts between optimizer steps. */
#ifndef ZS_PACE_H
#define ZS_PACE_H

#include "unit/context.h"

typedef struct zs_engine zs_engine;

/* The backward of a forward of the unit begins: from here on, until another unit's begins or this one's gradients are
 * handed over, a trace shows the time as that unit's. */
void zs_pace_backward(zs_unit *unit);

/* The unit's gradients have been handed over. */
void zs_pace_posted(const zs_unit *unit);

/* The backward is over, whether it succeeded or failed: ends its ranges. */
void zs_pace_backward_end(zs_engine *engine);

/* The gradients of a backward are there; `stepped`: it has made the optimizer's step. */
void zs_pace_reduced(zs_engine *engine, bool stepped);

/* An optimizer's step of the model begins / is over. The latter is not called if the step raised, and does nothing
 * without a step. */
void zs_pace_step(zs_engine *engine);
void zs_pace_stepped(zs_engine *engine);

#endif
