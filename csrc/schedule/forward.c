/* forward.c - the forward pass: sessions, and open forwards in them; and the list of a model's units. See schedule.h.
 *
 * A session opens when the outermost unit's module is called and closes when it returns. Forwards that an exception
 * leaves open are closed by the enclosing one.
 */
#include "schedule/inner.h"

#include <stdlib.h>
#include <string.h>

/* --- units -------------------------------------------------------------------------------------------------------- */

void zs_schedule_init(zs_schedule *schedule, const zs_actions *act)
{
    *schedule = (zs_schedule){.act = act, .ahead = {1, 1}};
}

void zs_schedule_set_transports(zs_schedule *schedule, bool gathers_cost, bool in_order, bool alone)
{
    schedule->gathers_cost = gathers_cost;
    schedule->in_order = in_order;
    schedule->alone = alone;
}

void zs_schedule_free(zs_schedule *schedule)
{
    free(schedule->records);
    free(schedule->open);
    free(schedule->leases);
}

void zs_record_init(zs_record *record, zs_traits traits)
{
    zs_unit_state state = traits.fixed ? ZS_FULL : ZS_SHARDED;
    *record = (zs_record){.is = traits, .state = state, .sync = true, .round = {.syncs = true}};
    zs_through_end(record);
}

void zs_record_free(zs_record *record)
{
    free(record->by_hand[0].records);
    free(record->by_hand[1].records);
}

void zs_schedule_set_ahead(zs_schedule *schedule, const int ahead[2])
{
    schedule->ahead[0] = ahead[0];
    schedule->ahead[1] = ahead[1];
}

void zs_record_set_reduces(zs_record *record, bool reduces, size_t bucket_bytes)
{
    record->is.reduces = reduces;
    record->is.bucket_bytes = bucket_bytes;
}

void zs_record_set_stays(zs_record *record, bool stays)
{
    record->is.stays = stays;
}

void zs_record_set_kept(zs_record *record, bool kept)
{
    record->is.kept = kept;
}

void zs_record_set_sync(zs_record *record, bool sync)
{
    record->sync = sync;
    record->was_unsynced |= !sync;
}

