/* prefetch.h - gathers that begin before they are wanted, where a gather takes time (no peer's memory is mapped).
 *
 * The one idea: a pass gathers its units in the order of the last one. So each unit remembers which was gathered after it,
 * in forward and in backward, and when it is whole the gather of that one begins. A guess that was wrong costs a gather,
 * never a number: what was not wanted is dropped at the end of the pass. All ranks guess alike, as they saw one order.
 */
#ifndef ZS_PREFETCH_H
#define ZS_PREFETCH_H

#include "unit/unit.h"

/* How far to go ahead. */
typedef struct zs_prefetch {
    int ahead[2]; /* units whose gathers may be under way, by zs_phase; 0: none */
} zs_prefetch;

/* A pass begins. */
void zs_prefetch_begin(zs_engine *engine);

/* The unit was made whole in this pass: remembers the order. */
void zs_prefetch_note(zs_unit *unit, zs_phase phase);

/* Begins the gathers of what follows: the units given by hand, else those that did in the last pass. Collective, as the
 * gathers are. */
zs_status zs_prefetch_next(zs_unit *unit, zs_phase phase);

/* The pass is over: drops what was begun and not wanted. */
void zs_prefetch_end(zs_engine *engine, zs_phase phase);

/* Was this the last unit of the last forward, and is it again by the looks of it? Its backward comes next. */
bool zs_prefetch_is_last(const zs_unit *unit);

/* Has these units of one engine (borrowed, any number) follow `unit`; n = 0: what the last pass shows. ZS_ERR_VALUE for
 * units of another engine. */
zs_status zs_prefetch_set(zs_unit *unit, zs_phase phase, zs_unit *const *units, size_t n);

/* Takes a unit that dies, or goes to another engine, out of what others remember. */
void zs_prefetch_forget(zs_engine *engine, const zs_unit *unit);

#endif
