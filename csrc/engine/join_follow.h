/* join_follow.h - join(): what a rank without data does while others continue.
 *
 * It runs the passes that the others announce, with the same sessions, gathers and rounds, but without modules and
 * gradients. So its shard takes part in everything, and its gradient shard gets the same sums.
 */
#ifndef ZS_JOIN_FOLLOW_H
#define ZS_JOIN_FOLLOW_H

#include "engine/engine.h"

/* Follows the ranks that have data until one of them announces a call of Python's (*called), which this rank must make
 * too, or until all ranks' data has ended. */
zs_status zs_engine_follow(zs_engine *engine, bool *called);

#endif
