/* entries.h - where a backward enters the forwards of units.
 *
 * Before a backward, zshard searches its graph for edges that lead into a forward's nodes (graph_ranges.h). The node
 * behind such an edge gets a hook that unshards the unit. So it does not matter how a result left the forward.
 */
#ifndef ZS_ENTRIES_H
#define ZS_ENTRIES_H

#include "engine/engine.h"

/* Visits a graph, as zs_py_visit_graph does; `roots` is its own. */
typedef zs_status (*zs_visit)(void *roots, const zs_graph_visitor *visitor);

/* Hooks the nodes at which a backward from `roots` enters forwards of units of any engine. ZS_ERR_MEMORY. */
zs_status zs_entries_hook(zs_visit visit, void *roots);

#endif
