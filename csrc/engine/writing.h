/* writing.h - the right to write this rank's shards, of an engine that no failed backward holds up: see
 * zs_engine_write_begin. */
#ifndef ZS_WRITING_H
#define ZS_WRITING_H

#include "engine/engine.h"

/* Waits until no peer reads the shards, and admits none / admits them again. */
zs_status zs_writing_begin(zs_engine *engine);
void zs_writing_end(zs_engine *engine);

#endif
