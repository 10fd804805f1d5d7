/* join_follow.h - what a rank does whose data has ended, while others go on: join().
 *
 * It runs the passes that the others announce, with sessions, gathers and rounds as theirs, but without modules
 * and without gradients. So its shard takes part in everything, and its grad shard has what all ranks' have.
 */
#ifndef ZS_FOLLOW_H
#define ZS_FOLLOW_H

#include "engine/engine.h"

/* Follows the ranks that have data until one of them is about to make a call of Python's (*called), which this rank
 * is to make as well, or until all ranks' data has ended. */
zs_status zs_engine_follow(zs_engine *engine, bool *called);

#endif
