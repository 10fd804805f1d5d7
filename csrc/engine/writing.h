/* writing.h - the right to write this rank's shards, of an engine that no failed backward holds up: see
 * zs_engine_write_begin. */
#ifndef ZS_WRITING_H
#define ZS_WRITING_H

#include "engine/engine.h"

/* A pass begins, which ends whatever write has raised. */
void zs_writing_over(zs_engine *engine);

/* Waits until no peer reads the shards, and admits none / admits them again. */
zs_status zs_writing_begin(zs_engine *engine);
void zs_writing_end(zs_engine *engine);

/* The same for one of a script's own operations; *begun: it is not within another write, and is to be ended. */
zs_status zs_writing_by_hand(zs_engine *engine, bool *begun);
void zs_writing_by_hand_end(zs_engine *engine);

/* What scripts have put in the place of slices (`p.data = t`) goes into the shards, which peers may be reading. */
zs_status zs_writing_back(zs_engine *engine);

/* What scripts have written by hand is complete, on all ranks alike: peers may evaluate with it. No-op within a pass
 * and a write. */
zs_status zs_writing_complete(zs_engine *engine);

/* The same; and all ranks wait for each other there: looks of before, which one rank may have made alone, count no
 * more. */
zs_status zs_writing_barrier(zs_engine *engine);

/* Casts the shards to the dtype that is computed with. */
zs_status zs_writing_cast(zs_engine *engine);

/* What the shards hold is not to be looked at by peers before the next known write or pass. */
void zs_writing_unknown(zs_engine *engine);

#endif
