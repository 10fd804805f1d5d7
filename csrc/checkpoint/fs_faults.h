/* fs_faults.h - for tests: what becomes of the calls of fs.h.
 *
 * The one idea: each call asks before and tells after. So calls are counted, the nth can fail, be cut short or be the process's
 * last, and all can be written down, with what was written, for a test that asks what a power cut would have left.
 */
#ifndef ZS_FS_FAULTS_H
#define ZS_FS_FAULTS_H

#include "base/status.h"

/* From now on: the nth call (1: the next) and the `times` - 1 calls behind it suffer `what`: an errno by name ("ENOSPC", "EIO",
 * "EINTR", ...) with which they fail, undone; "short": reads and writes do half; "kill", "killafter": the process is killed
 * before or after the call; "killshort": after half of it. nth 0: none. *calls: how many there were since the last time. */
zs_status zs_fs_set_faults(long nth, const char *what, long times, long *calls);

/* Appends all calls to the file `path` from now on; NULL: no longer. ZS_ERR_SYSTEM if that fails, or if a call could not be
 * appended before. (The format is fs_faults.c's.) */
zs_status zs_fs_set_log(const char *path);

/* What befalls one call. */
typedef struct zs_fs_fate {
    int err;         /* fail with it; 0: do not */
    bool half;       /* read and write half */
    bool kill_after; /* then die */
} zs_fs_fate;

/* One call, for the log; NULL and 0 for what it has not. */
typedef struct zs_fs_entry {
    const char *call, *path, *to;
    int fd;
    int64_t offset, length;
    const void *data; /* the bytes that were written: as many as the call returned */
} zs_fs_entry;

/* Before a call. It may not come back. */
zs_fs_fate zs_fs_before(void);

/* After it: what is to be returned, where the call has returned `result`. errno is kept. */
long zs_fs_after(zs_fs_fate fate, long result, const zs_fs_entry *entry);

#endif
