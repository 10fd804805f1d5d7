/* unshard.c - gathering and resharding of units: their states, and prefetch.
 *
 * If a gather costs time, zshard expects each pass to gather units in the order of the last. Each unit remembers which
 * unit was gathered after it, in forward and in backward; when the unit is needed, the gather of the next one starts
 * too. A pass may come to a unit more than once, as to a root with own parameters before and after its blocks; so the
 * next unit depends on the previous one. A wrong guess costs a gather, never a number: the end of the pass drops it.
 * All ranks guess the same, as they saw the same order. See schedule.h.
 */
#include "schedule/inner.h"

#include <stdlib.h>
#include <string.h>

enum { OWN_AHEAD = 8 }; /* between two hosts a step took 2 to 4 % less with 8 than with 2 */

/* --- states ------------------------------------------------------------------------------------------------------- */

static zs_status gather(zs_schedule *schedule, zs_record *record)
{
    if (record->is.fixed || (record->state != ZS_SHARDED && record->state != ZS_REDUCING)) return ZS_OK;
    record->state = ZS_GATHERING;
    zs_status status = schedule->act->gather(record);
    if (status != ZS_OK) record->state = ZS_SHARDED;
    return status;
}

zs_status zs_schedule_cancel(zs_schedule *schedule, zs_record *record)
{
    if (record->state != ZS_GATHERING) return ZS_OK;
    record->state = ZS_SHARDED;
    return schedule->act->cancel(record);
}

zs_status zs_schedule_unshard(zs_schedule *schedule, zs_record *record)
{
    if (zs_record_is_full(record)) return ZS_OK;
    ZS_TRY(gather(schedule, record));
    zs_status status = schedule->act->bind(record);
    record->state = status == ZS_OK ? ZS_FULL : ZS_SHARDED;
    return status;
}

void zs_schedule_pin(zs_record *record)
{
    record->pinned = true;
}

zs_status zs_reshard_to(zs_schedule *schedule, zs_record *record, zs_unit_state next)
{
    if (record->is.fixed) {
        if (next == ZS_REDUCING) record->state = next;
        return ZS_OK;
    }
    if (record->state != ZS_FULL) return ZS_OK;
    zs_status status = schedule->act->reshard(record);
    record->pinned = false;
    record->state = next;
    return status;
}

zs_status zs_schedule_reshard(zs_schedule *schedule, zs_record *record)
{
    return zs_reshard_to(schedule, record, ZS_SHARDED);
}

zs_status zs_reshard_all(zs_schedule *schedule, bool pinned)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; i < schedule->n; i++) {
        zs_record *record = schedule->records[i];
        if (pinned || !record->pinned) ZS_ALSO(status, zs_reshard_to(schedule, record, ZS_SHARDED));
    }
    return status;
}

void zs_unshard_reduced(zs_record *record)
{
    if (record->state == ZS_REDUCING) record->state = record->is.fixed ? ZS_FULL : ZS_SHARDED;
}

/* --- ahead -------------------------------------------------------------------------------------------------------- */

/* Has the unit memory from its forward to its backward anyway? Then a gather before its forward takes none. */
static bool has_room(const zs_record *record, zs_phase phase)
{
    return phase == ZS_PHASE_FORWARD && (record->is.stays || record->is.kept);
}

/* Gathers that may still begin before they are wanted. */
typedef struct gathers_left {
    int own, any; /* of units with their own room; of all others */
} gathers_left;

/* While `wanted` is gathered, or has been. */
static gathers_left may_begin(const zs_schedule *schedule, const zs_record *wanted, zs_phase phase)
{
    gathers_left left = {OWN_AHEAD, schedule->ahead[phase]};
    for (size_t i = 0; i < schedule->n; i++) {
        const zs_record *record = schedule->records[i];
        if (record->state != ZS_GATHERING || record == wanted) continue;
        if (has_room(record, phase))
            left.own--;
        else
            left.any--;
    }
    return left;
}

/* Puts `stop` first, in place of that from the same unit, or of the oldest. */
static void set_stop(zs_stops *stops, zs_stop stop)
{
    size_t at = 0;
    while (at < stops->n && stops->list[at].before != stop.before)
        at++;
    if (at == ZS_STOPS)
        at--;
    else if (at == stops->n)
        stops->n++;
    memmove(stops->list + 1, stops->list, at * sizeof *stops->list);
    stops->list[0] = stop;
}

static void remember(zs_schedule *schedule, zs_record *record, zs_phase phase)
{
    if (record->is.fixed || record->is.empty) return;
    zs_record *latest = schedule->latest;
    if (latest == record) return;
    if (latest != NULL) set_stop(&latest->stops[phase], (zs_stop){schedule->before, record});
    schedule->before = latest;
    schedule->latest = record;
}

/* The unit that probably comes after `record`, to which the pass came from `before`; NULL: none. */
static zs_record *expected(const zs_record *before, const zs_record *record, zs_phase phase)
{
    const zs_stops *stops = &record->stops[phase];
    for (size_t i = 0; i < stops->n; i++)
        if (stops->list[i].before == before) return stops->list[i].next;
    return stops->n > 0 ? stops->list[0].next : NULL;
}

