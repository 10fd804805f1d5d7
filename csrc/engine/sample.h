/* sample.h - have the shards been changed by other means than a write that zshard knows of?
 *
 * What a script writes by hand may be what another rank's script writes too, or not, and undone later, or not. A few
 * elements of each flat tell: what swaps in the weights of a moving average changes nearly all of them. The answer is
 * used only where ranks are found to have done different things, because a change that all ranks make is nobody's
 * business here.
 */
#ifndef ZS_SAMPLE_H
#define ZS_SAMPLE_H

#include "engine/engine.h"

/* A known write has ended: what the shards hold now is what it has left. */
void zs_sample_written(zs_engine *engine);

/* Its units have changed: nothing is known of what the shards hold. */
void zs_sample_forget(zs_engine *engine);

/* Notes in *reading what the shards hold now, and whether that is anything else. 0 and false where they cannot be
 * looked at cheaply: on GPUs and disks. */
void zs_sample_take(zs_engine *engine, zs_reading *reading);

#endif
