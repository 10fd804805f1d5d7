/* shm_flats.h - the memory of shards, which outlives its model until all ranks have freed theirs.
 *
 * A rank that deletes its model may be ahead of others that still evaluate with its shards. All ranks make the same
 * flats in the same order, so each tells in a bitmap which it has freed, and the last to free one gives back the pages
 * of all.
 */
#ifndef ZS_SHM_FLATS_H
#define ZS_SHM_FLATS_H

#include "comm/shm/shm.h"

/* flat_new. */
zs_status zs_shm_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out);

/* numbers and go_on_from, as comm_ops.h has them: of flats, and how much of the flats' file and of the records' heap
 * is used. */
void zs_shm_numbers(const zs_comm *comm, uint64_t *out);
void zs_shm_go_on_from(zs_comm *comm, const uint64_t *numbers);

/* The transport goes: what is freed after that keeps its pages, as others may evaluate on, until all processes have
 * let go of the file. */
void zs_shm_flats_end(zs_shm *shm);

#endif
