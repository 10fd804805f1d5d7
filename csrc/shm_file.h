/* shm_file.h - memory files: where the shm transport's flats and buckets lie, and how they get mapped.
 *
 * The one idea: a region of a file is a zs_mem like any other. When the last reference to it goes, its pages go back to
 * the system by punching a hole; the file itself only ever grows, so a mapping can never be cut off under a reader.
 */
#ifndef ZS_SHM_FILE_H
#define ZS_SHM_FILE_H

#include "memory.h"

enum { ZS_SHM_PAGE = 4096 }; /* flats are a multiple of it, so that regions can be mapped side by side */

typedef struct zs_shm_file zs_shm_file;

/* How many times this process is the outcome of a fork since the first call; differs between parent and child. */
unsigned zs_shm_lifetime(void);

/* New memory file of `bytes` zeros that no peer can shrink; *fd is the caller's to close. */
zs_status zs_shm_memfd(const char *name, size_t bytes, int *fd);

/* New growing file. The handle is reference-counted by the regions in it. */
zs_status zs_shm_file_new(const char *name, zs_shm_file **out);

/* Gives the maker's reference back; NULL allowed. The file lives on while regions do. */
void zs_shm_file_release(zs_shm_file *file);

/* The file's descriptor. Borrowed. */
int zs_shm_file_fd(const zs_shm_file *file);

/* New region of `shard_bytes` (a multiple of ZS_SHM_PAGE) at the end of `file`, never reused, and a mapping of the
 * regions at the same offset of all files `fds` [world] side by side, in rank order; fds[rank] is `file`'s own. The
 * peers' regions may not exist yet. */
zs_status zs_shm_map_flat(zs_shm_file *file, const int *fds, int world, size_t shard_bytes, zs_mem **out);

typedef struct zs_shm_region {
    uint64_t index;  /* number in its file */
    uint64_t offset; /* constant for one index */
    uint64_t bytes;  /* capacity, constant likewise */
} zs_shm_region;

/* Region for a bucket of `bytes`, rounded up to pages, mapped: a free one of `file` of that size, else a new one. */
zs_status zs_shm_map_bucket(zs_shm_file *file, size_t bytes, zs_shm_region *region, zs_mem **out);

/* Where the region `index` of map_bucket lies. */
zs_shm_region zs_shm_file_region(zs_shm_file *file, uint64_t index);

#endif
