/* pending.h - a pending factor of a block of gradients.
 *
 * Clipping multiplies all gradients by one number, which reads and writes all of them. Instead the number is kept with
 * the block, and an optimizer's step multiplies as it reads. Everything else settles the block first: all code that
 * reads gradients calls one of these functions.
 */
#ifndef ZS_PENDING_H
#define ZS_PENDING_H

#include <stdbool.h>

#include "base/memory.h"

/* Gives the block, float32 in the host's memory, the pending factor `factor`, not 0. If it has a factor already, and
 * one of the two is a power of two, their product waits: it gives the same bits, but for products below 2^-126. */
void zs_pending_set(zs_mem *mem, float factor);

/* k if the factor is 2^-k and k >= 0; else -1. */
int zs_pending_halvings(const zs_mem *mem);

/* The factor that a reader multiplies by and rounds; 1: none. NULL allowed. */
static inline float zs_pending_of(const zs_mem *mem)
{
    return mem != NULL && mem->pending != 0 ? mem->pending : 1;
}

/* Multiplies the block now, if it has a factor; NULL allowed. */
void zs_pending_settle(zs_mem *mem);

/* Forgets the factor: new numbers will be written. NULL allowed. */
void zs_pending_drop(zs_mem *mem);

/* Has any block a factor? */
bool zs_pending_any(void);

#endif
