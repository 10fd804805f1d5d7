/* session.c - see session.h. */
#include "unit/session.h"

#include "unit/grads.h"
#include "unit/history.h"
#include "unit/sample.h"

zs_status zs_session_reshard_all(zs_engine *engine, bool held)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; i < engine->n; i++) {
        if (engine->units[i]->held && !held) continue;
        ZS_ALSO(status, zs_unit_reshard(engine->units[i], ZS_SHARDED));
    }
    return status;
}

void zs_session_discard_dead_grads(zs_engine *engine)
{
    bool held = false;
    for (size_t i = 0; i < engine->n; i++) {
        if (zs_grads_wanted(engine->units[i])) return;
        held |= engine->units[i]->grads_held;
    }
    if (!held || engine->lent_grads) return;
    for (size_t i = 0; i < engine->n; i++)
        engine->units[i]->grads_held = false;
    zs_pool_discard(engine->grads);
    for (size_t i = 0; i < engine->n; i++)
        zs_offload_discard_grads(engine->units[i]);
}

/* Are there shards that peers read? Replicated units need no meeting in forward. */
static bool has_shards(const zs_engine *engine)
{
    for (size_t i = 0; i < engine->n; i++)
        if (!engine->units[i]->replicated && engine->units[i]->n_params > 0) return true;
    return false;
}

zs_status zs_session_begin_reading(zs_engine *engine, const zs_reading *reading)
{
    if (!has_shards(engine)) return ZS_OK;
    ZS_TRY(engine->ranks.near->ops->read_begin(engine->ranks.near, engine->reader, reading));
    engine->reading = true;
    return ZS_OK;
}

/* A session leaves no lane apart, so that a CUDA graph may begin and end between any two: no wait goes from one into the next. */
static zs_status join_lanes(const zs_ranks *ranks)
{
    ZS_TRY(zs_device_join(ranks->all->device, ZS_LANE_GATHER));
    ZS_TRY(zs_device_join(ranks->all->device, ZS_LANE_REDUCE));
    ranks->all->sessions++;
    if (ranks->near != ranks->all) ranks->near->sessions++;
    return ZS_OK;
}

zs_status zs_session_end_reading(zs_engine *engine, zs_phase phase)
{
    zs_status status = ZS_OK;
    if (engine->reading) status = engine->ranks.near->ops->read_end(engine->ranks.near, engine->reader, phase);
    engine->reading = false;
    return status == ZS_OK ? join_lanes(&engine->ranks) : status;
}

zs_status zs_session_make_whole(zs_unit *unit, zs_phase phase)
{
    ZS_TRY(zs_unit_unshard(unit));
    zs_prefetch_note(unit, phase);
    return zs_prefetch_next(unit, phase);
}

zs_status zs_session_write_begin(zs_engine *engine)
{
    zs_comm *near = engine->ranks.near;
    return near->ops->write_begin != NULL ? near->ops->write_begin(near, engine->reader) : ZS_OK;
}

void zs_session_write_end(zs_engine *engine)
{
    zs_comm *near = engine->ranks.near;
    zs_sample_written(engine);
    zs_history_tell(engine);
    if (near->ops->write_end != NULL) near->ops->write_end(near, engine->reader);
}
