/* pace.c - a backward's ranges in a trace, and the counts between optimizer steps. See engine_inside.h. */

#include "base/clock.h"
#include "engine/engine_inside.h"

static void end(zs_profile **range)
{
    zs_profile_end(*range);
    *range = NULL;
}

void zs_pace_backward(zs_unit *unit)
{
    zs_engine *engine = zs_engine_of(unit);
    end(&engine->unit_backward);
    if (engine->backward == NULL) engine->backward = zs_profile_begin_loose("zshard::backward");
    engine->unit_backward = zs_profile_begin_loose("zshard::backward (%s)", *unit->name ? unit->name : "root");
    engine->in_backward = unit;
}

void zs_pace_posted(const zs_unit *unit)
{
    zs_engine *engine = zs_engine_of(unit);
    if (engine->in_backward == unit) end(&engine->unit_backward);
}

void zs_pace_backward_end(zs_engine *engine)
{
    end(&engine->unit_backward);
    end(&engine->backward);
}

static void note_step(zs_pace *pace)
{
    if (!pace->due) return;
    zs_counts now = {zs_clock_ns(), zs_profile_all_waits(), zs_traffic_so_far()};
    *pace = (zs_pace){.last = now, .before = pace->last};
}

void zs_pace_reduced(zs_engine *engine, bool stepped)
{
    engine->pace.due = true;
    if (stepped) note_step(&engine->pace);
}

void zs_pace_step(zs_engine *engine)
{
    zs_profile_drop(engine->step); /* it raised */
    engine->step = zs_profile_begin_loose("zshard::optimizer.step");
    note_step(&engine->pace);
    zs_engine_trace_memory(engine);
}

void zs_pace_stepped(zs_engine *engine)
{
    end(&engine->step);
}

bool zs_engine_pace(const zs_engine *engine, zs_counts *between)
{
    const zs_counts *last = &engine->pace.last, *before = &engine->pace.before;
    between->time = last->time - before->time;
    between->waited = last->waited - before->waited;
    between->traffic = zs_traffic_between(&last->traffic, &before->traffic);
    return before->time != 0;
}
