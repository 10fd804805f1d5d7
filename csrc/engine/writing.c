/* writing.c - see writing.h.
 *
 * Peers that evaluate may read this rank's shards at any time. With mixed precision they read the result of the last
 * cast. So a write ends with a cast.
 */
#include "engine/writing.h"

#include "engine/engine_inside.h"
#include "engine/history.h"

static void end(zs_engine *engine, bool known)
{
    engine->writing = engine->steps = false;
    engine->by_hand = !known;
    zs_history_publish(engine);
    zs_comm_write_end(engine->context.ranks.shard_group, engine->reader, known);
}

bool zs_engine_is_written(const zs_engine *engine)
{
    return engine->writing || engine->context.stepping;
}

void zs_writing_over(zs_engine *engine)
{
    engine->writing = engine->by_hand = engine->steps = false;
}

void zs_writing_steps(zs_engine *engine)
{
    engine->steps = true;
}

zs_status zs_writing_check(const zs_engine *engine)
{
    if (!engine->steps || !zs_comm_shares_memory(engine->context.ranks.shard_group)) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE,
                   "cannot read, load or swap full parameters, or call the model, within optimizer.step() "
                   "or one of its hooks, while ranks write their shards: do so before or after the step");
}

zs_status zs_writing_begin(zs_engine *engine)
{
    if (engine->held > 0)
        return ZS_FAIL(ZS_ERR_STATE,
                       "parameters cannot be written (stepped, loaded, changed in place) while zshard.export() or "
                       "state_dict() of their model reads them: leave the loop of the export first");
    ZS_TRY(zs_comm_write_begin(engine->context.ranks.shard_group, engine->reader));
    engine->writing = true;
    return ZS_OK;
}

zs_status zs_writing_cast(zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        ZS_TRY(zs_unit_cast(zs_engine_unit(engine, i)));
    return ZS_OK;
}

void zs_writing_end(zs_engine *engine)
{
    zs_sample_written(engine);
    bool done = !zs_comm_shares_memory(engine->context.ranks.shard_group) || zs_writing_cast(engine) == ZS_OK;
    if (!done) zs_clear_error(); /* the next pass tries again, and fails */
    /* Secondary shards are brought up to date when a pass begins. */
    end(engine, done && engine->context.ranks.replica_group == NULL);
}

zs_status zs_writing_by_hand(zs_engine *engine, bool *begun)
{
    *begun = !engine->writing;
    if (!*begun) return ZS_OK;
    ZS_TRY(zs_schedule_settle(&engine->context.schedule)); /* peers may still read, for a backward that raised here */
    return zs_writing_begin(engine);
}

void zs_writing_by_hand_end(zs_engine *engine)
{
    end(engine, false);
}

void zs_writing_unknown(zs_engine *engine)
{
    zs_comm_write_end(engine->context.ranks.shard_group, engine->reader, false);
}

zs_status zs_writing_back(zs_engine *engine)
{
    bool any = false;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        any |= zs_unit_is_moved(zs_engine_unit(engine, i));
    if (!any) return ZS_OK;
    bool begun;
    ZS_TRY(zs_writing_by_hand(engine, &begun));
    zs_status status = ZS_OK;
    for (size_t i = 0; i < zs_engine_n_units(engine) && status == ZS_OK; i++)
        status = zs_unit_write_back(zs_engine_unit(engine, i));
    zs_writing_by_hand_end(engine);
    return status;
}

/* Are there casts that peers read? */
static bool has_casts(const zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        if (zs_unit_has_casts(zs_engine_unit(engine, i))) return true;
    return false;
}

/* Publishes the script's writes, which all ranks have finished. */
static zs_status complete(zs_engine *engine)
{
    if (!zs_comm_shares_memory(engine->context.ranks.shard_group) || engine->writing || engine->reading) return ZS_OK;
    ZS_TRY(zs_writing_back(engine));
    if (!engine->by_hand) return ZS_OK;
    if (has_casts(engine)) {
        ZS_TRY(zs_writing_begin(engine));
        zs_status status = zs_writing_cast(engine);
        if (status != ZS_OK) end(engine, false);
        ZS_TRY(status);
        engine->writing = false;
    }
    engine->by_hand = false;
    zs_reading reading = {0};
    zs_sample_take(engine, &reading);
    zs_comm_write_complete(engine->context.ranks.shard_group, engine->reader, reading.changed);
    return ZS_OK;
}

zs_status zs_writing_barrier(zs_engine *engine)
{
    ZS_TRY(complete(engine));
    if (!engine->reading && !engine->writing)
        zs_comm_readers_barrier(engine->context.ranks.shard_group, engine->reader);
    return ZS_OK;
}
