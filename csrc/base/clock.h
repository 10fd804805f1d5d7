/* clock.h - the monotonic clock, which all processes of a host share. */
#ifndef ZS_CLOCK_H
#define ZS_CLOCK_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

/* The time in nanoseconds / in seconds. */
int64_t zs_clock_ns(void);
double zs_clock(void);

/* Makes a condition that waits on this clock. / The time in `seconds` from now, the deadline of a wait. */
void zs_clock_condition(pthread_cond_t *made);
struct timespec zs_clock_in(double seconds);

#endif
