/* pending.h - factors that a block of gradients is yet to be multiplied by.
 *
 * Clipping multiplies all gradients by one number, which reads and writes all of them. Instead the number is kept with
 * the block, and an optimizer's step multiplies what it reads. Everything else settles the block first. So whoever
 * reads gradients calls one of the two functions below.
 */
#ifndef ZS_PENDING_H
#define ZS_PENDING_H

#include <stdbool.h>

#include "base/memory.h"

/* The block, float32 in the host's memory, is to be multiplied by one more factor. False: it has no room for it. */
bool zs_pending_add(zs_mem *mem, float factor);

/* The factors that a reader multiplies by, rounding each product; NULL allowed: none. */
zs_factors zs_pending_of(const zs_mem *mem);

/* Multiplies the block now, if it has factors; NULL allowed. */
void zs_pending_settle(zs_mem *mem);

/* Forgets the factors: new numbers will be written. NULL allowed. */
void zs_pending_drop(zs_mem *mem);

/* Has any block factors? */
bool zs_pending_any(void);

#endif
