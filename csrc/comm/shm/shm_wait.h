/* shm_wait.h - waits for peers.
 *
 * What a rank waits for is data (zs_shm_act), published while it waits. So "what is still missing?" is one function
 * of shared memory. A rank evaluates it for itself, and for all others when it suspects that all wait for each
 * other; messages use it to report what a late peer is doing. */
#ifndef ZS_SHM_WAIT_H
#define ZS_SHM_WAIT_H

#include "comm/shm/shm.h"

/* Waits until no rank is missing. Fails with ZS_ERR_PEER (one died, left or aborted), ZS_ERR_DIVERGED (proven: all
 * ranks wait for each other), ZS_ERR_TIMEOUT, or ZS_ERR_TORCH (interrupted). */
zs_status zs_shm_wait(zs_shm *shm, zs_shm_act act);

/* The same, but returns with *reached false instead of ZS_ERR_DIVERGED. */
zs_status zs_shm_wait_or_yield(zs_shm *shm, zs_shm_act act, bool *reached);

/* outlive. */
void zs_shm_outlive(zs_comm *comm, double seconds);

#endif
