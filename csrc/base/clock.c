/* clock.c - see clock.h. */
#define _GNU_SOURCE /* clock_gettime */
#include "base/clock.h"

#include <time.h>

int64_t zs_clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

double zs_clock(void)
{
    return 1e-9 * (double)zs_clock_ns();
}
