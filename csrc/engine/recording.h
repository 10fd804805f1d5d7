/* recording.h - records which nodes of autograd's graph the forwards and backwards of an engine's units create; see
 * graph_ranges.h.
 *
 * It takes autograd's node numbers as each forward begins and ends, on the thread that runs it.
 */
#ifndef ZS_RECORDING_H
#define ZS_RECORDING_H

#include "engine/engine.h"
#include "engine/graph_ranges.h"

/* A forward of the unit begins / ends on this thread. zs_recording_forward_end returns whether it has created nodes. */
zs_status zs_recording_forward(zs_unit *unit);
bool zs_recording_forward_end(zs_unit *unit);

/* The innermost forward of any of the engine's units that runs on this thread; NULL: none. */
const zs_graph_range *zs_recording_runs(const zs_engine *engine);

/* Do nodes that this thread creates now belong to a forward of the unit, or to a read of it? */
bool zs_recording_counts(const zs_unit *unit);

/* The unit is read, in another unit's forward / by hand, by a script. / The read ends. */
zs_status zs_recording_read(zs_unit *unit);
zs_status zs_recording_by_hand(zs_unit *unit);
void zs_recording_read_end(zs_record *record);

/* The backward of a forward of the unit begins on this thread, and autograd records it: a further backward may need the
 * unit for nodes created from now on. `stamp`: its hook's. / A backward of the engine's units ends. */
zs_status zs_recording_backward(zs_unit *unit, int64_t stamp);
void zs_recording_backward_end(zs_engine *engine);

/* Ends forwards of this engine that an exception left open on this thread. */
void zs_recording_unwind(zs_engine *engine);

#endif
