/* exact.c - see exact.h. */
#include "base/exact.h"

#include <math.h>

enum { UNIT = -1075 }; /* the exponent of the first digit's unit */

void zs_exact_join(zs_exact *sum, const zs_exact *other)
{
    for (int b = 0; b < ZS_EXACT_BINS; b++)
        sum->bins[b] += other->bins[b];
    sum->beyond += other->beyond;
}

void zs_exact_join_halved(zs_exact *sum, const zs_exact *other, int halvings)
{
    const int down = halvings / 32 + 1, up = 32 - halvings % 32; /* a digit goes `down` bins, then `up` bits */
    for (int b = 0; b < ZS_EXACT_BINS; b++) {
        zs_uint128 rest = other->bins[b];
        for (int to = b - down; rest != 0; to++, rest >>= 32)
            if (to >= 0 && to < ZS_EXACT_BINS) sum->bins[to] += (zs_uint128)(uint32_t)rest << up;
    }
    sum->beyond += other->beyond;
}

void zs_exact_numbers(const zs_exact *sum, double numbers[ZS_EXACT_NUMBERS])
{
    zs_uint128 carry = 0;
    for (int d = 0; d < ZS_EXACT_DIGITS; d++) {
        if (d < ZS_EXACT_BINS) carry += sum->bins[d];
        numbers[d] = (double)(uint32_t)carry;
        carry >>= 32;
    }
    numbers[ZS_EXACT_DIGITS] = sum->beyond;
}

double zs_exact_value(const double numbers[ZS_EXACT_NUMBERS])
{
    uint32_t digits[ZS_EXACT_DIGITS];
    uint64_t carry = 0;
    int top = 0;
    for (int d = 0; d < ZS_EXACT_DIGITS; d++) {
        carry += (uint64_t)numbers[d];
        digits[d] = (uint32_t)carry;
        carry >>= 32;
        if (digits[d] != 0) top = d;
    }
    const int last = top > 3 ? top - 3 : 0;
    zs_uint128 upper = 0;
    for (int d = top; d >= last; d--)
        upper = upper << 32 | digits[d];
    for (int d = 0; d < last; d++) /* rounded as if all digits were looked at */
        upper |= digits[d] != 0;
    return ldexp((double)upper, 32 * last + UNIT) + numbers[ZS_EXACT_DIGITS];
}
