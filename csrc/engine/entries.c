/* entries.c - finds the nodes at which a backward enters the forwards of units.
 *
 * Before a backward, zshard searches its graph for edges that lead into a forward's nodes (graph_ranges.h). The node
 * behind such an edge gets a hook that unshards the unit. So it does not matter how a result left the forward. See
 * engine.h. */
#include "engine/engine.h"

#include "engine/engine_inside.h"

#include <stdlib.h>

/* An edge that leads into ranges. */
typedef struct zs_entrance {
    zs_engine *engine;
    const zs_node_at *from, *to; /* `from` is NULL for a root */
    zs_node *node;
} zs_entrance;

static bool comes_from(const zs_entrance *entrance, const zs_graph_range *range)
{
    const zs_node_at *from = entrance->from;
    return from != NULL && from->thread == entrance->to->thread && range->begin <= from->number &&
           from->number < range->end;
}

static zs_status hook_range(const zs_entrance *entrance, const zs_graph_range *range)
{
    if (range->unit == NULL) return ZS_OK;
    int64_t stamp = zs_schedule_stamp(range->begin, range->end);
    zs_hook hook = zs_engine_backward_hook(range->unit, stamp);
    return zs_hook_node(entrance->node, &hook);
}

/* The ranges that are entered here, the outermost first. (One that was read may end before what began within it.) */
static zs_status hook_ranges(const zs_entrance *entrance, const zs_graph_range *range)
{
    if (range == NULL) return ZS_OK;
    const zs_node_at *to = entrance->to;
    ZS_TRY(hook_ranges(entrance, zs_graph_ranges_around(&entrance->engine->ranges, to->place, range, to->number)));
    return comes_from(entrance, range) ? ZS_OK : hook_range(entrance, range);
}

/* A node whose forward has been forgotten may be of any unit. */
static zs_status hook_all(const zs_entrance *entrance)
{
    for (size_t i = 0; i < zs_engine_n_units(entrance->engine); i++) {
        zs_unit *unit = zs_engine_unit(entrance->engine, i);
        zs_graph_range range = {.unit = unit, .end = INT64_MAX};
        ZS_TRY(hook_range(entrance, &range));
    }
    return ZS_OK;
}

static zs_status enter(void *pointer, const zs_node_at *from, const zs_node_at *to, zs_node *node)
{
    zs_engine *engine = pointer;
    zs_entrance entrance = {engine, from, to, node};
    if (to->place == ZS_PLACE_NONE) return ZS_OK;
    if (to->place == ZS_PLACE_LOST) return hook_all(&entrance);
    return hook_ranges(&entrance, zs_graph_ranges_at(&engine->ranges, to->place));
}

static int64_t place(void *pointer, uint64_t thread, int64_t number)
{
    zs_engine *engine = pointer;
    return zs_graph_ranges_find(&engine->ranges, thread, number);
}

zs_status zs_entries_hook(zs_visit visit, void *roots)
{
    zs_engine **listed;
    size_t n;
    ZS_TRY(zs_engine_list_take(&listed, &n));
    zs_status status = ZS_OK;
    for (size_t i = 0; i < n; i++) {
        zs_graph_visitor visitor = {listed[i], place, enter};
        ZS_THEN(status, visit(roots, &visitor));
        zs_engine_release(listed[i]);
    }
    free(listed);
    return status;
}
