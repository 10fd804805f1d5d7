/* c10d_peers.c - which ranks have exited, and why. See c10d.h.
 *
 * A process group only reports that a connection broke. Two other sources know more: the kernel, for ranks on this
 * host (a pidfd becomes readable when its process exits), and the process group's store, in which a rank that fails
 * leaves its reason, and a rank that saw another's process exit leaves one for it. */
#define _GNU_SOURCE /* syscall */
#include "comm/c10d/c10d.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* the same on all architectures; older kernel headers lack it */
#endif

enum { WORDS = 384 };

/* How ranks find out which of them are processes of the same kernel. */
typedef struct card {
    char boot[40]; /* the kernel's boot id */
    uint64_t pids; /* its pid namespace */
    int64_t pid;
} card;

static card own_card(void)
{
    card own;
    memset(&own, 0, sizeof own);
    struct stat info;
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file != NULL) {
        if (fgets(own.boot, sizeof own.boot, file) == NULL) own.boot[0] = 0;
        fclose(file);
    }
    if (stat("/proc/self/ns/pid", &info) == 0) own.pids = info.st_ino;
    own.pid = getpid();
    return own;
}

zs_status zs_c10d_peers_connect(zs_c10d_comm *comm)
{
    int world = comm->base.world;
    card own = own_card(), *cards = calloc((size_t)world, sizeof *cards);
    comm->peers = calloc((size_t)world, sizeof *comm->peers);
    if (cards == NULL || comm->peers == NULL) {
        free(cards);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the state of %d ranks", world);
    }
    for (int r = 0; r < world; r++)
        comm->peers[r].pidfd = -1;
    zs_status status = zs_comm_exchange(&comm->base, &own, sizeof own, cards);
    for (int r = 0; r < world && status == ZS_OK; r++) {
        comm->peers[r].pid = (int)cards[r].pid;
        bool same_host = own.boot[0] != 0 && strcmp(cards[r].boot, own.boot) == 0 && cards[r].pids == own.pids;
        if (same_host && r != comm->base.rank)
            comm->peers[r].pidfd = (int)syscall(SYS_pidfd_open, comm->peers[r].pid, 0);
    }
    free(cards);
    return status;
}

void zs_c10d_peers_free(zs_c10d_comm *comm)
{
    for (int r = 0; comm->peers != NULL && r < comm->base.world; r++)
        if (comm->peers[r].pidfd >= 0) close(comm->peers[r].pidfd);
    free(comm->peers);
}

static bool has_ended(const zs_c10d_peer *peer)
{
    struct pollfd look = {.fd = peer->pidfd, .events = POLLIN};
    return peer->pidfd >= 0 && poll(&look, 1, 0) > 0 && (look.revents & POLLIN) != 0;
}

/* The reason for a rank that left none, written by one that saw its process exit. */
static const char seen_to_end[] = "exited (see its output for the cause)";

/* Writes the sentence about rank `r`, which has exited. Only ranks of its host can see its process: they inform the
 * others. */
static void tell_of(const zs_c10d_comm *comm, int r, char *sentence, size_t size)
{
    char words[WORDS] = "";
    zs_group_read_text(comm->group, r, words, sizeof words);
    if (words[0] == 0) {
        zs_group_publish_text(comm->group, r, seen_to_end);
        snprintf(words, sizeof words, "%s", seen_to_end);
    }
    const char *how = strcmp(words, seen_to_end) == 0 ? "" : "failed: ";
    snprintf(sentence, size, "rank %d (pid %d) %s%s", r, comm->peers[r].pid, how, words);
}

/* The rank that has exited; -1: none was found. One whose exit others saw comes first: more ranks may have exited
 * because of it. */
static int find_first(const zs_c10d_comm *comm, bool ask_store)
{
    int found = -1;
    for (int r = 0; r < comm->base.world; r++)
        ask_store = ask_store || has_ended(&comm->peers[r]);
    for (int r = 0; ask_store && r < comm->base.world; r++) {
        char words[WORDS] = "";
        if (r == comm->base.rank) continue;
        zs_group_read_text(comm->group, r, words, sizeof words);
        if (strcmp(words, seen_to_end) == 0) return r;
        if (found < 0 && (words[0] != 0 || has_ended(&comm->peers[r]))) found = r;
    }
    return found;
}

bool zs_c10d_find_gone(zs_c10d_comm *comm, bool ask_store, char *sentence, size_t size)
{
    if (comm->peers == NULL) return false;
    if (comm->gone < 0) comm->gone = find_first(comm, ask_store);
    if (comm->gone < 0) return false;
    tell_of(comm, comm->gone, sentence, size);
    return true;
}
