/* process_watch.h - watches ranks that are processes on this host, and notices their exits.
 *
 * A pidfd refers to one process forever, while its number may be reused; it becomes readable when the process exits,
 * however that happens. */
#ifndef ZS_PROCESS_WATCH_H
#define ZS_PROCESS_WATCH_H

#include "base/status.h"

/* Identifies a rank's process to the others: its kernel, and its number there. */
typedef struct zs_process_id {
    char boot[40]; /* the kernel's boot id; empty: unknown */
    uint64_t pids; /* its pid namespace */
    int64_t pid;
} zs_process_id;

typedef struct zs_process_watch zs_process_watch;

/* Fills in this process's id. */
void zs_process_own_id(zs_process_id *out);

/* *new* record of the processes of `world` ranks, all unknown. */
zs_status zs_process_watch_new(int rank, int world, zs_process_watch **out);

/* Frees it; NULL allowed. */
void zs_process_watch_free(zs_process_watch *processes);

/* Watches the process of rank `r` from now on, if it is another process of the same kernel. */
void zs_process_watch_add(zs_process_watch *processes, int r, const zs_process_id *id);

/* Has the process of rank `r` exited, as far as this one can see? Any thread. */
bool zs_process_has_ended(const zs_process_watch *processes, int r);

/* Its number, on its host. */
long zs_process_pid(const zs_process_watch *processes, int r);

#endif
