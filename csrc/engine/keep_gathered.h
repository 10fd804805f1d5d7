/* keep_gathered.h - units that stay gathered from forward to backward, because there is memory to spare.
 *
 * If a gather costs time, backward gathers again the units that forward freed. Each unit that stays gathered saves one
 * byte of traffic per byte of memory, so units differ only in how long they stay. The last units of a forward are the
 * first of backward: so those stay, the last one first, within a budget.
 *
 * The budget is equal on all ranks, so all ranks make the same decisions at the same time.
 */
#ifndef ZS_KEEP_GATHERED_H
#define ZS_KEEP_GATHERED_H

#include "engine/engine.h"

/* A model's budget. */
typedef struct zs_keep_gathered {
    size_t most;     /* bytes of full parameters that may stay; SIZE_MAX: all */
    size_t bytes;    /* bytes that stay, from the next forward on */
    size_t reserved; /* bytes for which the arena has room */
} zs_keep_gathered;

/* Sets the budget, between steps, to the same on all ranks. */
void zs_keep_gathered_set(zs_engine *engine, size_t most);

/* The budget now. */
zs_keep_gathered zs_keep_gathered_of(const zs_engine *engine);

/* Chooses again, after a change of the units, their order, or users' settings. */
void zs_keep_gathered_choose(zs_engine *engine);

#endif
