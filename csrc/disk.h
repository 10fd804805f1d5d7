/* disk.h - memory that lies in files of a directory: parameters, gradients and optimizer state beyond what RAM holds.
 *
 * The one idea: each rank has one file for a model, without a name, so that it is gone with the process however that ends;
 * regions of it are zs_mem like any other, and what is resident of them is the pager's business (pager.h). Where a
 * transport maps flats side by side, the files of all ranks are mapped as its memory files would be.
 */
#ifndef ZS_DISK_H
#define ZS_DISK_H

#include "comm.h"

typedef struct zs_disk zs_disk; /* counted references */

/* Makes this rank's file in `directory`. For all ranks of `all` together; `shards`: those of one copy of the model.
 * Fails on all ranks if it does on any: ZS_ERR_SYSTEM where no file can be made there, ZS_ERR_VALUE where ranks that map each
 * other's memory cannot open each other's files. */
zs_status zs_disk_new(const char *directory, zs_comm *all, zs_comm *shards, zs_disk **out);

/* Adds a reference / gives one back; regions hold one. NULL allowed. */
zs_disk *zs_disk_retain(zs_disk *disk);
void zs_disk_release(zs_disk *disk);

/* New region of this rank's own, of zeros. ZS_ERR_SYSTEM (ENOSPC) naming the numbers if there is no room. */
zs_status zs_disk_take(zs_disk *disk, size_t bytes, zs_mem **out);

/* What flat_new of the ranks' transport does, on the disk. Same calls in the same order on all ranks. */
zs_status zs_disk_flat_new(zs_disk *disk, size_t shard_bytes, zs_flat_mem *out);

/* Bytes of all regions that this rank has on the disk. */
size_t zs_disk_bytes(const zs_disk *disk);

#endif
