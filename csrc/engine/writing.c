/* writing.c - see writing.h. */
#include "engine/writing.h"

#include "engine/engine_inside.h"
#include "engine/history.h"
#include "engine/sample.h"

zs_status zs_writing_begin(zs_engine *engine)
{
    zs_comm *near = engine->home.ranks.near;
    return near->ops->write_begin != NULL ? near->ops->write_begin(near, engine->reader) : ZS_OK;
}

void zs_writing_end(zs_engine *engine)
{
    zs_comm *near = engine->home.ranks.near;
    zs_sample_written(engine);
    zs_history_tell(engine);
    if (near->ops->write_end != NULL) near->ops->write_end(near, engine->reader);
}
