/* bits.h - bitmaps of a unit's parameters: words of 64, bit i % 64 of word i / 64. */
#ifndef ZS_BITS_H
#define ZS_BITS_H

#include <stdbool.h>
#include <stdint.h>

/* Is bit `i` set? */
static inline bool zs_get_bit(const uint64_t *bits, int64_t i)
{
    return (bits[i / 64] >> (i % 64)) & 1;
}

/* Sets it. */
static inline void zs_set_bit(uint64_t *bits, int64_t i)
{
    bits[i / 64] |= UINT64_C(1) << (i % 64);
}

/* Clears it. */
static inline void zs_clear_bit(uint64_t *bits, int64_t i)
{
    bits[i / 64] &= ~(UINT64_C(1) << (i % 64));
}

#endif
