/* acts.c - the schedule's executor with memory, transports and tensors.
 *
 * Each action does one thing to one unit or to the engine, through the files that implement it; none decides when.
 * Between sessions no peer reads this rank's shards, so optimizers and users may write them.
 */

#include "engine/engine.h"
#include "engine/engine_inside.h"
#include "engine/history.h"
#include "engine/recording.h"
#include "engine/writing.h"
#include "reduce/bucket.h"
#include "reduce/grad_memory.h"
#include "reduce/grads.h"
#include "reduce/in_backward.h"
#include "reduce/leaves.h"
#include "reduce/reduce.h"
#include "unit/unit.h"

/* Frees what zero_grad() has not, as a script held a gradient then. */
static void drop_grads(zs_engine *engine)
{
    (void)zs_context_captured(&engine->context); /* the graph will write to the existing ones */
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        zs_grad_memory_drop(zs_engine_unit(engine, i));
}

/* --- reading peers' shards ---------------------------------------------------------------------------------------- */

/* Are there shards that peers read? Replicated units need no meeting in forward. */
static bool has_shards(const zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        const zs_traits *is = &zs_engine_unit(engine, i)->record.is;
        if (!is->replicated && !is->empty) return true;
    }
    return false;
}

static zs_status begin_reading(zs_engine *engine, const zs_reading *reading)
{
    zs_comm *shard_group = engine->context.ranks.shard_group;
    if (!has_shards(engine)) return ZS_OK;
    ZS_TRY(zs_comm_read_begin(shard_group, engine->reader, reading));
    engine->reading = true;
    return ZS_OK;
}

/* A session leaves no stream apart, so that a CUDA graph may begin and end between any two: no wait goes from one
 * into the next. */
static zs_status join_streams(const zs_ranks *ranks)
{
    ZS_TRY(zs_device_join(ranks->all->device, ZS_STREAM_GATHER));
    ZS_TRY(zs_device_join(ranks->all->device, ZS_STREAM_REDUCE));
    ranks->all->sessions++;
    if (ranks->shard_group != ranks->all) ranks->shard_group->sessions++;
    return ZS_OK;
}

/* Between passes, memory that a pass borrows is free for activations. */
static void rest(zs_engine *engine)
{
    if (!zs_context_device(&engine->context)->ops->queues || zs_context_captured(&engine->context)) return;
    zs_engine_note_peak(engine);
    zs_arena_rest(engine->context.arena);
    zs_buckets_rest(&engine->context.schedule, zs_context_device(&engine->context));
}

static bool steps_in_backward(const zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        if (zs_engine_unit(engine, i)->stepping != NULL) return true;
    return false;
}

static zs_status close_session(zs_schedule *schedule, zs_phase phase)
{
    zs_engine *engine = zs_engine_of_schedule(schedule);
    zs_comm *shard_group = engine->context.ranks.shard_group;
    zs_status status = phase == ZS_PHASE_FORWARD ? zs_forward_writes_end(engine) : ZS_OK;
    bool unsettled = steps_in_backward(engine) || engine->history.in_pass; /* until end() */
    if (phase == ZS_PHASE_BACKWARD && unsettled) zs_writing_unknown(engine);
    if (engine->reading) ZS_ALSO(status, zs_comm_read_end(shard_group, engine->reader, phase));
    engine->reading = false;
    ZS_THEN(status, join_streams(&engine->context.ranks));
    if (status == ZS_OK && phase == ZS_PHASE_FORWARD) rest(engine);
    return status == ZS_OK ? zs_device_end_pass(zs_context_device(&engine->context), &engine->context.trail) : status;
}

/* --- a pass begins ------------------------------------------------------------------------------------------------ */

/* A gather for the secondary shards serves this pass. */
static zs_status renew_secondary(const zs_engine *engine, const zs_reading *reading)
{
    zs_comm *replica_group = engine->context.ranks.replica_group;
    if (replica_group == NULL) return ZS_OK;
    replica_group->reading = zs_reading_encode(reading);
    replica_group->model = (zs_model){0}; /* all ranks gather these, or none */
    return zs_secondary_refresh(replica_group, engine->context.schedule.records, zs_engine_n_units(engine));
}

static zs_status open_forward(zs_engine *engine, const zs_entry *entry)
{
    bool trains = !entry->by_hand && entry->recording;
    zs_reading reading = {.pass = trains ? ZS_PASS_TRAIN : ZS_PASS_EVALUATE};
    reading.eval_mode = !entry->by_hand && !entry->training;
    if (entry->resumed && !engine->interrupted) return begin_reading(engine, &reading);
    if (!trains) ZS_TRY(zs_writing_check(engine));
    engine->interrupted = false;
    zs_writing_over(engine);
    ZS_TRY(zs_writing_back(engine));
    ZS_TRY(zs_writing_cast(engine));
    zs_sample_take(engine, &reading);
    drop_grads(engine);
    zs_status status = renew_secondary(engine, &reading);
    if (!entry->resumed) ZS_THEN(status, zs_buffers_sync(engine, entry));
    return status == ZS_OK ? begin_reading(engine, &reading) : status;
}

