/* process_watch.h - which ranks are processes on this host, and which of them have ended.
 *
 * A pidfd stands for one process for ever, while its number may become another's; it becomes readable when the
 * process ends, however that comes about.
 */
#ifndef ZS_PROCESS_WATCH_H
#define ZS_PROCESS_WATCH_H

#include "base/status.h"

/* What identifies a rank's process to the others: the kernel that it runs on, and its number there. */
typedef struct zs_process_id {
    char boot[40]; /* the kernel's boot id; empty: not known */
    uint64_t pids; /* its namespace of pids */
    int64_t pid;
} zs_process_id;

typedef struct zs_process_watch zs_process_watch;

/* Fills in this process's id. */
void zs_process_own_id(zs_process_id *out);

/* New record of the processes of `world` ranks, of which none is known yet. */
zs_status zs_process_watch_new(int rank, int world, zs_process_watch **out);

/* Frees it; NULL allowed. */
void zs_process_watch_free(zs_process_watch *processes);

/* Watches the process of rank `r` from now on, if it is another one of the same kernel. */
void zs_process_watch_add(zs_process_watch *processes, int r, const zs_process_id *id);

/* Has a watched process ended? Then with a sentence that names it. Any thread. */
bool zs_process_any_ended(const zs_process_watch *processes, char *sentence, size_t size);

#endif
