/* backward.c - the backward pass: from the first event that autograd sends to the last.
 *
 * Gradients leave as soon as a unit's are complete, where ranks need not agree on when; elsewhere when the
 * backward is through with the unit (through.c), which all ranks see at the same event. See schedule.h.
 */
#include "schedule/inner.h"

zs_status zs_schedule_begin_backward(zs_schedule *schedule)
{
    if (schedule->stage == ZS_IN_BACKWARD) return ZS_OK;
    ZS_TRY(zs_schedule_settle(schedule)); /* another backward has raised, and no forward came between */
    ZS_TRY(zs_session_suspend(schedule));
    ZS_TRY(ZS_ACT(schedule, ready, schedule, ZS_PHASE_BACKWARD));
    schedule->stage = ZS_IN_BACKWARD;
    schedule->next_post = 0;
    zs_unshard_begin_pass(schedule);
    zs_rounds_begin(schedule);
    return ZS_ACT(schedule, open, schedule, NULL);
}

/* The i-th unit to post where all ranks must agree on an order: children before parents, last modules first. */
static zs_record *in_post_order(const zs_schedule *schedule, size_t i)
{
    return schedule->records[schedule->n - 1 - i];
}

/* (in order) Posts the packed rounds whose turn has come. */
static zs_status post_due(zs_schedule *schedule)
{
    while (schedule->next_post < schedule->n) {
        zs_record *next = in_post_order(schedule, schedule->next_post);
        if (next->is.reduces && next->round.syncs && !next->round.packed) return ZS_OK;
        ZS_TRY(zs_rounds_post(schedule, next));
        schedule->next_post++;
    }
    return ZS_OK;
}

/* State of a unit that is resharded in backward. */
static zs_unit_state after(const zs_record *record)
{
    return record->is.reduces && record->round.syncs ? ZS_REDUCING : ZS_SHARDED;
}

/* This rank has packed all that it will of the unit in this backward. */
static zs_status give_out(zs_schedule *schedule, zs_record *record)
{
    ZS_TRY(zs_reshard_to(schedule, record, after(record)));
    zs_rounds_packed(record);
    return ZS_OK;
}

/* (in order) Gives out the units that this backward is through with, where that of the forward `stamp` begins: in
 * one place on all ranks. */
static zs_status retire(zs_schedule *schedule, int64_t stamp)
{
    if (!schedule->in_order) return ZS_OK;
    for (size_t i = 0; i < schedule->n; i++) {
        zs_record *record = in_post_order(schedule, i);
        if (record->pinned) continue; /* its weights may be used in other units' forwards as well */
        if (record->span.retired || !zs_through_with(record, stamp, schedule->entry.now)) continue;
        zs_through_retire(record);
        if (!record->round.posted) ZS_TRY(give_out(schedule, record));
    }
    return post_due(schedule);
}

zs_status zs_schedule_backward(zs_schedule *schedule, zs_record *record, int64_t stamp)
{
    ZS_TRY(zs_schedule_begin_backward(schedule));
    if (record->early.over) return ZS_OK; /* an output that comes late, and that nothing depends on */
    zs_through_fired(record, stamp);
    ZS_TRY(retire(schedule, stamp));
    ZS_TRY(zs_unshard_for(schedule, record, ZS_PHASE_BACKWARD));
    return zs_rounds_prepare(schedule, record, -1);
}

/* All gradients of the unit have come. Where gathers are collectives, the round is not posted here: a rank that uses
 * fewer parameters would post it elsewhere. */
static zs_status complete(zs_schedule *schedule, zs_record *record)
{
    if (!record->is.replicated && schedule->gathers_cost) return ZS_OK;
    /* A mapped full buffer costs nothing: it stays, for weights that are recomputed once more. A cast copy is freed,
     * and so is a unit that is stepped early, on the shard; unless backward may still need frozen parameters in it. */
    bool goes = record->is.replicated || record->early.on;
    if (goes && !record->round.has_frozen) ZS_TRY(zs_reshard_to(schedule, record, after(record)));
    if (!schedule->in_order) return zs_rounds_post(schedule, record);
    zs_rounds_packed(record);
    return post_due(schedule);
}

zs_status zs_schedule_gradient(zs_schedule *schedule, zs_record *record, int64_t i)
{
    bool all = false;
    ZS_TRY(zs_schedule_begin_backward(schedule));
    ZS_TRY(zs_rounds_gradient(schedule, record, i, &all));
    return all ? complete(schedule, record) : ZS_OK;
}

/* --- the end ------------------------------------------------------------------------------------------------------ */

/* Posts the remaining rounds, or reports that this rank will not. */
static zs_status post_rest(zs_schedule *schedule)
{
    if (schedule->gave_up && schedule->in_order)
        return schedule->next_post == schedule->n ? ZS_OK : ZS_ACT(schedule, give_up, schedule);
    for (size_t i = 0; i < schedule->n; i++) {
        zs_record *record = in_post_order(schedule, i);
        if (record->round.packing != NULL || !record->round.posted) ZS_TRY(zs_rounds_post(schedule, record));
    }
    return ZS_OK;
}

