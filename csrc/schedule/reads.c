/* reads.c - units whose parameters an operation in another unit's forward reads: a head that is the embedding's weight,
 * a penalty over some blocks' weights. See schedule.h.
 *
 * A read gathers like a call, in the order of the code, and lasts until its reader's forward ends. If nothing but
 * the parameters refers to the full buffer, the read ends when the next unit is read, so a loop over weights holds one
 * unit at a time. A unit that was needed to the end stays unsharded between its own forward and the read in the next
 * pass.
 */
#include "schedule/inner.h"

static zs_status give_back(zs_schedule *schedule, zs_record *record, bool stays)
{
    record->read.depth = 0;
    record->read.used = false;
    schedule->n_read--;
    if (schedule->act->read_over != NULL) schedule->act->read_over(record);
    if (schedule->entry.recording) zs_through_expect(record);
    return record->inside > 0 || stays ? ZS_OK : zs_schedule_reshard(schedule, record);
}

static void note_reader(zs_schedule *schedule, zs_record *record, zs_record *reader)
{
    if (record->read.reader == reader) return;
    record->read.reader = reader;
    if (schedule->act->reads_changed != NULL) schedule->act->reads_changed(schedule);
}

static bool is_held(const zs_schedule *schedule, const zs_record *record)
{
    if (record->inside > 0 || record->pinned || record->is.stays || record->is.kept) return true;
    return schedule->act->held == NULL || schedule->act->held(record);
}

/* Reshards units that were read and whose full buffers are not in use; not those that the same operation reads as
 * `next`. */
static zs_status give_back_unheld(zs_schedule *schedule, const zs_record *next)
{
    for (size_t i = 0; schedule->n_read > 0 && i < schedule->n; i++) {
        zs_record *record = schedule->records[i];
        if (record->read.depth == 0 || record->read.operation == next->read.operation) continue;
        if (is_held(schedule, record)) continue;
        if (record->read.used) note_reader(schedule, record, NULL);
        ZS_TRY(give_back(schedule, record, false));
    }
    return ZS_OK;
}

static void begin_read(zs_schedule *schedule, zs_record *record, size_t depth)
{
    if (record->read.depth == 0) schedule->n_read++;
    if (record->read.depth == 0 || depth < record->read.depth) record->read.depth = depth;
}

void zs_record_set_operation(zs_record *record, uint64_t operation)
{
    record->read.operation = operation;
}

zs_status zs_schedule_read(zs_schedule *schedule, zs_record *record, int64_t now)
{
    ZS_TRY(zs_schedule_resume(schedule));
    if (record->state != ZS_FULL) zs_through_begin(record, now);
    ZS_TRY(give_back_unheld(schedule, record));
    ZS_TRY(zs_unshard_for(schedule, record, ZS_PHASE_FORWARD));
    begin_read(schedule, record, schedule->n_open);
    record->read.used = true;
    record->read.by = schedule->n_open > 0 ? schedule->open[schedule->n_open - 1] : NULL;
    return ZS_OK;
}

zs_status zs_schedule_unread(zs_schedule *schedule, zs_record *record)
{
    ZS_TRY(zs_schedule_cancel(schedule, record)); /* a gather begun ahead would bring the old values */
    if (record->read.depth == 0 || record->inside > 0 || record->pinned) return ZS_OK;
    return give_back(schedule, record, false);
}

zs_status zs_reads_end(zs_schedule *schedule, zs_record *reader)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; schedule->n_read > 0 && i < schedule->n; i++) {
        zs_record *record = schedule->records[i];
        if (record->read.depth != schedule->n_open) continue;
        note_reader(schedule, record, record->read.used ? reader : NULL);
        bool stays = zs_unshard_stays(schedule, record, schedule->entry.recording);
        ZS_ALSO(status, give_back(schedule, record, stays));
    }
    return status;
}

/* Number of forwards that were open when that of `record` began, itself included; 0: it does not run. */
static size_t depth_of(const zs_schedule *schedule, const zs_record *record)
{
    for (size_t i = schedule->n_open; i-- > 0;)
        if (schedule->open[i] == record) return i + 1;
    return 0;
}

bool zs_reads_keep(zs_schedule *schedule, zs_record *record)
{
    if (record->read.depth > 0) return true;
    size_t depth = record->read.reader != NULL ? depth_of(schedule, record->read.reader) : 0;
    if (depth == 0 || depth == schedule->n_open) return false;
    begin_read(schedule, record, depth);
    return true;
}

void zs_reads_forget(zs_schedule *schedule, zs_record *record)
{
    if (record->read.depth > 0) schedule->n_read--;
    record->read = (zs_read){0};
    for (size_t i = 0; i < schedule->n; i++) {
        zs_read *read = &schedule->records[i]->read;
        if (read->reader == record) read->reader = NULL;
        if (read->by == record) read->by = NULL;
    }
}
