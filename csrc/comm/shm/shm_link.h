/* shm_link.h - how ranks of one host find each other: sockets that carry file descriptors.
 *
 * Each rank calls all lower ranks, one after the other, and then answers all higher ones, one at a time. Caller and
 * answerer say who they are, with a token that proves that they belong together, then the answerer gives its
 * descriptors (SCM_RIGHTS), then the caller. After that no socket is needed.
 *
 * In turn, because the kernel limits what a user without privileges has under way: descriptors that are sent and not
 * yet received may be no more than a process may have open, of all ranks and jobs together. So a rank sends only to one
 * that is listening, no more than one message at a time, and tries again if others have used up that limit. Rank 0
 * calls nobody, and who has called all lower ranks answers: nobody waits in a circle.
 *
 * Why not names in /dev/shm: containers give it 64 MB, and names outlive a kill -9. Why a pidfd from the process
 * itself: process ids do not cross pid namespaces and are reused.
 */
#ifndef ZS_SHM_LINK_H
#define ZS_SHM_LINK_H

#include <sys/types.h>

#include "base/status.h"

enum { ZS_LINK_TOKEN = 16 }; /* bytes */

/* The descriptors that a rank gives to its peers; that of the flats, which all have in common, comes from rank 0
 * alone. */
typedef enum zs_link_fd { ZS_LINK_CONTROL, ZS_LINK_BUCKETS, ZS_LINK_PIDFD, ZS_LINK_FLATS, ZS_LINK_FDS } zs_link_fd;

/* One rank as its peers get to know it. */
typedef struct zs_link_party {
    pid_t pid;            /* as it knows itself */
    int fds[ZS_LINK_FDS]; /* -1: none */
} zs_link_party;

/* Is given a rank that was met, whose descriptors it takes over, also if it fails. */
typedef zs_status (*zs_link_adopt)(void *arg, int rank, const zs_link_party *party);

typedef struct zs_link {
    int listener; /* from zs_link_listen */
    int rank, world;
    const char *const *addresses; /* [world] */
    unsigned char token[ZS_LINK_TOKEN];
    double seconds;      /* how long to wait for the next of the others */
    uint64_t layout;     /* must be the same on all ranks: guards against mixed builds */
    zs_link_party party; /* this rank */
    zs_link_adopt adopt; /* called once for each other rank, with `arg` */
    void *arg;
} zs_link;

/* Listens on a fresh abstract unix socket; `address` (>= 108 bytes) gets its name, *fd the socket. */
zs_status zs_link_listen(char *address, size_t size, int *fd);

/* Meets all peers. After a failure, some of them may have been adopted. */
zs_status zs_link_connect(const zs_link *link);

#endif
