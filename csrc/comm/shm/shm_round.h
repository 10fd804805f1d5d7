/* shm_round.h - the transport's part of a round, see zs_round_ops; named after its fields. */
#ifndef ZS_SHM_ROUND_H
#define ZS_SHM_ROUND_H

#include "comm/shm/shm.h"

/* A unit. Its record stays after it is freed: peers may still read it. */
typedef struct zs_shm_unit {
    zs_cunit base;
    uint32_t record; /* offset in the heap */
    bool compared;   /* the peers' records describe the same unit */
} zs_shm_unit;

/* Of units. */
zs_status zs_shm_unit_init(zs_comm *comm, zs_cunit *cunit);
void zs_shm_renamed(zs_comm *comm, zs_cunit *cunit);

/* Of rounds. `send` never waits. */
zs_status zs_shm_send(zs_comm *comm, zs_cunit *cunit);
zs_status zs_shm_arrive(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);
zs_status zs_shm_share(zs_comm *comm, zs_cunit *cunit);
zs_status zs_shm_arrive_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);
zs_status zs_shm_release(zs_comm *comm, zs_cunit *cunit);
zs_status zs_shm_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);

#endif
