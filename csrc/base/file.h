/* file.h - files that memory lies in: of memory, for the shm transport's flats and buckets, or on a disk; and how they
 * get mapped.
 *
 * A region of a file is a zs_mem like any other. When the last reference to it goes, its pages go back to
 * the system by punching a hole; the file itself only ever grows, so a mapping can never be cut off under a reader.
 */
#ifndef ZS_FILE_H
#define ZS_FILE_H

#include "base/memory.h"
#include "base/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ZS_PAGE = 4096 }; /* flats are a multiple of it, so that regions can be mapped side by side */

typedef struct zs_file zs_file;

/* New memory file of `bytes` zeros that no peer can shrink; *fd is the caller's to close. */
zs_status zs_file_memory(const char *name, size_t bytes, int *fd);

/* New growing file. The handle is reference-counted by the regions in it. */
zs_status zs_file_new(const char *name, zs_file **out);

/* A handle of a file that zs_file_memory made and that other processes have too: the first to need more makes it
 * longer. Takes over `fd`, also if it fails. */
zs_status zs_file_common(int fd, zs_file **out);

/* The same as zs_file_new on disk, in `directory`: each region's room is reserved when it is made, so that touching
 * it cannot fail for want of it. The file has a name, for peers to open it by, until zs_file_hide. ZS_ERR_SYSTEM
 * naming the directory. */
zs_status zs_file_new_in(const char *directory, zs_file **out);

/* The name of a file on disk. Borrowed. */
const char *zs_file_path(const zs_file *file);

/* Unlinks the file: it disappears with its last user, however that process ends. */
void zs_file_hide(zs_file *file);

/* Is called under the file's lock when a flat is freed, on any thread; false: its pages must be freed at once. */
typedef bool (*zs_file_freed)(void *arg, uint64_t offset, uint64_t bytes);
void zs_file_on_free(zs_file *file, zs_file_freed call, void *arg);

/* Does the region under `mem` lie in this file? */
bool zs_file_holds(const zs_file *file, const zs_mem *mem);

/* From now on, freed regions keep their contents, for other processes that map them. */
void zs_file_keep(zs_file *file);

/* Drops the maker's reference; NULL allowed. The file lives on while regions do. */
void zs_file_release(zs_file *file);

/* The file's descriptor. Borrowed. */
int zs_file_fd(const zs_file *file);

/* New region of `shard_bytes` (a multiple of ZS_PAGE) at the end of `file`, never reused, and a mapping of the
 * regions at the same offset of all files `fds` [world] side by side, in rank order; fds[rank] is `file`'s own. The
 * peers' regions may not exist yet. */
zs_status zs_file_map_flat(zs_file *file, const int *fds, int world, size_t shard_bytes, zs_mem **out);

/* Makes a file longer by `bytes` that hold regions of `shard_bytes`, a multiple of ZS_PAGE, and are not mapped. */
zs_status zs_file_append(zs_file *file, size_t bytes, size_t shard_bytes, uint64_t *offset);

/* New region of `bytes` (a multiple of ZS_PAGE) at the end of `file`, never reused, mapped. */
static inline zs_status zs_file_map_own(zs_file *file, size_t bytes, zs_mem **out)
{
    int fd = zs_file_fd(file);
    return zs_file_map_flat(file, &fd, 1, bytes, out);
}

/* The same in a file that all ranks have (zs_file_common), where their regions lie side by side: one mapping instead of
 * `world`. All ranks make the same ones in the same order, and the first also makes the peers' regions. */
zs_status zs_file_map_common(zs_file *file, int rank, int world, size_t shard_bytes, zs_mem **out);

/* In this process, puts private memory of zeros in the place of a mapping that zs_file_map_common made for `rank`;
 * or (false) the file again. */
zs_status zs_file_set_apart(zs_mem *mem, int rank, bool apart);

/* The end of the file's regions / makes the next one begin no earlier than `end`. */
uint64_t zs_file_end(zs_file *file);
void zs_file_skip_to(zs_file *file, uint64_t end);

/* Offset in its file of this rank's own region under `mem`, which zs_file_map_flat, _common or _bucket made. */
uint64_t zs_file_offset_of(const zs_mem *mem);

typedef struct zs_region {
    uint64_t index;  /* number in its file */
    uint64_t offset; /* constant for one index */
    uint64_t bytes;  /* capacity, also constant */
} zs_region;

/* Size of the region for a bucket of `bytes`: whole pages, huge ones if it is large. */
size_t zs_file_bucket_room(size_t bytes);

/* Region for a bucket of `bytes`, rounded up to pages, mapped: a free one of `file` of that size, else a new one. */
zs_status zs_file_map_bucket(zs_file *file, size_t bytes, zs_region *region, zs_mem **out);

/* The place of region `index` of map_bucket. */
zs_region zs_file_region(zs_file *file, uint64_t index);

/* --- kept.c ------------------------------------------------------------------------------------------------------- */

/* From now on, in this process, private blocks are made by zs_kept_new. Idempotent. */
zs_status zs_kept_begin(void);

/* New zeroed block in that file; when it is freed, its pages go back. */
zs_status zs_kept_new(size_t bytes, zs_mem **out);

/* --- mappings.c --------------------------------------------------------------------------------------------------- */

/* A mapping of a part of a file of memory. */
typedef struct zs_mapping {
    char *base;
    size_t bytes;
    uint64_t offset; /* in the file */
    int fd;          /* borrowed */
} zs_mapping;

/* Lists a mapping, until it is forgotten. ZS_ERR_MEMORY. Any thread. */
zs_status zs_mapping_note(const zs_mapping *mapping);
void zs_mapping_forget(const void *base);

/* All mappings, in no order: *new* array, for free(). */
zs_status zs_mappings_copy(zs_mapping **out, size_t *n);

/* The mapping that holds these bytes; false: they are other memory. */
bool zs_mapping_of(const void *at, size_t bytes, zs_mapping *out);

#endif
