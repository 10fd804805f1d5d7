/* fs_watch.h - the place from which all calls of fs.h can be seen.
 *
 * A watcher runs before and after each call, so it may count calls, log them, or make one fail
 * or be cut short. Nothing in the package watches; tests do (tests/c/fs_faults.c).
 *
 * Threads: both are called on any thread that makes file calls, at once, and in forked children: a watcher holds no
 * lock while it may be forked. `after` gets a fate of zeros for a call that began before there was a watcher.
 */
#ifndef ZS_FS_WATCH_H
#define ZS_FS_WATCH_H

#include <stdbool.h>
#include <stdint.h>

/* The injected fault of a call. */
typedef struct zs_fs_fate {
    int err;         /* fail with it; 0: do not */
    bool half;       /* read and write half */
    bool kill_after; /* then die */
} zs_fs_fate;

/* One call, for the log; fields that it lacks are NULL or 0. */
typedef struct zs_fs_entry {
    const char *call, *path, *to;
    int fd;
    int64_t offset, length;
    const void *data; /* the bytes that were written; the call returned their number */
} zs_fs_entry;

/* The watcher. */
typedef struct zs_fs_watcher {
    /* Before a call. It may not come back. */
    zs_fs_fate (*before)(void);
    /* After it: the result to return instead of the call's `result`. errno is kept. */
    long (*after)(zs_fs_fate fate, long result, const zs_fs_entry *entry);
} zs_fs_watcher;

/* The contents of zshard._core's capsule _file_watch. */
typedef struct zs_fs_watching {
    void (*watch)(const zs_fs_watcher *watcher); /* zs_fs_watch */
} zs_fs_watching;

/* Watches all calls of this process from now on; NULL: none. It must outlive them. */
void zs_fs_watch(const zs_fs_watcher *watcher);

#endif
