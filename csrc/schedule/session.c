/* session.c - a session of forwards, and what interrupts one: a backward or a write within it. See inner.h. */
#include "schedule/inner.h"

zs_status zs_session_suspend(zs_schedule *schedule)
{
    if (schedule->n_open == 0 || schedule->suspended) return ZS_OK;
    schedule->suspended = true;
    return ZS_ACT(schedule, close, schedule, ZS_PHASE_FORWARD);
}

zs_status zs_session_resume(zs_schedule *schedule)
{
    zs_entry entry = schedule->entry;
    entry.resumed = true;
    schedule->suspended = false;
    return ZS_ACT(schedule, open, schedule, &entry);
}

zs_status zs_session_close(zs_schedule *schedule)
{
    bool closed = schedule->suspended;
    schedule->suspended = false;
    return closed ? ZS_OK : ZS_ACT(schedule, close, schedule, ZS_PHASE_FORWARD);
}
