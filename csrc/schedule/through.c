/* through.c - finds the units that a running backward is through with. See inner.h. */
#include "schedule/inner.h"

/* A stamp: when the forward began, and above that how many nodes later it ended. */
enum { LENGTH_BITS = 20 };

static const int64_t longest = (INT64_C(1) << LENGTH_BITS) - 1;

static int64_t begin_of(int64_t stamp)
{
    return stamp >> LENGTH_BITS;
}

/* The end of a forward that is still running. */
static int64_t end_of(int64_t stamp)
{
    int64_t length = stamp & longest;
    return length < longest ? begin_of(stamp) + length : INT64_MAX;
}

void zs_through_begin(zs_record *record, int64_t now)
{
    if (record->inside == 0) record->span.begun = now;
}

int64_t zs_schedule_stamp(int64_t begun, int64_t ended)
{
    int64_t length = ended - begun;
    return begun << LENGTH_BITS | (length >= 0 && length < longest ? length : longest);
}

bool zs_schedule_stamp_is_within(int64_t inner, int64_t outer)
{
    return begin_of(outer) <= begin_of(inner) && end_of(inner) <= end_of(outer);
}

void zs_through_expect(zs_record *record)
{
    zs_span *span = &record->span;
    if (span->past || span->begun < span->oldest) span->oldest = span->begun;
    span->past = false;
}

void zs_through_fired(zs_record *record, int64_t stamp)
{
    zs_span *span = &record->span;
    int64_t begun = begin_of(stamp);
    if (span->past || begun < span->oldest) span->oldest = begun;
    span->past = span->retired = false;
}

bool zs_through_with(const zs_record *record, int64_t stamp, int64_t session)
{
    const zs_span *span = &record->span;
    if (span->past && span->oldest < session && span->begun < session) return true;
    return span->oldest >= end_of(stamp);
}

void zs_through_retire(zs_record *record)
{
    record->span.retired = true;
}

void zs_through_end(zs_record *record)
{
    record->span.past = true;
    record->span.retired = false;
}
