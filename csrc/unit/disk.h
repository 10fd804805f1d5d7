/* disk.h - memory that lies elsewhere: parameters, gradients and optimizer state beyond what the device's memory holds;
 * in files of a directory, or for a GPU, in its host's memory.
 *
 * Each rank has one file for a model, without a name, so that it is gone with the process however that ends;
 * regions of it are zs_mem like any other, and what is resident of them is the pager's business (pager.h). Where a
 * transport maps flats side by side, the files of all ranks are mapped as its memory files would be.
 */
#ifndef ZS_DISK_H
#define ZS_DISK_H

#include "comm/comm.h"

typedef struct zs_disk zs_disk; /* counted references */

/* Pinned memory of the host of `device`, a GPU, which reads and writes it where it lies. */
zs_status zs_disk_new_on_host(const zs_device *device, zs_disk **out);

/* Makes this rank's file in `directory`. For all ranks of `all` together; `shards`: those of one copy of the model.
 * Fails on all ranks if it does on any: ZS_ERR_SYSTEM where no file can be made there, ZS_ERR_VALUE where ranks that
 * map each other's memory cannot open each other's files. */
zs_status zs_disk_new(const char *directory, zs_comm *all, zs_comm *shards, zs_disk **out);

/* Adds a reference / gives one back; regions hold one. NULL allowed. */
zs_disk *zs_disk_retain(zs_disk *disk);
void zs_disk_release(zs_disk *disk);

/* New region of this rank's own, of zeros. ZS_ERR_SYSTEM (ENOSPC) naming the numbers if there is no room on a disk,
 * ZS_ERR_MEMORY in memory. */
zs_status zs_disk_take(zs_disk *disk, size_t bytes, zs_mem **out);

/* What flat_new of the ranks' transport does, on the disk. Same calls in the same order on all ranks. */
zs_status zs_disk_flat_new(zs_disk *disk, size_t shard_bytes, zs_flat_mem *out);

/* Bytes of all regions that this rank has there. */
size_t zs_disk_bytes(const zs_disk *disk);

#endif
