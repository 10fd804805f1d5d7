/* through.c - see through.h. */
#include "unit/through.h"

/* A stamp: when the forward began, and above that how many nodes later it ended. */
enum { LENGTH_BITS = 20 };

static const int64_t longest = (INT64_C(1) << LENGTH_BITS) - 1;

static int64_t begin_of(int64_t stamp)
{
    return stamp >> LENGTH_BITS;
}

/* The end of a forward that is too long to tell is never reached. */
static int64_t end_of(int64_t stamp)
{
    int64_t length = stamp & longest;
    return length < longest ? begin_of(stamp) + length : INT64_MAX;
}

void zs_through_begin(zs_unit *unit)
{
    if (unit->inside == 0) unit->begun = zs_next_node();
}

int64_t zs_through_stamp(const zs_unit *unit)
{
    int64_t length = zs_next_node() - unit->begun;
    return unit->begun << LENGTH_BITS | (length >= 0 && length < longest ? length : longest);
}

void zs_through_expect(zs_unit *unit)
{
    if (unit->past || unit->begun < unit->oldest) unit->oldest = unit->begun;
    unit->past = false;
}

void zs_through_fired(zs_unit *unit, int64_t stamp)
{
    int64_t begun = begin_of(stamp);
    if (unit->past || begun < unit->oldest) unit->oldest = begun;
    unit->past = unit->retired = false;
}

bool zs_through_with(const zs_unit *unit, int64_t stamp, int64_t session)
{
    if (unit->past && unit->oldest < session && unit->begun < session) return true;
    return unit->oldest >= end_of(stamp);
}

void zs_through_end(zs_unit *unit)
{
    unit->past = true;
    unit->retired = false;
}