static zs_status gather_listed(zs_schedule *schedule, const zs_follow *list)
{
    for (size_t i = 0; i < list->n; i++)
        if (list->records[i]->state == ZS_SHARDED) ZS_TRY(gather(schedule, list->records[i]));
    return ZS_OK;
}

static zs_status gather_next(zs_schedule *schedule, const zs_record *record, zs_phase phase)
{
    if (record->by_hand[phase].n > 0) return gather_listed(schedule, &record->by_hand[phase]);
    if (schedule->ahead[phase] == 0) return ZS_OK;
    gathers_left left = may_begin(schedule, record, phase);
    const zs_record *before = record == schedule->latest ? schedule->before : NULL;
    for (int i = 0;; i++) {
        zs_record *next = expected(before, record, phase);
        if (next == NULL) break;
        bool own = has_room(next, phase);
        int *still = own ? &left.own : &left.any;
        if (*still <= 0 || i >= (own ? OWN_AHEAD : schedule->ahead[phase])) break;
        before = record;
        record = next;
        if (next->state != ZS_SHARDED) continue;
        ZS_TRY(gather(schedule, next));
        (*still)--;
    }
    return ZS_OK;
}

zs_status zs_unshard_for(zs_schedule *schedule, zs_record *record, zs_phase phase)
{
    if (!schedule->gathers_cost) return zs_schedule_unshard(schedule, record);
    ZS_TRY(gather(schedule, record));
    remember(schedule, record, phase);
    ZS_TRY(gather_next(schedule, record, phase)); /* transfers continue while the script waits for this one */
    return zs_schedule_unshard(schedule, record);
}

void zs_unshard_begin_pass(zs_schedule *schedule)
{
    schedule->latest = schedule->before = NULL;
}

zs_status zs_unshard_end_pass(zs_schedule *schedule, zs_phase phase)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; i < schedule->n; i++)
        ZS_ALSO(status, zs_schedule_cancel(schedule, schedule->records[i]));
    if (schedule->latest == NULL) return status;
    set_stop(&schedule->latest->stops[phase], (zs_stop){schedule->before, NULL});
    if (phase == ZS_PHASE_FORWARD) schedule->last = schedule->latest;
    return status;
}

/* Was this the last unit of the last forward, and is it probably again? Then its backward comes next. */
static bool is_last(const zs_schedule *schedule, const zs_record *record)
{
    return schedule->last == record && schedule->latest == record;
}

/* Mapped full buffers cost nothing to map again. Where a gather costs time, backward needs the outermost unit again
 * first, or if that has no parameters, the last unit within it. */
bool zs_unshard_stays(const zs_schedule *schedule, const zs_record *record, bool keep)
{
    if (record->pinned) return true;
    if (!keep) return false;
    if (record->is.stays || record->is.kept) return true;
    if (!schedule->gathers_cost) return false;
    return schedule->n_open == 1 || (!schedule->outermost_gathers && is_last(schedule, record));
}

zs_status zs_schedule_follow(zs_record *record, zs_phase phase, zs_record *const *records, size_t n)
{
    zs_follow *list = &record->by_hand[phase];
    zs_record **copy = NULL;
    if (n > 0) {
        copy = malloc(n * sizeof *copy);
        if (copy == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the list of units to prefetch");
        memcpy(copy, records, n * sizeof *copy);
    }
    free(list->records);
    *list = (zs_follow){copy, n};
    return ZS_OK;
}

static void forget_stops(zs_stops *stops, const zs_record *record)
{
    size_t kept = 0;
    for (size_t i = 0; i < stops->n; i++)
        if (stops->list[i].before != record && stops->list[i].next != record) stops->list[kept++] = stops->list[i];
    stops->n = kept;
}

static void forget_in(zs_follow *list, const zs_record *record)
{
    size_t kept = 0;
    for (size_t i = 0; i < list->n; i++)
        if (list->records[i] != record) list->records[kept++] = list->records[i];
    list->n = kept;
}

void zs_schedule_forget_order(zs_schedule *schedule)
{
    schedule->latest = schedule->before = schedule->last = NULL;
    for (size_t i = 0; i < schedule->n; i++)
        for (int phase = 0; phase < 2; phase++)
            schedule->records[i]->stops[phase].n = 0;
}

void zs_unshard_forget(zs_schedule *schedule, const zs_record *record)
{
    if (schedule->latest == record) schedule->latest = NULL;
    if (schedule->before == record) schedule->before = NULL;
    if (schedule->last == record) schedule->last = NULL;
    for (size_t i = 0; i < schedule->n; i++) {
        zs_record *other = schedule->records[i];
        for (int phase = 0; phase < 2; phase++) {
            forget_stops(&other->stops[phase], record);
            forget_in(&other->by_hand[phase], record);
        }
    }
}