/* The rounds that all ranks have posted can be ended in order, though their sums are of no use. */
static void end_rounds(zs_schedule *schedule)
{
    bool before = schedule->gave_up;
    schedule->gave_up = true;
    (void)zs_rounds_end_all(schedule);
    schedule->gave_up = before;
}

/* Posts and sums the remaining rounds, and reshards all. */
static zs_status reduce_rest(zs_schedule *schedule)
{
    zs_status resharded = ZS_OK;
    for (size_t i = 0; i < schedule->n; i++) {
        zs_record *record = schedule->records[i];
        zs_rounds_come_back(record);
        if (record->early.on) ZS_ALSO(resharded, zs_schedule_reshard(schedule, record));
    }
    zs_status status = post_rest(schedule);
    ZS_ALSO(resharded, zs_unshard_end_pass(schedule, ZS_PHASE_BACKWARD));
    ZS_ALSO(resharded, zs_reshard_all(schedule, true));
    ZS_THEN(status, zs_rounds_end_all(schedule));
    ZS_THEN(status, ZS_ACT(schedule, summed, schedule));
    ZS_ALSO(status, resharded);
    return status;
}

/* Delivers all units' gradients, and only then reports users' hooks that failed. */
static zs_status deliver(zs_schedule *schedule)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; i < schedule->n; i++)
        ZS_ALSO(status, zs_rounds_deliver(schedule, schedule->records[i]));
    return status;
}

/* A forward continues, with its parameters, after a backward or a write within it. */
static zs_status resume_forward(zs_schedule *schedule)
{
    schedule->stage = ZS_IN_FORWARD;
    ZS_TRY(zs_session_resume(schedule));
    for (size_t i = 0; i < schedule->n_open; i++)
        if (schedule->open[i] != NULL) ZS_TRY(zs_schedule_unshard(schedule, schedule->open[i]));
    for (size_t i = 0; schedule->n_read > 0 && i < schedule->n; i++)
        if (schedule->records[i]->read.depth > 0) ZS_TRY(zs_schedule_unshard(schedule, schedule->records[i]));
    return ZS_OK;
}

zs_status zs_schedule_pause(zs_schedule *schedule)
{
    if (schedule->n_open == 0 || schedule->stage != ZS_IN_FORWARD) return ZS_OK;
    zs_status status = zs_unshard_end_pass(schedule, ZS_PHASE_FORWARD);
    ZS_ALSO(status, zs_reshard_all(schedule, false));
    ZS_ALSO(status, zs_session_suspend(schedule));
    return status;
}

zs_status zs_schedule_resume(zs_schedule *schedule)
{
    bool paused = schedule->suspended && schedule->n_open > 0 && schedule->stage == ZS_IN_FORWARD;
    return paused ? resume_forward(schedule) : ZS_OK;
}

zs_status zs_schedule_end(zs_schedule *schedule)
{
    zs_status status = reduce_rest(schedule), delivered = ZS_OK;
    schedule->stage = ZS_IDLE;
    if (status == ZS_ERR_DIVERGED) end_rounds(schedule);
    if (status == ZS_OK)
        delivered = deliver(schedule);
    else
        zs_rounds_forget_all(schedule); /* the peers learn of it by their own waits */
    for (size_t i = 0; i < schedule->n; i++)
        zs_through_end(schedule->records[i]);
    ZS_ALSO(status, ZS_ACT(schedule, close, schedule, ZS_PHASE_BACKWARD));
    ZS_THEN(status, zs_rounds_settle(schedule));
    status = schedule->act->end != NULL ? schedule->act->end(schedule, status, delivered) : status;
    for (size_t i = 0; i < schedule->n; i++)
        zs_rounds_over(schedule->records[i]);
    return status == ZS_OK && schedule->n_open > 0 ? resume_forward(schedule) : status;
}

bool zs_schedule_all_arrived(const zs_schedule *schedule)
{
    bool any = false;
    for (size_t i = 0; i < schedule->n; i++) {
        const zs_record *record = schedule->records[i];
        const zs_round *round = &record->round;
        if (!record->is.reduces) continue;
        bool packed = round->packing != NULL && round->n_arrived == round->n_expected;
        if (!round->syncs || !(packed || (round->posted && round->packing == NULL))) return false;
        any = true;
    }
    return any;
}

void zs_schedule_fail(zs_schedule *schedule)
{
    bool before = schedule->gave_up;
    schedule->stage = ZS_FAILED;
    schedule->gave_up = true;
    zs_rounds_share_now(schedule); /* a peer with another order of rounds waits for these sums, then fails as well */
    schedule->gave_up = before;
    (void)zs_reshard_all(schedule, true);
    (void)zs_unshard_end_pass(schedule, ZS_PHASE_BACKWARD);
    for (size_t i = 0; i < schedule->n; i++) {
        zs_rounds_drop(schedule, schedule->records[i]);
        zs_through_end(schedule->records[i]);
    }
}

zs_status zs_schedule_settle(zs_schedule *schedule)
{
    if (schedule->stage != ZS_FAILED) return ZS_OK;
    schedule->gave_up = true;
    zs_status status = zs_schedule_end(schedule);
    schedule->gave_up = false;
    return status;
}
