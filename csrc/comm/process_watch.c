/* process_watch.c - see process_watch.h. */
#define _GNU_SOURCE 1 /* syscall */
#include "comm/process_watch.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* the same on all architectures; older kernel headers lack it */
#endif

/* One rank's process. */
typedef struct process {
    int fd; /* -1: not watched */
    long pid;
} process;

struct zs_process_watch {
    int rank, world;
    zs_process_id own;
    process *of; /* [world], owned */
};

void zs_process_own_id(zs_process_id *out)
{
    struct stat info;
    memset(out, 0, sizeof *out);
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file != NULL) {
        if (fgets(out->boot, sizeof out->boot, file) == NULL) out->boot[0] = 0;
        fclose(file);
    }
    if (stat("/proc/self/ns/pid", &info) == 0) out->pids = info.st_ino;
    out->pid = getpid();
}

/* Are they processes of one kernel that can see each other? */
static bool near(const zs_process_id *a, const zs_process_id *b)
{
    return a->boot[0] != 0 && strcmp(a->boot, b->boot) == 0 && a->pids == b->pids;
}

zs_status zs_process_watch_new(int rank, int world, zs_process_watch **out)
{
    zs_process_watch *processes = calloc(1, sizeof *processes);
    process *of = calloc((size_t)world, sizeof *of);
    if (processes == NULL || of == NULL) {
        free(processes);
        free(of);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the process handles of %d ranks", world);
    }
    *processes = (zs_process_watch){.rank = rank, .world = world, .of = of};
    zs_process_own_id(&processes->own);
    for (int r = 0; r < world; r++)
        of[r].fd = -1;
    *out = processes;
    return ZS_OK;
}

void zs_process_watch_free(zs_process_watch *processes)
{
    if (processes == NULL) return;
    for (int r = 0; r < processes->world; r++)
        if (processes->of[r].fd >= 0) close(processes->of[r].fd);
    free(processes->of);
    free(processes);
}

void zs_process_watch_add(zs_process_watch *processes, int r, const zs_process_id *id)
{
    processes->of[r].pid = (long)id->pid;
    if (r == processes->rank || id->pid == processes->own.pid || !near(&processes->own, id)) return;
    processes->of[r].fd = (int)syscall(SYS_pidfd_open, (pid_t)id->pid, 0);
}

bool zs_process_has_ended(const zs_process_watch *processes, int r)
{
    struct pollfd look = {.fd = processes->of[r].fd, .events = POLLIN};
    return look.fd >= 0 && poll(&look, 1, 0) > 0 && (look.revents & POLLIN) != 0;
}

long zs_process_pid(const zs_process_watch *processes, int r)
{
    return processes->of[r].pid;
}
