/* join_follow.c - join(): what a rank without data does while others continue.
 *
 * It runs the passes that the others announce, with the same sessions, gathers and rounds, but without modules and
 * gradients. So its shard takes part in everything, and its gradient shard gets the same sums.
 See join.h. */

#include "engine/engine_inside.h"
#include "engine/join.h"

/* --- passes ------------------------------------------------------------------------------------------------------- */

static zs_status record_of(zs_engine *engine, uint32_t number, zs_record **out)
{
    if (number >= zs_engine_n_units(engine))
        return ZS_FAIL(ZS_ERR_DIVERGED,
                       "ranks diverged in join(): another rank uses unit %u of a model of %zu units; build the same "
                       "model on all ranks",
                       number, zs_engine_n_units(engine));
    *out = engine->context.schedule.records[number];
    return ZS_OK;
}

/* Takes part in a pass until the announcement `end`; *summed: the status of its rounds, which the other ranks get too.
 */
static zs_status take_part(zs_engine *engine, zs_join_act end, zs_status *summed)
{
    zs_schedule *schedule = &engine->context.schedule;
    for (;;) {
        ZS_TRY(zs_join_receive(engine));
        const zs_join_message *word = &zs_join_received(engine)->word;
        zs_record *record = NULL;
        if (word->act == end) return ZS_OK;
        if (word->act == ZS_JOIN_MEETING) continue; /* refused there */
        if (word->act != ZS_JOIN_GATHER && word->act != ZS_JOIN_POST)
            return ZS_FAIL(ZS_ERR_DIVERGED,
                           "ranks diverged in join(): rank %d ended a pass early; run the same forwards and backwards "
                           "on all ranks that have data",
                           zs_join_received(engine)->leader);
        ZS_TRY(record_of(engine, word->number, &record));
        if (word->act == ZS_JOIN_GATHER)
            ZS_TRY(zs_schedule_gather_only(schedule, record));
        else
            ZS_ALSO(*summed, zs_schedule_post_only(schedule, record));
    }
}

static zs_status follow_forward(zs_engine *engine, uint32_t bits)
{
    zs_schedule *schedule = &engine->context.schedule;
    if ((bits & ZS_JOIN_BY_HAND) != 0) return ZS_OK; /* refused there */
    zs_entry entry = {.now = zs_next_node()};
    entry.training = (bits & ZS_JOIN_TRAINING) != 0;
    entry.recording = (bits & ZS_JOIN_RECORDING) != 0;
    if (entry.recording) ZS_TRY(zs_engine_thaw(engine));
    ZS_TRY(zs_schedule_enter(schedule, NULL, &entry));
    zs_status status = ZS_OK, none = ZS_OK;
    if (zs_join_gathers(engine)) status = take_part(engine, ZS_JOIN_FORWARD_END, &none);
    ZS_ALSO(status, zs_schedule_leave_by_hand(schedule));
    return status;
}

static zs_status follow_backward(zs_engine *engine)
{
    zs_schedule *schedule = &engine->context.schedule;
    zs_status summed = ZS_OK;
    ZS_TRY(zs_join_align(engine));
    zs_status status = zs_schedule_begin_to_follow(schedule);
    ZS_THEN(status, take_part(engine, ZS_JOIN_BACKWARD_END, &summed));
    if (status == ZS_OK) {
        status = zs_schedule_end(schedule);
        return summed != ZS_OK ? summed : status;
    }
    bool heard = engine->context.ranks.all->heard; /* a rank has abandoned it: no error here */
    if (schedule->stage == ZS_IN_BACKWARD) zs_schedule_fail(schedule);
    if (heard) zs_clear_error();
    zs_status settled = zs_schedule_settle(schedule);
    return heard ? settled : status;
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

static zs_status follow_one(zs_engine *engine, bool *called)
{
    const zs_join_message *word = &zs_join_received(engine)->word;
    switch ((zs_join_act)word->act) {
    case ZS_JOIN_FORWARD: return follow_forward(engine, word->bits);
    case ZS_JOIN_BACKWARD: return follow_backward(engine);
    case ZS_JOIN_CALL: *called = true; return ZS_OK;
    default: return ZS_OK; /* what was refused, or came to nothing, there */
    }
}

zs_status zs_engine_follow(zs_engine *engine, bool *called)
{
    *called = false;
    ZS_TRY(zs_schedule_settle(&engine->context.schedule));
    zs_join_follow(engine);
    while (!*called) {
        ZS_TRY(zs_join_receive(engine));
        if (zs_join_received(engine)->n_active == 0) return ZS_OK;
        ZS_TRY(follow_one(engine, called));
    }
    return ZS_OK;
}
