/* exact.h - an exact sum of doubles that are not negative. It depends neither on their order nor on who adds which. */
#ifndef ZS_EXACT_H
#define ZS_EXACT_H

#include <stdint.h>
#include <string.h>

enum {
    ZS_EXACT_BINS = 64,   /* each for 32 exponents */
    ZS_EXACT_DIGITS = 68, /* of 32 bits: room for all bins, and for the carries of many ranks */
    ZS_EXACT_NUMBERS = ZS_EXACT_DIGITS + 1,
};

__extension__ typedef unsigned __int128 zs_uint128;

/* Zeroed: the sum of nothing. Takes 2^44 numbers without an overflow. */
typedef struct zs_exact {
    zs_uint128 bins[ZS_EXACT_BINS]; /* in units of 2^(32 bin - 1075) */
    double beyond;                  /* the sum of those that are infinite or NaN */
} zs_exact;

/* Adds one number, also infinity and NaN. */
static inline void zs_exact_add(zs_exact *sum, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint64_t exponent = bits >> 52, fraction = bits & ((UINT64_C(1) << 52) - 1);
    if (exponent >= 0x7ff) { /* -0 too: it adds nothing */
        sum->beyond += value;
        return;
    }
    const zs_uint128 units = exponent > 0 ? fraction | UINT64_C(1) << 52 : fraction << 1;
    sum->bins[exponent >> 5] += units << (exponent & 31);
}

/* Adds what another sum has. */
void zs_exact_join(zs_exact *sum, const zs_exact *other);

/* Adds another sum, of squares of floats, times 2^-halvings, where halvings is 256 at most. */
void zs_exact_join_halved(zs_exact *sum, const zs_exact *other, int halvings);

/* The sum as numbers that ranks can add one by one without rounding. */
void zs_exact_numbers(const zs_exact *sum, double numbers[ZS_EXACT_NUMBERS]);

/* Value of such numbers, which may be the sums of several ranks', rounded once. */
double zs_exact_value(const double numbers[ZS_EXACT_NUMBERS]);

#endif
