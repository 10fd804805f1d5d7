/* pager_io.h - the pager's operations on pages of a mapping. None of these takes its lock; each may wait for the
 * disk. */
#ifndef ZS_PAGER_IO_H
#define ZS_PAGER_IO_H

#include "pager/pager.h"

/* Brings the pages of a range in; 0, or the errno if some cannot be read: touching them would be a SIGBUS. */
int zs_pager_fetch(const zs_pager_map *map, char *ptr, size_t bytes, bool write);

/* Begins to write the range's pages in this rank's part to the disk; the errno of an earlier failure, or 0. */
int zs_pager_write(const zs_pager_map *map, const char *ptr, size_t bytes);

/* Makes the whole pages of the range in this rank's part read as zeros, without memory; their room stays reserved. If
 * the file system cannot, they stay as they are. */
void zs_pager_clear(const zs_pager_map *map, const char *ptr, size_t bytes);

/* Writes them, waits, and drops the range's whole pages; an errno, or 0. keep_own: not those of this rank's part. */
int zs_pager_drop(const zs_pager_map *map, char *ptr, size_t bytes, bool keep_own);

#endif
