/* recording.c - see recording.h. */
#include "engine/recording.h"

#include "engine/engine_inside.h"

static zs_status begin(zs_engine *engine, int64_t now, const zs_graph_range *range)
{
    bool is_new = zs_graph_ranges_empty(&engine->ranges);
    ZS_TRY(zs_graph_ranges_open(&engine->ranges, zs_node_thread(), now, range));
    if (is_new) zs_engine_list_add(engine);
    return ZS_OK;
}

zs_status zs_recording_forward(zs_unit *unit)
{
    zs_graph_range range = {.unit = unit, .stamp = ZS_MADE_IN_FORWARD};
    return begin(zs_engine_of(unit), zs_next_node(), &range);
}

bool zs_recording_forward_end(zs_unit *unit)
{
    return zs_graph_ranges_close(&zs_engine_of(unit)->ranges, zs_node_thread(), zs_next_node(), unit);
}

const zs_graph_range *zs_recording_runs(const zs_engine *engine)
{
    return zs_graph_ranges_inner(&engine->ranges, zs_node_thread(), NULL);
}

bool zs_engine_in_forward(const zs_engine *engine)
{
    bool runs = zs_recording_runs(engine) != NULL || zs_backward_runs(&engine->context.schedule);
    return runs && !zs_engine_is_written(engine);
}

bool zs_recording_counts(const zs_unit *unit)
{
    return zs_graph_ranges_inner(&zs_engine_of(unit)->ranges, zs_node_thread(), unit) != NULL;
}

/* Was the last node made by the innermost forward itself, and not in one within it that is over? */
static bool made_by_reader(zs_engine *engine, int64_t number)
{
    int64_t place = zs_graph_ranges_find(&engine->ranges, zs_node_thread(), number);
    return place >= 0 && zs_graph_ranges_at(&engine->ranges, place) == zs_recording_runs(engine);
}

/* A custom Function has its node before its own forward runs, in which autograd does not record. */
zs_status zs_recording_read(zs_unit *unit)
{
    zs_engine *engine = zs_engine_of(unit);
    zs_graph_range range = {.unit = unit, .stamp = ZS_MADE_IN_FORWARD};
    int64_t now = zs_next_node();
    return begin(engine, !zs_grad_mode() && made_by_reader(engine, now - 1) ? now - 1 : now, &range);
}

zs_status zs_recording_by_hand(zs_unit *unit)
{
    zs_graph_range range = {.unit = unit, .stamp = ZS_MADE_IN_FORWARD, .by_hand = true};
    return begin(zs_engine_of(unit), zs_next_node(), &range);
}

void zs_recording_read_end(zs_record *record)
{
    zs_unit *unit = zs_unit_of(record);
    zs_graph_ranges_close_one(&zs_engine_of(unit)->ranges, zs_node_thread(), zs_next_node(), unit);
}

zs_status zs_recording_backward(zs_unit *unit, int64_t stamp)
{
    zs_engine *engine = zs_engine_of(unit);
    zs_graph_range range = {.unit = unit, .stamp = stamp};
    zs_graph_ranges_close_backwards(&engine->ranges, zs_node_thread(), zs_next_node(), stamp);
    return begin(engine, zs_next_node(), &range);
}

void zs_recording_backward_end(zs_engine *engine)
{
    zs_graph_ranges_close_backwards(&engine->ranges, zs_node_thread(), zs_next_node(), -1);
}

static bool is_pinned(const zs_graph_range *range)
{
    return range->by_hand && range->unit != NULL && range->unit->record.pinned;
}

void zs_recording_unwind(zs_engine *engine)
{
    zs_graph_ranges_close_all(&engine->ranges, zs_node_thread(), zs_next_node(), is_pinned);
}
