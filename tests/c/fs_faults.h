/* fs_faults.h - what becomes of the calls of fs.h, in tests.
 *
 * Each call asks before and tells after. So calls are counted, the nth can fail, be cut short or be the process's
 * last, and all can be written down, with what was written, for a test that asks what a power cut would have left.
 */
#ifndef ZS_FS_FAULTS_H
#define ZS_FS_FAULTS_H

#include "base/status.h"
#include "checkpoint/fs_watch.h"

/* From now on: the nth call (1: the next) and the `times` - 1 calls behind it suffer `what`: an errno by name ("ENOSPC", "EIO",
 * "EINTR", ...) with which they fail, undone; "short": reads and writes do half; "kill", "killafter": the process is killed
 * before or after the call; "killshort": after half of it. nth 0: none. *calls: how many there were since the last time. */
zs_status zs_fs_set_faults(long nth, const char *what, long times, long *calls);

/* Appends all calls to the file `path` from now on; NULL: no longer. ZS_ERR_SYSTEM if that fails, or if a call could not be
 * appended before. (The format is fs_faults.c's.) */
zs_status zs_fs_set_log(const char *path);

/* Who has to be told to look (zs_fs_watch). */
extern const zs_fs_watcher zs_fs_faults;

#endif