zs_status zs_schedule_add(zs_schedule *schedule, zs_record *record)
{
    zs_record **grown = realloc(schedule->records, (schedule->n + 1) * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit %zu", schedule->n);
    schedule->records = grown;
    grown[schedule->n++] = record;
    return ZS_OK;
}

static void forget_open(zs_schedule *schedule, const zs_record *record)
{
    for (size_t i = 0; i < schedule->n_open; i++)
        if (schedule->open[i] == record) schedule->open[i] = NULL;
}

void zs_schedule_forget(zs_schedule *schedule, zs_record *record)
{
    size_t kept = 0;
    for (size_t i = 0; i < schedule->n; i++)
        if (schedule->records[i] != record) schedule->records[kept++] = schedule->records[i];
    schedule->n = kept;
    zs_rounds_forget(schedule, record);
    zs_unshard_forget(schedule, record);
    zs_reads_forget(schedule, record);
    forget_open(schedule, record);
}

void zs_schedule_set_order(zs_schedule *schedule, zs_record *const *records)
{
    if (schedule->n > 0) memcpy(schedule->records, records, schedule->n * sizeof *records);
}

/* --- sessions ----------------------------------------------------------------------------------------------------- */

static zs_status begin_session(zs_schedule *schedule, const zs_entry *entry)
{
    ZS_TRY(zs_schedule_settle(schedule));
    ZS_TRY(ZS_ACT(schedule, ready, schedule, ZS_PHASE_FORWARD));
    schedule->stage = ZS_IN_FORWARD;
    schedule->entry = *entry;
    zs_unshard_begin_pass(schedule);
    ZS_TRY(zs_reshard_all(schedule, false)); /* left by a forward whose backward never came */
    return ZS_ACT(schedule, open, schedule, entry);
}

static zs_status end_session(zs_schedule *schedule)
{
    if (schedule->stage == ZS_IN_FORWARD) schedule->stage = ZS_IDLE;
    zs_status status = zs_unshard_end_pass(schedule, ZS_PHASE_FORWARD);
    ZS_ALSO(status, zs_session_close(schedule));
    return status;
}

static zs_status make_room(zs_schedule *schedule)
{
    if (schedule->n_open < schedule->open_room) return ZS_OK;
    size_t room = 2 * schedule->open_room + 8;
    zs_record **grown = realloc(schedule->open, room * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory beginning a forward");
    schedule->open = grown;
    schedule->open_room = room;
    return ZS_OK;
}

/* Index of the innermost open forward of `record`; n_open: none. */
static size_t find_open(const zs_schedule *schedule, const zs_record *record)
{
    for (size_t i = schedule->n_open; i-- > 0;)
        if (schedule->open[i] == record) return i;
    return schedule->n_open;
}

/* --- forwards ----------------------------------------------------------------------------------------------------- */

zs_status zs_schedule_enter(zs_schedule *schedule, zs_record *record, const zs_entry *entry)
{
    if (record != NULL) zs_through_begin(record, entry->now);
    ZS_TRY(make_room(schedule));
    zs_status status = schedule->n_open == 0 ? begin_session(schedule, entry) : zs_schedule_resume(schedule);
    if (status != ZS_OK) {
        (void)end_session(schedule); /* the first failure is the one that is reported */
        return status;
    }
    schedule->open[schedule->n_open++] = record;
    if (record == NULL) return ZS_OK;
    if (record->inside++ == 0 && schedule->entry.recording) zs_rounds_called(record);
    if (schedule->n_open == 1) schedule->outermost_gathers = !record->is.empty;
    return zs_unshard_for(schedule, record, ZS_PHASE_FORWARD);
}

zs_status zs_schedule_recompute(zs_schedule *schedule, zs_record *record, int64_t now)
{
    if (now >= 0) zs_through_begin(record, now);
    return zs_unshard_for(schedule, record, ZS_PHASE_BACKWARD);
}

/* Ends the forward that was entered last. */
static zs_status leave_last(zs_schedule *schedule, bool keep)
{
    zs_record *record = schedule->open[schedule->n_open - 1];
    zs_status status = zs_reads_end(schedule, record);
    if (record != NULL && --record->inside == 0 && !zs_reads_keep(schedule, record) &&
        !zs_unshard_stays(schedule, record, keep))
        ZS_ALSO(status, zs_schedule_reshard(schedule, record));
    if (--schedule->n_open == 0) ZS_ALSO(status, end_session(schedule));
    return status;
}

zs_status zs_schedule_unwind(zs_schedule *schedule, size_t n_open)
{
    zs_status status = ZS_OK;
    while (schedule->n_open > n_open)
        ZS_ALSO(status, leave_last(schedule, false));
    return status;
}

zs_status zs_schedule_leave(zs_schedule *schedule, zs_record *record, bool keep)
{
    if (keep) zs_through_expect(record);
    if (record->inside == 0) return ZS_OK; /* recomputed in backward: stays unsharded until its gradients are there */
    size_t at = find_open(schedule, record);
    if (at == schedule->n_open) /* it was entered with another model's schedule */
        return --record->inside == 0 && !record->pinned ? zs_schedule_reshard(schedule, record) : ZS_OK;
    zs_status status = zs_schedule_unwind(schedule, at + 1); /* inner forwards that were left without an event */
    ZS_ALSO(status, leave_last(schedule, keep));
    return status;
}

zs_status zs_schedule_leave_by_hand(zs_schedule *schedule)
{
    size_t at = find_open(schedule, NULL);
    return at < schedule->n_open ? zs_schedule_unwind(schedule, at) : ZS_OK;
}
