/* shm_link.h - how ranks of one host find each other: sockets that carry file descriptors.
 *
 * The one idea: each rank connects to all lower ranks and is called by all higher ones. Both sides send one message: who
 * they are, a token that proves they belong together, and four descriptors (SCM_RIGHTS). After that no socket is needed.
 *
 * Why not names in /dev/shm: containers give it 64 MB, and names outlive a kill -9. Why a pidfd from the process itself:
 * process ids do not cross pid namespaces and are reused.
 */
#ifndef ZS_SHM_LINK_H
#define ZS_SHM_LINK_H

#include <sys/types.h>

#include "base/status.h"

enum { ZS_LINK_TOKEN = 16 }; /* bytes */

/* The descriptors that a rank gives to its peers. */
typedef enum zs_link_fd { ZS_LINK_CONTROL, ZS_LINK_FLATS, ZS_LINK_BUCKETS, ZS_LINK_PIDFD, ZS_LINK_FDS } zs_link_fd;

/* One rank as its peers get to know it. */
typedef struct zs_link_party {
    pid_t pid;            /* as it knows itself */
    int fds[ZS_LINK_FDS]; /* -1: none */
} zs_link_party;

typedef struct zs_link {
    int listener; /* from zs_link_listen */
    int rank, world;
    const char *const *addresses; /* [world] */
    unsigned char token[ZS_LINK_TOKEN];
    double seconds;  /* how long to wait for the others */
    uint64_t layout; /* must be the same on all ranks: guards against mixed builds */
} zs_link;

/* Listens on a fresh abstract unix socket; `address` (>= 108 bytes) gets its name, *fd the socket. */
zs_status zs_link_listen(char *address, size_t size, int *fd);

/* Meets all peers. parties[rank] is given, the others are filled in; on failure none is left open. */
zs_status zs_link_meet(const zs_link *link, zs_link_party *parties);

#endif