static zs_status open_backward(zs_engine *engine)
{
    engine->context.ranks.all->heard = false;
    zs_writing_over(engine);
    zs_engine_note_frozen(engine);
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        zs_in_backward_open(zs_engine_unit(engine, i));
    drop_grads(engine);
    return begin_reading(engine, &(zs_reading){.pass = ZS_PASS_BACKWARD});
}

static zs_status open_session(zs_schedule *schedule, const zs_entry *entry)
{
    zs_engine *engine = zs_engine_of_schedule(schedule);
    zs_engine_trace_memory(engine);
    return entry != NULL ? open_forward(engine, entry) : open_backward(engine);
}

/* A hook that a user registers takes the place of ours. Units that are sharded now get theirs back when bound. */
static zs_status hook_full(const zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        zs_unit *unit = zs_engine_unit(engine, i);
        for (int64_t p = 0; zs_unit_is_full(unit) && p < unit->n_params; p++)
            if (zs_tensor_alive(unit->params[p].tensor)) ZS_TRY(engine->context.calls->hook_param(unit, p));
    }
    return ZS_OK;
}

static zs_status ready_backward(zs_engine *engine)
{
    ZS_TRY(zs_engine_check_spoiled(engine));
    ZS_TRY(zs_leaves_ready(&engine->context));
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        ZS_TRY(zs_in_backward_begin(zs_engine_unit(engine, i)));
    ZS_TRY(hook_full(engine));
    return engine->hooks->backward_end(engine);
}

static zs_status ready(zs_schedule *schedule, zs_phase phase)
{
    zs_engine *engine = zs_engine_of_schedule(schedule);
    if (phase == ZS_PHASE_BACKWARD) return ready_backward(engine);
    zs_history_publish(engine);
    return zs_engine_reserve(engine);
}

/* --- a unit's parameters and gradients ---------------------------------------------------------------------------- */

static zs_status pack(zs_record *record, int64_t i, bool anew, bool *first)
{
    zs_profile *range = zs_unit_profile(zs_unit_of(record), "pack");
    zs_status status = zs_reduce_pack(record, i, anew, first);
    zs_profile_end(range);
    return status;
}

static zs_status gather(zs_record *record)
{
    zs_unit *unit = zs_unit_of(record);
    ZS_TRY(zs_forward_write_settle(unit));
    unit->context->ranks.shard_group->model = unit->context->model;
    zs_profile *range = zs_unit_profile(unit, "all_gather");
    zs_status status = zs_unit_gather(unit);
    zs_profile_end(range);
    zs_engine_trace_use(zs_unit_of(record));
    return status;
}

static zs_status bind(zs_record *record)
{
    zs_unit *unit = zs_unit_of(record);
    zs_profile *range = zs_unit_profile(unit, "unshard");
    zs_status status = zs_unit_bind(unit);
    zs_profile_end(range);
    return status;
}

/* Autocast's cached casts belong to this gather: they hold memory and tie autograd to a stale parameter. */
static zs_status reshard(zs_record *record)
{
    if (record->pinned) zs_recording_read_end(record);
    zs_autocast_forget();
    zs_status status = zs_unit_reshard(zs_unit_of(record));
    zs_engine_trace_use(zs_unit_of(record));
    return status;
}

/* Each parameter and the unit's own handle are users of the storage. */
static bool held(const zs_record *record)
{
    const zs_unit *unit = (const zs_unit *)record;
    for (int f = 0; f < unit->n_flats; f++) {
        int64_t own = 1;
        for (int64_t i = 0; i < unit->n_params; i++)
            own += unit->params[i].flat == f && zs_tensor_alive(unit->params[i].tensor);
        if (zs_storage_users(unit->flats[f].full) > own) return true;
    }
    return false;
}

static void reads_changed(zs_schedule *schedule)
{
    zs_context_replan(&zs_engine_of_schedule(schedule)->context);
}

static zs_status keep(zs_record *record, int64_t i, bool *all)
{
    zs_unit *unit = zs_unit_of(record);
    if (zs_in_backward_alone(unit)) return zs_in_backward_arrived(unit, i, all);
    return zs_reduce_keep(unit, i);
}

static zs_status bucket_new(zs_schedule *schedule, size_t bytes, zs_lease **out)
{
    ZS_TRY(zs_bucket_new(schedule, zs_engine_of_schedule(schedule)->context.ranks.all, bytes, out));
    (*out)->extra = true; /* the plan's are reserved before the first step */
    return ZS_OK;
}

/* A unit that is mapped stays so for the rest of a backward; what autocast has cast to recompute it has been used by
 * now. */
static zs_status begin_round(zs_record *record, bool local)
{
    if (!record->is.replicated) zs_autocast_forget();
    return zs_reduce_begin(zs_unit_of(record), local);
}

