/* c10d_peers.c - finds ranks that have exited, and their reasons. See c10d.h.
 *
 * A process group only reports that a connection broke. Two other sources know more: the kernel, for ranks on this
 * host (process_watch.h), and the process group's store, in which a rank that fails leaves its reason, and a rank that
 * saw another's process exit leaves one for it. */
#include "comm/c10d/c10d.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REASON = 384 };

zs_status zs_c10d_peers_connect(zs_c10d_comm *comm)
{
    int world = comm->base.world;
    zs_process_id own, *all = calloc((size_t)world, sizeof *all);
    zs_process_own_id(&own);
    zs_status status = all != NULL ? zs_process_watch_new(comm->base.rank, world, &comm->peers)
                                   : ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the state of %d ranks", world);
    ZS_THEN(status, zs_comm_exchange(&comm->base, &own, sizeof own, all));
    for (int r = 0; r < world && status == ZS_OK; r++)
        zs_process_watch_add(comm->peers, r, &all[r]);
    free(all);
    return status;
}

/* The reason for a rank that left none, written by one that saw its process exit. */
static const char seen_to_end[] = "exited (see its output for the cause)";

/* Writes the sentence about rank `r`, which has exited. Only ranks of its host can see its process: they inform the
 * others. */
static void describe_gone(const zs_c10d_comm *comm, int r, char *sentence, size_t size)
{
    char reason[REASON] = "";
    zs_group_read_text(comm->group, r, reason, sizeof reason);
    if (reason[0] == 0) {
        zs_group_publish_text(comm->group, r, seen_to_end);
        snprintf(reason, sizeof reason, "%s", seen_to_end);
    }
    const char *how = strcmp(reason, seen_to_end) == 0 ? "" : "failed: ";
    snprintf(sentence, size, "rank %d (pid %ld) %s%s", r, zs_process_pid(comm->peers, r), how, reason);
}

/* The rank that has exited; -1: none was found. One whose exit others saw comes first: more ranks may have exited
 * because of it. */
static int find_first(const zs_c10d_comm *comm, bool ask_store)
{
    int found = -1;
    for (int r = 0; r < comm->base.world; r++)
        ask_store = ask_store || zs_process_has_ended(comm->peers, r);
    for (int r = 0; ask_store && r < comm->base.world; r++) {
        char reason[REASON] = "";
        if (r == comm->base.rank) continue;
        zs_group_read_text(comm->group, r, reason, sizeof reason);
        if (strcmp(reason, seen_to_end) == 0) return r;
        if (found < 0 && (reason[0] != 0 || zs_process_has_ended(comm->peers, r))) found = r;
    }
    return found;
}

bool zs_c10d_find_gone(zs_c10d_comm *comm, bool ask_store, char *sentence, size_t size)
{
    if (comm->peers == NULL) return false;
    if (comm->gone < 0) comm->gone = find_first(comm, ask_store);
    if (comm->gone < 0) return false;
    describe_gone(comm, comm->gone, sentence, size);
    return true;
}
