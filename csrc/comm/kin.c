/* kin.c - see kin.h. */
#define _GNU_SOURCE 1 /* syscall */
#include "comm/kin.h"

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
    int fd; /* -1: not looked at */
    long pid;
} process;

struct zs_kin {
    int rank, world;
    process *of; /* [world], owned */
};

void zs_kin_own_card(zs_kin_card *out)
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

/* Are they processes of one kernel that can look at each other? */
static bool near(const zs_kin_card *a, const zs_kin_card *b)
{
    return a->boot[0] != 0 && strcmp(a->boot, b->boot) == 0 && a->pids == b->pids;
}

zs_status zs_kin_new(int rank, int world, zs_kin **out)
{
    zs_kin *kin = calloc(1, sizeof *kin);
    process *of = calloc((size_t)world, sizeof *of);
    if (kin == NULL || of == NULL) {
        free(kin);
        free(of);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the process handles of %d ranks", world);
    }
    *kin = (zs_kin){rank, world, of};
    for (int r = 0; r < world; r++)
        of[r].fd = -1;
    *out = kin;
    return ZS_OK;
}

void zs_kin_free(zs_kin *kin)
{
    if (kin == NULL) return;
    for (int r = 0; r < kin->world; r++)
        if (kin->of[r].fd >= 0) close(kin->of[r].fd);
    free(kin->of);
    free(kin);
}

void zs_kin_meet(zs_kin *kin, int r, const zs_kin_card *card)
{
    zs_kin_card own;
    zs_kin_own_card(&own);
    kin->of[r].pid = (long)card->pid;
    if (r == kin->rank || card->pid == own.pid || !near(&own, card)) return;
    kin->of[r].fd = (int)syscall(SYS_pidfd_open, (pid_t)card->pid, 0);
}

static bool has_ended(const zs_kin *kin, int r)
{
    struct pollfd look = {.fd = kin->of[r].fd, .events = POLLIN};
    return look.fd >= 0 && poll(&look, 1, 0) > 0;
}

bool zs_kin_gone(const zs_kin *kin, char *sentence, size_t size)
{
    for (int r = 0; r < kin->world; r++) {
        if (!has_ended(kin, r)) continue;
        snprintf(sentence, size, "rank %d (pid %ld) exited; see its output for the cause", r, kin->of[r].pid);
        return true;
    }
    return false;
}
