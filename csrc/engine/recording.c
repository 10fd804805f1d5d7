/* recording.c - see recording.h. */
#include "engine/recording.h"

#include "engine/engine_inside.h"
#include "engine/engine_list.h"

static zs_status begin(zs_engine *engine, const zs_graph_range *range)
{
    bool is_new = zs_graph_ranges_empty(&engine->ranges);
    ZS_TRY(zs_graph_ranges_open(&engine->ranges, zs_node_thread(), zs_next_node(), range));
    if (is_new) zs_engine_list_add(engine);
    return ZS_OK;
}

zs_status zs_recording_forward(zs_unit *unit)
{
    zs_graph_range range = {.unit = unit, .stamp = ZS_MADE_IN_FORWARD, .exact = unit->exact};
    return begin(zs_engine_of(unit), &range);
}

bool zs_recording_forward_end(zs_unit *unit)
{
    return zs_graph_ranges_close(&zs_engine_of(unit)->ranges, zs_node_thread(), zs_next_node(), unit);
}

zs_status zs_recording_backward(zs_unit *unit, bool exact, int64_t stamp)
{
    zs_engine *engine = zs_engine_of(unit);
    zs_graph_range range = {.unit = unit, .stamp = stamp, .exact = exact};
    zs_graph_ranges_close_backwards(&engine->ranges, zs_node_thread(), zs_next_node(), stamp);
    return begin(engine, &range);
}

void zs_recording_backward_end(zs_engine *engine)
{
    zs_graph_ranges_close_backwards(&engine->ranges, zs_node_thread(), zs_next_node(), -1);
}

void zs_recording_unwind(zs_engine *engine)
{
    zs_graph_ranges_close_all(&engine->ranges, zs_node_thread(), zs_next_node());
}
