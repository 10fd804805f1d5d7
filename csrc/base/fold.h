/* fold.h - one number of many, in order: equal numbers mean, but for 2^-64, that the same has been folded in. */
#ifndef ZS_FOLD_H
#define ZS_FOLD_H

#include <stdint.h>

/* `so_far` with `value` folded in: a bijection of 64 bits (splitmix64), so that no two values cancel out. */
static inline uint64_t zs_fold(uint64_t so_far, uint64_t value)
{
    uint64_t x = so_far + value + UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

#endif
