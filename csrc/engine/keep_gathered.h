/* keep_gathered.h - units that stay gathered from forward to backward, since there is memory to spare.
 *
 * Where a gather costs, backward gathers again what forward has given back. Each unit that stays instead saves as many
 * bytes on the wire as it takes of memory, so what counts is how long it takes them: the last units of a forward are
 * the first of backward. So those stay, the last one first, as far as a budget goes.
 *
 * The budget is a number that is the same on all ranks, or what they measure: then each says in its rounds of gradients
 * what it has to spare, and all take the least when that backward ends. Ranks thus decide alike, at the same backward,
 * whatever else they run. It is never raised again: what has been found to be too much once is so for good.
 */
#ifndef ZS_SPARE_H
#define ZS_SPARE_H

#include "engine/engine.h"

/* What is kept of a model. */
typedef struct zs_keep_gathered {
    size_t most;     /* bytes of full parameters that may stay; SIZE_MAX: all */
    bool measured;   /* that is what ranks say */
    bool decided;    /* (measured) they have */
    size_t bytes;    /* that stay, from the next forward on */
    size_t reserved; /* that the arena has room for by now */
} zs_keep_gathered;

/* Sets the budget, before the first forward; or (`measured`) has it be what the ranks offer, and nothing until then. */
void zs_keep_gathered_set(zs_engine *engine, size_t most, bool measured);

/* What it comes to so far. */
zs_keep_gathered zs_keep_gathered_of(const zs_engine *engine);

/* (measured) Has the peers told in the next rounds of gradients that this rank can spare so many bytes, with what it
 * keeps. */
void zs_keep_gathered_offer(zs_engine *engine, size_t bytes);

/* The units, their order, or what users want of them have changed: chooses again. */
void zs_keep_gathered_choose(zs_engine *engine);

/* (measured) Memory for what stays could not be had: keeps nothing from now on, and offers nothing, so that the
 * others follow. Until then their passes gather what this one's do not, or the other way round. false: nothing stays
 * for that reason. */
bool zs_keep_gathered_give_up(zs_engine *engine);

/* A backward ends; `met`: all ranks have met in it, and nothing has failed. */
void zs_keep_gathered_settle(zs_engine *engine, bool met);

#endif
