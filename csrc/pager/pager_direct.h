/* pager_direct.h - the way past the page cache: a range's bytes in a separate buffer, moved by direct I/O.
 *
 * None of these takes the pager's lock; each may wait for the disk.
 */
#ifndef ZS_PAGER_DIRECT_H
#define ZS_PAGER_DIRECT_H

#include "pager/pager.h"

/* A buffer for the pages that [ptr, ptr + bytes) touches, one that is free where there is one; NULL without memory.
 * A forked child has none of them. */
char *zs_pager_buffer_take(const char *ptr, size_t bytes);

/* Returns a buffer that _take gave for the same range; NULL allowed. A few stay for the next ones. */
void zs_pager_buffer_give(char *buffer, const char *ptr, size_t bytes);

/* Those go too. */
void zs_pager_buffers_free(void);

/* A range's first byte in its buffer: at the same offset in a page as in the mapping. */
char *zs_pager_in_buffer(char *buffer, const char *ptr);

/* Reads a range of this rank's part into its buffer: pages in the page cache from there, all others from the disk. Both
 * give the mapping's latest bytes. 0 or an errno. */
int zs_pager_fill(const zs_pager_map *map, const char *ptr, size_t bytes, char *buffer);

/* Writes the range from its buffer, and no other byte; the mapping then shows it, on all ranks. No thread may write to
 * the mapping of the file meanwhile: a page in the cache may be part of a larger piece that the kernel would write as
 * one. */
int zs_pager_send(const zs_pager_map *map, const char *ptr, size_t bytes, char *buffer);

#endif
