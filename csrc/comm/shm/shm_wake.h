/* shm_wake.h - sleeping until all that a wait needs is there, and nobody else's wake-ups.
 *
 * It is always one rank's turn to wake a sleeper, one that the sleeper still misses. When that rank has done what the
 * sleeper needs, it looks who else is missing, and hands the turn on; whoever finds that nobody is missing wakes it. So
 * a wait that sleeps costs two futex calls, one to sleep and one to wake, with any number of ranks.
 */
#ifndef ZS_SHM_WAKE_H
#define ZS_SHM_WAKE_H

#include "comm/shm/shm.h"

/* Before a sleep, while this rank's wait for `act` is published: gives somebody that is missing the turn to wake
 * this rank. False: nobody is missing any more. *seen is for zs_shm_sleep. */
bool zs_shm_prepare_sleep(zs_shm *shm, zs_shm_act act, uint32_t *seen);

/* Sleeps until woken since *seen, or for `seconds`; or less, for no reason. */
void zs_shm_sleep(zs_shm *shm, uint32_t seen, double seconds);

/* The wait is over: nobody is to wake this rank. */
void zs_shm_get_up(zs_shm *shm);

#endif
