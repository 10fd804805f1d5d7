/* shm_wake.h - sleep until all that a wait needs is there, without needless wake-ups.
 *
 * At any time it is one rank's turn to wake a sleeper: a rank that the sleeper still misses. When that rank has done
 * what the sleeper needs, it checks which other rank is missing, and passes the turn on to it; if none is, it wakes
 * the sleeper. So a wait that sleeps costs two futex calls, one to sleep and one to wake, for any number of ranks. */
#ifndef ZS_SHM_WAKE_H
#define ZS_SHM_WAKE_H

#include "comm/shm/shm.h"

/* Before a sleep, while this rank's wait for `act` is published: gives a missing rank the turn to wake this one.
 * False: no rank is missing any more. *seen is for zs_shm_sleep. */
bool zs_shm_prepare_sleep(zs_shm *shm, zs_shm_act act, uint32_t *seen);

/* Sleeps until woken since *seen, or for `seconds`; may return early without a reason. */
void zs_shm_sleep(zs_shm *shm, uint32_t seen, double seconds);

/* The wait is over: no rank is to wake this one. */
void zs_shm_get_up(zs_shm *shm);

#endif
