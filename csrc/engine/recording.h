/* recording.h - which nodes of autograd's graph the forwards and backwards of an engine's units make; see
 * graph_ranges.h.
 *
 * Autograd's numbers are told as each begins and ends, on the thread that runs it.
 */
#ifndef ZS_RECORDING_H
#define ZS_RECORDING_H

#include "engine/engine.h"
#include "engine/graph_ranges.h"

/* A forward of the unit begins / ends on this thread. zs_recording_forward_end returns whether it has made nodes. */
zs_status zs_recording_forward(zs_unit *unit);
bool zs_recording_forward_end(zs_unit *unit);

/* The forward of any unit of the engine that runs on this thread, the innermost; NULL: none does. */
const zs_graph_range *zs_recording_runs(const zs_engine *engine);

/* Does what this thread makes now count as made in a forward of the unit, or while it is read? */
bool zs_recording_counts(const zs_unit *unit);

/* The unit is read, in a forward of another one; or a script reads it by hand. / It is not read any more. */
zs_status zs_recording_read(zs_unit *unit);
zs_status zs_recording_by_hand(zs_unit *unit);
void zs_recording_read_end(zs_record *record);

/* The backward of a forward of the unit begins on this thread, and autograd records it: another backward may come,
 * which needs the unit for what is made from now on. `stamp` is that of its hook. / A backward of the engine's units
 * is over. */
zs_status zs_recording_backward(zs_unit *unit, int64_t stamp);
void zs_recording_backward_end(zs_engine *engine);

/* Forwards of this engine that an exception has left on this thread end. */
void zs_recording_unwind(zs_engine *engine);

#endif
