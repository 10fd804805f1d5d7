/* writing.c - see writing.h. */
#include "engine/writing.h"

#include "engine/engine_inside.h"
#include "engine/history.h"
#include "engine/sample.h"

zs_status zs_writing_begin(zs_engine *engine)
{
    return zs_comm_write_begin(engine->home.ranks.shard_group, engine->reader);
}

void zs_writing_end(zs_engine *engine)
{
    zs_sample_written(engine);
    zs_history_tell(engine);
    zs_comm_write_end(engine->home.ranks.shard_group, engine->reader);
}
