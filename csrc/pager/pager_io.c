/* pager_io.c - see pager_io.h.
 *
 * A few system calls for each way. In: reading is begun, then page tables are filled, which waits for it. Out:
 * writeback is begun, later page tables are emptied, writeback waited for, and the cache dropped. A page leaves the
 * cache only once it is unmapped, so of ranks that map each other's files the last one does it.
 */
#define _GNU_SOURCE /* sync_file_range, fallocate, MADV_POPULATE_READ */
#include "pager/pager_io.h"

#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ /* Linux 5.14; older headers lack them */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

enum { AT_ONCE = 512 << 10 }; /* bytes that any disk takes in one request: the kernel follows advice up to that size */

/* A piece of a range in one rank's file. */
typedef struct piece {
    int fd, part;
    off_t offset, bytes;
} piece;

/* The piece at `ptr`, which goes no further than `end`. */
static piece piece_at(const zs_pager_map *map, const char *ptr, const char *end)
{
    size_t at = (size_t)(ptr - map->ptr), part = at / map->part_bytes, in_part = at % map->part_bytes;
    size_t left = map->part_bytes - in_part, wanted = (size_t)(end - ptr);
    return (piece){map->fds[part], (int)part, (off_t)(map->offset + in_part), (off_t)(wanted < left ? wanted : left)};
}

/* A range's pages: those that it touches, or those that are its own. */
typedef struct pages {
    char *begin, *end;
} pages;

static char *down(const char *ptr)
{
    return (char *)((uintptr_t)ptr & ~(uintptr_t)(ZS_PAGE - 1));
}

static pages touched(const char *ptr, size_t bytes)
{
    return (pages){down(ptr), down(ptr + bytes + ZS_PAGE - 1)};
}

static pages own(const char *ptr, size_t bytes)
{
    return (pages){down(ptr + ZS_PAGE - 1), down(ptr + bytes)};
}

/* Reads all of it at once. On page faults, the kernel would read around them, up to the disk's read_ahead_kb: pages
 * just dropped, and pages being written past the cache. */
static void begin_reading(const zs_pager_map *map, const pages *all)
{
    for (const char *at = all->begin; at < all->end;) {
        piece next = piece_at(map, at, all->end);
        at += next.bytes;
        for (off_t done = 0; done < next.bytes; done += AT_ONCE) {
            off_t left = next.bytes - done;
            posix_fadvise(next.fd, next.offset + done, left < AT_ONCE ? left : AT_ONCE, POSIX_FADV_WILLNEED);
        }
    }
}

int zs_pager_fetch(const zs_pager_map *map, char *ptr, size_t bytes, bool write)
{
    pages all = touched(ptr, bytes);
    size_t length = (size_t)(all.end - all.begin);
    begin_reading(map, &all);
    int err = madvise(all.begin, length, write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0 ? 0 : errno;
    if (err == EINVAL) return 0;                          /* an older kernel: pages come as they are touched */
    return err == EFAULT || err == EHWPOISON ? EIO : err; /* so it is for those who do not map files */
}

int zs_pager_write(const zs_pager_map *map, const char *ptr, size_t bytes)
{
    pages all = touched(ptr, bytes);
    int err = 0;
    for (char *at = all.begin; at < all.end;) {
        piece next = piece_at(map, at, all.end);
        at += next.bytes;
        if (next.part != map->own) continue;
        if (sync_file_range(next.fd, next.offset, next.bytes, SYNC_FILE_RANGE_WRITE) != 0 && errno != ENOSYS)
            err = errno;
    }
    return err;
}

void zs_pager_clear(const zs_pager_map *map, const char *ptr, size_t bytes)
{
    pages whole = own(ptr, bytes);
    for (char *at = whole.begin; at < whole.end;) {
        piece next = piece_at(map, at, whole.end);
        at += next.bytes;
        if (next.part == map->own)
            (void)fallocate(next.fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, next.offset, next.bytes);
    }
}

static int write_and_wait(const piece *p)
{
    unsigned all = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    return sync_file_range(p->fd, p->offset, p->bytes, all) != 0 && errno != ENOSYS ? errno : 0;
}

int zs_pager_drop(const zs_pager_map *map, char *ptr, size_t bytes, bool keep_own)
{
    pages whole = own(ptr, bytes);
    int err = 0;
    for (char *at = whole.begin; at < whole.end;) {
        piece next = piece_at(map, at, whole.end);
        char *begin = at;
        at += next.bytes;
        if (keep_own && next.part == map->own) continue;
        madvise(begin, (size_t)next.bytes, MADV_DONTNEED);
        int one = next.part == map->own ? write_and_wait(&next) : 0;
        if (one != 0) err = one;
        posix_fadvise(next.fd, next.offset, next.bytes, POSIX_FADV_DONTNEED);
    }
    return err;
}
