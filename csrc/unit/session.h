/* session.h - what forwards and backwards have in common: peers' shards are read within a session, and not outside.
 */
#ifndef ZS_SESSION_H
#define ZS_SESSION_H

#include "unit/engine.h"

/* Unshards the unit, and lets the gathers of what follows begin. */
zs_status zs_session_make_whole(zs_unit *unit, zs_phase phase);

/* Shards all units; `held`: those that are whole by hand as well. */
zs_status zs_session_reshard_all(zs_engine *engine, bool held);

/* Opens / closes a session in which peers' shards may be read; no-ops where none are. */
zs_status zs_session_begin_reading(zs_engine *engine, const zs_reading *reading);
zs_status zs_session_end_reading(zs_engine *engine, zs_phase phase);

/* Between zero_grad() and the next gradients their memory is free for activations. */
void zs_session_discard_dead_grads(zs_engine *engine);

/* The right to write this rank's shards, of an engine that no failed backward holds up: see zs_engine_write_begin. */
zs_status zs_session_write_begin(zs_engine *engine);
void zs_session_write_end(zs_engine *engine);

#endif
