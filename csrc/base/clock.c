/* clock.c - see clock.h. */
#define _GNU_SOURCE /* clock_gettime, pthread_condattr_setclock */
#include "base/clock.h"

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

void zs_clock_condition(pthread_cond_t *made)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(made, &attributes);
    pthread_condattr_destroy(&attributes);
}

struct timespec zs_clock_in(double seconds)
{
    int64_t then = zs_clock_ns() + (int64_t)(seconds * 1e9);
    return (struct timespec){.tv_sec = then / 1000000000, .tv_nsec = then % 1000000000};
}
