/* grad_memory.h - the memory of a unit's reduced gradients.
 *
 * It is taken when the first sum of a backward needs it, from where tensors get theirs, and goes back once no .grad and
 * no script refers to it: activations of the next forward find it free. Two kinds of units differ. Those that are
 * stepped in backward borrow a slot from their sum to the step, and gradients that are offloaded have a place for ever.
 */
#ifndef ZS_GRAD_MEMORY_H
#define ZS_GRAD_MEMORY_H

#include "unit/context.h"
#include "unit/unit.h"

/* Gives the unit's gradients memory, if they have none. */
zs_status zs_grad_memory_take(zs_unit *unit);

/* A backward begins: full gradients that the script has kept as .grad, to which it adds, stay where they are. */
void zs_grad_memory_reuse(zs_unit *unit);

/* Frees it, unless a .grad or a script refers to it. Not while a sum may write to it. */
void zs_grad_memory_drop(zs_unit *unit);

/* A backward has ended and set `n` .grad. / A script has set one of them to None: after the last one, as _drop. */
void zs_grad_memory_shown(zs_unit *unit, int64_t n);
void zs_grad_memory_forgotten(zs_unit *unit);

/* Frees it. Tensors that still refer to it raise `message` from then on. */
void zs_grad_memory_clear(zs_unit *unit, const char *message);

/* Takes the memory of its flats out of use, for a while, into own[n_flats]: tensors in scripts raise `message`. */
void zs_grad_memory_set_aside(zs_unit *unit, zs_mem **own, const char *message);

/* Undoes it. Gradients that are shown keep the memory that they have. */
void zs_grad_memory_put_back(zs_unit *unit, zs_mem **own);

#endif
