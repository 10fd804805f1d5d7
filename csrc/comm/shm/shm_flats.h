/* shm_flats.h - the memory of shards, which outlives its model until all ranks have freed theirs.
 *
 * A rank that deletes its model may be ahead of others that still evaluate with its shards. All ranks create the
 * same flats in the same order, so each publishes in a bitmap which it has freed, and the last to free one frees the
 * pages of all. */
#ifndef ZS_SHM_FLATS_H
#define ZS_SHM_FLATS_H

#include "comm/shm/shm.h"

/* flat_new. */
zs_status zs_shm_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out);

/* numbers and continue_from, see comm_ops.h: of flats, and how much of the flats' file and of the records' heap is in
 * use. */
void zs_shm_numbers(const zs_comm *comm, uint64_t *out);
void zs_shm_continue_from(zs_comm *comm, const uint64_t *numbers);

/* The transport closes: flats freed after this keep their pages, as others may continue to evaluate, until all
 * processes have closed the file. */
void zs_shm_flats_end(zs_shm *shm);

#endif
