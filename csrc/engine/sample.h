/* sample.h - have the shards changed otherwise than by a write that zshard knows?
 *
 * Other ranks' scripts may make the same write, or undo it later. A few elements of each flat show a change: swapping
 * in the weights of a moving average changes nearly all of them. The answer is used only once ranks have diverged: a
 * change that all ranks make is legitimate.
 */
#ifndef ZS_SAMPLE_H
#define ZS_SAMPLE_H

#include "engine/engine.h"

/* A known write has ended: samples its result. */
void zs_sample_written(zs_engine *engine);

/* The engine's units have changed: forgets the sample. */
void zs_sample_forget(zs_engine *engine);

/* Sets in *reading a sample of the shards now, and whether it differs from the last. 0 and false where reading them is
 * not cheap: on GPUs and disks. */
void zs_sample_take(zs_engine *engine, zs_reading *reading);

#endif
