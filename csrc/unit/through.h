/* through.h - which units a running backward is through with.
 *
 * The one idea: torch numbers the nodes of its graph as they are made, and a backward runs them in falling order. So when
 * the hook before a unit's backward runs, every node that was made after that unit's forward has been run; and a unit all of
 * whose forwards began later will get no gradient any more. That is known on all ranks at the same hook, however many of
 * the unit's parameters had a gradient: where collectives must come in one order, that is what the order hangs on.
 */
#ifndef ZS_THROUGH_H
#define ZS_THROUGH_H

#include "unit/unit.h"

/* A forward of the unit's module begins. */
void zs_through_begin(zs_unit *unit);

/* The forward that is ending, for the hook before its backward. */
int64_t zs_through_stamp(const zs_unit *unit);

/* Its outputs have a history: its backward may come. */
void zs_through_expect(zs_unit *unit);

/* The backward of that forward begins. */
void zs_through_fired(zs_unit *unit, int64_t stamp);

/* Is the running backward through with `unit`, where that of the forward `stamp` begins? `session`: when the last session of
 * forwards began; it is with a unit that took no part in that. (One that did without recording may be recomputed.) */
bool zs_through_with(const zs_unit *unit, int64_t stamp, int64_t session);

/* A backward has ended. */
void zs_through_end(zs_unit *unit);

#endif
