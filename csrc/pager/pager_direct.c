/* pager_direct.c - see pager_direct.h.
 *
 * Whole pages go to the disk directly, and the kernel then drops what its cache has of them; the parts of pages at
 * a range's two ends, which other ranges may share, go through the cache.
 */
#define _GNU_SOURCE /* mincore, MADV_DONTFORK */
#include "pager/pager_direct.h"

#include "base/file.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    SPARE = 6, /* buffers that are kept for the next: a piece of a step has three or four, and some are on their way */
    LOOKED = 1024 /* pages whose place is asked for at a time */
};

static size_t in_page(const char *ptr)
{
    return (size_t)((uintptr_t)ptr % ZS_PAGE);
}

/* Bytes of the pages that a range touches. */
static size_t room_for(const char *ptr, size_t bytes)
{
    return zs_round_up(in_page(ptr) + bytes, ZS_PAGE);
}

char *zs_pager_in_buffer(char *buffer, const char *ptr)
{
    return buffer + in_page(ptr);
}

/* --- buffers ------------------------------------------------------------------------------------------------------ */

static struct {
    pthread_mutex_t lock;
    struct {
        char *ptr;
        size_t room;
    } of[SPARE];
    int n;
} idle = {.lock = PTHREAD_MUTEX_INITIALIZER};

char *zs_pager_buffer_take(const char *ptr, size_t bytes)
{
    size_t room = room_for(ptr, bytes);
    char *found = NULL;
    pthread_mutex_lock(&idle.lock);
    for (int i = 0; i < idle.n && found == NULL; i++) {
        if (idle.of[i].room != room) continue;
        found = idle.of[i].ptr;
        idle.of[i] = idle.of[--idle.n];
    }
    pthread_mutex_unlock(&idle.lock);
    if (found != NULL) return found;
    found = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return NULL;
    madvise(found, room, MADV_DONTFORK);
    madvise(found, room, MADV_HUGEPAGE); /* advice, may fail */
    return found;
}

void zs_pager_buffer_give(char *buffer, const char *ptr, size_t bytes)
{
    if (buffer == NULL) return;
    size_t room = room_for(ptr, bytes);
    pthread_mutex_lock(&idle.lock);
    bool kept = idle.n < SPARE;
    if (kept) {
        idle.of[idle.n].ptr = buffer;
        idle.of[idle.n++].room = room;
    }
    pthread_mutex_unlock(&idle.lock);
    if (!kept) munmap(buffer, room);
}

void zs_pager_buffers_free(void)
{
    pthread_mutex_lock(&idle.lock);
    while (idle.n > 0) {
        idle.n--;
        munmap(idle.of[idle.n].ptr, idle.of[idle.n].room);
    }
    pthread_mutex_unlock(&idle.lock);
}

/* --- moving ------------------------------------------------------------------------------------------------------- */

/* Bytes in memory and where they belong in this rank's file. */
typedef struct place {
    char *memory;
    size_t bytes;
    off_t offset;
} place;

/* Moves all of a place by one descriptor; moved bytes come off its front. */
static int move(int fd, place *what, bool out)
{
    while (what->bytes > 0) {
        ssize_t n = out ? pwrite(fd, what->memory, what->bytes, what->offset)
                        : pread(fd, what->memory, what->bytes, what->offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EIO; /* files end behind their regions */
        what->memory += n;
        what->bytes -= (size_t)n;
        what->offset += n;
    }
    return 0;
}

static int move_cached(const zs_pager_map *map, place what, bool out)
{
    return move(map->fds[map->own], &what, out);
}

/* Whole pages; past the page cache where the file system does that. */
static int move_pages(const zs_pager_map *map, place what, bool out)
{
    int err = move(map->direct, &what, out);
    return err == EINVAL || err == EOPNOTSUPP ? move_cached(map, what, out)
                                              : err; /* it needs a stricter alignment than pages */
}

static off_t offset_of(const zs_pager_map *map, const char *ptr)
{
    return (off_t)(map->offset + (size_t)(ptr - map->ptr) % map->part_bytes);
}

/* Is most of it in the page cache? It has been used a moment ago, then. */
static bool is_cached(const char *ptr, size_t room)
{
    unsigned char pages[LOOKED];
    size_t there = 0, all = room / ZS_PAGE;
    for (size_t at = 0; at < all; at += LOOKED) {
        size_t n = all - at < LOOKED ? all - at : LOOKED;
        if (mincore((char *)(uintptr_t)ptr + at * ZS_PAGE, n * ZS_PAGE, pages) != 0) return false;
        for (size_t i = 0; i < n; i++)
            there += pages[i] & 1;
    }
    return 2 * there > all;
}

int zs_pager_fill(const zs_pager_map *map, const char *ptr, size_t bytes, char *buffer)
{
    const char *begin = ptr - in_page(ptr);
    place all = {buffer, room_for(ptr, bytes), offset_of(map, begin)};
    return is_cached(begin, all.bytes) ? move_cached(map, all, false) : move_pages(map, all, false);
}

int zs_pager_send(const zs_pager_map *map, const char *ptr, size_t bytes, char *buffer)
{
    size_t front = (ZS_PAGE - in_page(ptr)) % ZS_PAGE; /* bytes before the first whole page */
    if (front > bytes) front = bytes;
    size_t body = (bytes - front) / ZS_PAGE * ZS_PAGE, back = bytes - front - body;
    char *memory = zs_pager_in_buffer(buffer, ptr);
    off_t offset = offset_of(map, ptr);
    place head = {memory, front, offset};
    place middle = {memory + front, body, offset + (off_t)front};
    place tail = {memory + front + body, back, offset + (off_t)(front + body)};
    int err = move_pages(map, middle, true); /* the ends later: it would have to wait until they are on the disk */
    if (err == 0) err = move_cached(map, head, true);
    return err != 0 ? err : move_cached(map, tail, true);
}
