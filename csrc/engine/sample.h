/* sample.h - have the shards been changed by other means than a write that zshard knows of?
 *
 * The one idea: a script may write p.data without a trace, say to swap in the weights of a moving average. A few elements of
 * each flat tell: such a swap changes nearly all of them. The answer is used only where ranks are found to run different
 * passes (shm_word.h), because a change that all ranks make is nobody's business here.
 */
#ifndef ZS_SAMPLE_H
#define ZS_SAMPLE_H

#include "engine/engine.h"

/* A known write has ended: what the shards hold now is what it has left. */
void zs_sample_written(zs_engine *engine);

/* Its units have changed: nothing is known of what the shards hold. */
void zs_sample_forget(zs_engine *engine);

/* What the shards hold now, for a session; *changed: is it anything else? 0 and false where they cannot be looked at cheaply: on
 * GPUs and disks. */
uint64_t zs_sample_take(zs_engine *engine, bool *changed);

#endif
