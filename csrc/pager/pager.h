/* pager.h - keeps pages of disk-backed memory resident: fetches ahead of use, writes behind, drops.
 *
 * The mapping is correct without the pager. The pager only avoids page faults and bounds resident memory. Users of a
 * range call it before (want) and after (done). Training steps repeat, so the pager learns which range follows which
 * two, and fetches ahead.
 *
 *   COLD --> QUEUED --> FETCHING --> READY <--> IDLE --> LEAVING --> COLD
 *                                    in use     may go, oldest first
 *
 * An optimizer's step touches everything once, and mapped pages are expensive: faults, dirty tracking, writeback. So it
 * may borrow a range instead (lend): it works in a buffer, which direct I/O fills and writes behind. Others do not see
 * the buffer, so ranges are lent only during a step; when it ends, all is on the disk and in the mapping.
 *
 * Two threads do the work, one for reading and one for writing; they start with the first mapping. In a forked child
 * there are none, and all calls are no-ops: pages come and go as the kernel likes.
 */
#ifndef ZS_PAGER_H
#define ZS_PAGER_H

#include "base/status.h"

/* A mapping of a region of a file; of the same region of several ranks' files, where these are mapped side by side. */
typedef struct zs_pager_map {
    char *ptr;
    size_t part_bytes; /* one rank's */
    int n_parts;
    int own;         /* which part this rank writes to */
    const int *fds;  /* [n_parts] borrowed for as long as the mapping is known */
    uint64_t offset; /* of the region in each file */
    int direct;      /* fds[own]'s file, opened for direct I/O; -1: its file system has none. Borrowed as long */
} zs_pager_map;

/* Registers a mapping; ZS_ERR_MEMORY. */
zs_status zs_pager_add(const zs_pager_map *map);

/* Forgets the mapping at `ptr`; nothing is done with its pages when this has returned. */
void zs_pager_remove(const char *ptr);

/* Sets the bytes of all mappings together that may be resident, beyond ranges in use. */
void zs_pager_set_limit(size_t bytes);

/* Is there memory on disk at all? Cheap. */
bool zs_pager_active(void);

/* The use of a range. */
typedef enum zs_pager_use { ZS_PAGER_READ, ZS_PAGER_WRITE } zs_pager_use;

/* Waits until the pages of [ptr, ptr + bytes) are there; they stay until zs_pager_done of the same range. No-op for
 * memory that is not on disk. ZS_ERR_SYSTEM where a page cannot be read, or an earlier one could not be written. */
zs_status zs_pager_want(const void *ptr, size_t bytes, zs_pager_use use);

/* The range is not in use any more. Also allowed without a want, for memory that has just been written. */
void zs_pager_done(const void *ptr, size_t bytes);

/* --- lending ------------------------------------------------------------------------------------------------------ */

/* Like zs_pager_want for writing, but the work is to be done at *at: in a buffer that is read and written past the
 * page cache, at half the price; `ptr` itself where the range is not on disk, or cannot be lent. Only between _open
 * and _close. Until then the mapping may show the range as it was. */
zs_status zs_pager_lend(void *ptr, size_t bytes, void **at);

/* The work is done; `changed`: and has to be written. */
void zs_pager_give_back(void *ptr, size_t bytes, bool changed);

/* A step begins: ranges may be lent, and may be fetched ahead for it. Other writes to them must come before. */
void zs_pager_open(void);

/* It has ended: waits until all that was lent is written, so that the mapping shows it, on all ranks. ZS_ERR_SYSTEM
 * if something could not be. */
zs_status zs_pager_close(void);

/* Makes _open and _close of this thread do nothing, until it is called with false: its steps are part of a longer
 * one. */
void zs_pager_nest(bool nested);

/* Discards the range: drops its pages without writing them back. It may read as zeros. */
void zs_pager_zero(const void *ptr, size_t bytes);

#endif
