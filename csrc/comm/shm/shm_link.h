/* shm_link.h - connects the ranks of one host: sockets that carry file descriptors.
 *
 * Each rank calls all lower ranks, one after the other, and then answers all higher ones, one at a time. Caller and
 * answerer identify themselves, with a token that proves that they belong together; then the answerer sends its
 * descriptors (SCM_RIGHTS), then the caller. After that no socket is needed.
 *
 * They take turns because the kernel limits the descriptors that an unprivileged user has in flight: over all ranks and
 * jobs together, no more than one process may have open. So a rank sends only to one that is listening, one message at
 * a time, and retries if others have used up that limit. Rank 0 calls no rank, and a rank that has called all lower
 * ones answers: ranks never wait in a circle.
 *
 * Why not names in /dev/shm: containers give it 64 MB, and names outlive a kill -9. Why a pidfd from the process
 * itself: process ids do not cross pid namespaces and are reused. */
#ifndef ZS_SHM_LINK_H
#define ZS_SHM_LINK_H

#include <sys/types.h>

#include "base/status.h"

enum { ZS_LINK_TOKEN = 16 }; /* bytes */

/* The descriptors that a rank sends to its peers; the one of the flats, which all share, comes from rank 0 alone. */
typedef enum zs_link_fd { ZS_LINK_CONTROL, ZS_LINK_BUCKETS, ZS_LINK_PIDFD, ZS_LINK_FLATS, ZS_LINK_FDS } zs_link_fd;

/* One rank, as its peers see it. */
typedef struct zs_link_party {
    pid_t pid;            /* in its own namespace */
    int fds[ZS_LINK_FDS]; /* -1: none */
} zs_link_party;

/* Called with a connected rank, whose descriptors it *steals*, also if it fails. */
typedef zs_status (*zs_link_adopt)(void *arg, int rank, const zs_link_party *party);

typedef struct zs_link {
    int listener; /* from zs_link_listen */
    int rank, world;
    const char *const *addresses; /* [world] */
    unsigned char token[ZS_LINK_TOKEN];
    double seconds;      /* how long to wait for each next rank */
    uint64_t layout;     /* must be the same on all ranks: detects mixed builds */
    zs_link_party party; /* this rank */
    zs_link_adopt adopt; /* called once for each other rank, with `arg` */
    void *arg;
} zs_link;

/* Listens on a fresh abstract unix socket; `address` (>= 108 bytes) gets its name, *fd the socket. */
zs_status zs_link_listen(char *address, size_t size, int *fd);

/* Connects to all peers. After a failure, some of them may have been adopted. */
zs_status zs_link_connect(const zs_link *link);

#endif
