/* disk.h - offloaded memory: parameters, gradients and optimizer state beyond the device's memory, in files of a
 * directory, or for a GPU, in its host's memory.
 *
 * Each rank has one unnamed file per model, which disappears with the process however that ends; its regions are zs_mem
 * like any other, and the pager decides which of them are resident (pager.h). Where a transport maps flats side by
 * side, it maps the files of all ranks as it would its memory files.
 */
#ifndef ZS_DISK_H
#define ZS_DISK_H

#include "comm/comm.h"

typedef struct zs_disk zs_disk; /* counted references */

/* Pinned host memory, which `device`, a GPU, reads and writes in place. */
zs_status zs_disk_new_on_host(const zs_device *device, zs_disk **out);

/* Creates this rank's file in `directory`. Collective over `all`; `shards`: the ranks of one copy of the model. Fails
 * on all ranks if it fails on any: ZS_ERR_SYSTEM if no file can be created there, ZS_ERR_VALUE if ranks that map each
 * other's memory cannot open each other's files. */
zs_status zs_disk_new(const char *directory, zs_comm *all, zs_comm *shards, zs_disk **out);

/* Adds / drops a reference; regions hold one. NULL allowed. */
zs_disk *zs_disk_retain(zs_disk *disk);
void zs_disk_release(zs_disk *disk);

/* New zeroed region of this rank's own. Without room: ZS_ERR_SYSTEM (ENOSPC) with the sizes for a disk, ZS_ERR_MEMORY
 * for memory. */
zs_status zs_disk_take(zs_disk *disk, size_t bytes, zs_mem **out);

/* The transport's flat_new, on the disk. The same calls in the same order on all ranks. */
zs_status zs_disk_flat_new(zs_disk *disk, size_t shard_bytes, zs_flat_mem *out);

/* Bytes of all of this rank's regions. */
size_t zs_disk_bytes(const zs_disk *disk);

#endif
