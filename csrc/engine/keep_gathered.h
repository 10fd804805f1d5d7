/* keep_gathered.h - units that stay gathered from forward to backward, because there is memory to spare.
 *
 * Where a gather costs time, backward gathers again what forward freed. Each unit that stays gathered saves as many
 * bytes of traffic as it takes of memory, so what counts is for how long. The last units of a forward are the first of
 * backward: so those stay, the last one first, within a budget.
 *
 * The budget is a number that is equal on all ranks, or is measured: then each rank's rounds of gradients carry what it
 * can spare, and all take the minimum at the end of that backward. So ranks decide the same at the same backward,
 * whatever else they run. The budget is never raised: what was once too much stays too much.
 */
#ifndef ZS_KEEP_GATHERED_H
#define ZS_KEEP_GATHERED_H

#include "engine/engine.h"

/* A model's budget. */
typedef struct zs_keep_gathered {
    size_t most;     /* bytes of full parameters that may stay; SIZE_MAX: all */
    bool measured;   /* `most` is what the ranks can spare */
    bool decided;    /* (measured) all ranks have reported that */
    size_t bytes;    /* bytes that stay, from the next forward on */
    size_t reserved; /* bytes for which the arena has room */
} zs_keep_gathered;

/* Sets the budget, before the first forward; or (`measured`) makes it what the ranks offer, and 0 until then. */
void zs_keep_gathered_set(zs_engine *engine, size_t most, bool measured);

/* The budget now. */
zs_keep_gathered zs_keep_gathered_of(const zs_engine *engine);

/* (measured) Reports in the next rounds of gradients that this rank can spare `bytes`, including what it keeps. */
void zs_keep_gathered_offer(zs_engine *engine, size_t bytes);

/* Chooses again, after a change of the units, their order, or users' settings. */
void zs_keep_gathered_choose(zs_engine *engine);

/* (measured) There was no memory for what stays: keeps and offers nothing from now on, so that the others follow. Until
 * they do, ranks gather different units in backward. False: nothing stays because of the budget. */
bool zs_keep_gathered_give_up(zs_engine *engine);

/* A backward ends; `met`: all ranks communicated in it, without failures. */
void zs_keep_gathered_settle(zs_engine *engine, bool met);

#endif
