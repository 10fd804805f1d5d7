/* shm_flats.h - the memory of shards, which outlives its model until all ranks have freed theirs.
 *
 * The one idea: a rank that deletes its model may be ahead of others that still evaluate with its shards. All ranks make the same
 * flats in the same order, so each tells in a bitmap which it has freed, and the last to free one gives back the pages of all.
 */
#ifndef ZS_SHM_FLATS_H
#define ZS_SHM_FLATS_H

#include "comm/shm/shm.h"

/* flat_new. */
zs_status zs_shm_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out);

/* The transport goes: what is freed after that keeps its pages, as others may evaluate on, until all processes have let go of the
 * file. */
void zs_shm_flats_end(zs_shm *shm);

#endif
