/* position.c - the progress of this process, for messages. See engine.h. */
#include "engine/engine.h"

#include "engine/engine_inside.h"

#include <stdio.h>
#include <stdlib.h>

/* Over shm only states show it: of the units that are unsharded, the innermost comes last, and backward reshards from
 * the end. */
static const zs_record *find_latest(const zs_schedule *schedule)
{
    const zs_record *latest = schedule->latest;
    for (size_t i = 0; i < schedule->n && !schedule->gathers_cost; i++)
        if (schedule->records[i]->state == ZS_FULL) latest = schedule->records[i];
    return latest;
}

static void describe(const zs_engine *engine, zs_position *out)
{
    static const char *const passes[] = {"", "forward", "backward", ""}; /* by zs_stage */
    const zs_schedule *schedule = &engine->context.schedule;
    const zs_record *latest = find_latest(schedule);
    out->pass = passes[schedule->stage];
    out->steps = engine->history.agreed.steps + engine->history.steps;
    out->unit[0] = 0;
    if (latest != NULL)
        snprintf(out->unit, sizeof out->unit, "%s", zs_unit_label(zs_unit_of((zs_record *)(uintptr_t)latest)->name));
}

void zs_position_find(zs_position *out)
{
    zs_engine **engines;
    size_t n;
    *out = (zs_position){.pass = ""};
    bool failed = zs_last_status() != ZS_OK; /* the caller, which asks for its message */
    if (zs_engine_list_take(&engines, &n) != ZS_OK) {
        if (!failed) zs_clear_error();
        return;
    }
    const zs_engine *chosen = n > 0 ? engines[0] : NULL;
    for (size_t i = 0; i < n; i++)
        if (engines[i]->context.schedule.stage != ZS_IDLE) chosen = engines[i];
    if (chosen != NULL) describe(chosen, out);
    for (size_t i = 0; i < n; i++)
        zs_engine_release(engines[i]);
    free(engines);
}
