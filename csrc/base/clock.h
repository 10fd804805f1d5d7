/* clock.h - the monotonic clock, which all processes of a host share. */
#ifndef ZS_CLOCK_H
#define ZS_CLOCK_H

#include <stdint.h>

/* The time in nanoseconds / in seconds. */
int64_t zs_clock_ns(void);
double zs_clock(void);

#endif
