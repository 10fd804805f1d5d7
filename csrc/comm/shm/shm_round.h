/* shm_round.h - units' part of the transport's table, as comm_ops.h has it. */
#ifndef ZS_SHM_ROUND_H
#define ZS_SHM_ROUND_H

#include "comm/shm/shm.h"

/* cunit_new. */
zs_status zs_shm_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out);

/* cunit_renamed. */
void zs_shm_cunit_renamed(zs_comm *comm, zs_cunit *cunit);

/* cunit_free; NULL allowed. Its record stays: peers may still look at it. */
void zs_shm_cunit_free(zs_comm *comm, zs_cunit *cunit);

/* post. Never waits. */
zs_status zs_shm_post_round(zs_comm *comm, zs_cunit *cunit, const zs_bucket *bucket, const uint64_t *used);

/* collect. */
zs_status zs_shm_collect(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out);

/* share. */
zs_status zs_shm_share(zs_comm *comm, zs_cunit *cunit);

/* collect_shared. */
zs_status zs_shm_collect_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out);

/* release. */
zs_status zs_shm_release(zs_comm *comm, zs_cunit *cunit);

/* reusable. */
zs_status zs_shm_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);

#endif