static zs_status post(zs_record *record)
{
    zs_unit *unit = zs_unit_of(record);
    unit->context->ranks.all->model = unit->context->model;
    zs_profile *range = zs_unit_profile(unit, unit->record.is.replicated ? "all_reduce" : "reduce_scatter");
    zs_status status = zs_reduce_post(unit);
    zs_profile_end(range);
    zs_pace_posted(unit);
    zs_engine_trace_use(zs_unit_of(record));
    return status;
}

static zs_status sum(zs_record *record, zs_wait wait, bool *done, bool *over)
{
    zs_status status = zs_reduce_sum(record, wait, done, over);
    if (*done) zs_engine_trace_use(zs_unit_of(record));
    return status;
}

static zs_status share(zs_record *record, zs_wait wait, bool *done)
{
    zs_unit *unit = zs_unit_of(record);
    unit->context->ranks.all->model = unit->context->model;
    return zs_reduce_share(unit, wait, done);
}

static zs_status reusable(zs_record *record, zs_wait wait, bool *done)
{
    const zs_unit *unit = zs_unit_of(record);
    zs_comm *all = unit->context->ranks.all;
    return zs_cunit_reusable(all, unit->cunit, wait, done);
}

static zs_status step(zs_record *record)
{
    zs_unit *unit = zs_unit_of(record);
    if (record->is.reduces) {
        const zs_comm *all = unit->context->ranks.all;
        ZS_TRY(zs_device_join(all->device, all->ops->stream));
        ZS_TRY(zs_grads_deliver(record));
    }
    zs_profile *range = zs_unit_profile(unit, "step");
    zs_status status = zs_in_backward_step(unit);
    zs_profile_end(range);
    return status;
}

static void drop(zs_record *record)
{
    zs_unit *unit = zs_unit_of(record);
    zs_engine_undo_grads(unit);
    (void)zs_grads_hand_out(unit);
    zs_in_backward_abandon(unit);
    zs_leaves_drop(unit);
    zs_leaves_restart(unit->context);
}

/* --- a backward ends ---------------------------------------------------------------------------------------------- */

static zs_status give_up(zs_schedule *schedule)
{
    zs_comm *all = zs_engine_of_schedule(schedule)->context.ranks.all;
    bool heard = all->heard;
    all->heard = false;
    return heard ? ZS_OK : zs_comm_give_up(all);
}

static zs_status summed(zs_schedule *schedule)
{
    zs_engine *engine = zs_engine_of_schedule(schedule);
    const zs_comm *all = engine->context.ranks.all;
    zs_engine_note_peak(engine); /* while the gradients are there */
    return zs_device_join(all->device, all->ops->stream);
}

/* Steps the units that are stepped in backward and were not yet, now that no peer reads; unless `status` is a failure.
 * After a step or hook that raised, peers may read the parameters as they are. */
static zs_status step_rest(zs_engine *engine, zs_status status)
{
    if (!steps_in_backward(engine)) return status;
    zs_status begun = status == ZS_OK || status == ZS_ERR_TORCH ? zs_writing_begin(engine) : status;
    ZS_ALSO(status, begun);
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        if (status == ZS_OK)
            status = zs_in_backward_finish(zs_engine_unit(engine, i), !engine->context.schedule.gave_up);
        else
            zs_in_backward_abandon(zs_engine_unit(engine, i));
    }
    if (begun == ZS_OK) zs_writing_end(engine);
    return status;
}

static zs_status end(zs_schedule *schedule, zs_status reduced, zs_status delivered)
{
    zs_engine *engine = zs_engine_of_schedule(schedule);
    bool stepped = engine->history.in_pass, good = reduced == ZS_OK && !schedule->gave_up;
    zs_history_reduced(engine, good);
    if (good && delivered == ZS_OK) zs_leaves_count(&engine->context);
    if (good) zs_pace_reduced(engine, steps_in_backward(engine));
    if (delivered != ZS_OK) zs_engine_restart_step(engine);
    zs_status status = step_rest(engine, reduced != ZS_OK ? reduced : delivered);
    if (status == ZS_OK) rest(engine);
    zs_engine_trace_memory(engine);
    if (!stepped || steps_in_backward(engine)) return status;
    ZS_THEN(status, zs_writing_begin(engine)); /* a hook stepped: publish it now, while the ranks agree */
    if (status == ZS_OK) zs_writing_end(engine);
    return status;
}

const zs_actions zs_engine_actions = {
    .ready = ready,
    .open = open_session,
    .close = close_session,
    .gather = gather,
    .bind = bind,
    .cancel = zs_unit_cancel,
    .reshard = reshard,
    .held = held,
    .read_over = zs_recording_read_end,
    .reads_changed = reads_changed,
    .prepare = zs_grads_begin,
    .keep = keep,
    .bucket_new = bucket_new,
    .begin_round = begin_round,
    .pack = pack,
    .send_local = zs_reduce_send_local,
    .post = post,
    .share = share,
    .sum = sum,
    .reusable = reusable,
    .step = step,
    .give_up = give_up,
    .summed = summed,
    .deliver = zs_grads_deliver,
    .drop = drop,
    .end = end,
};
