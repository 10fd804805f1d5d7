/* nccl_local.h - shared by nccl_comm.c, nccl_lock.c, nccl_ops.c and nccl_monitor.c only.
 *
 * A thread that calls NCCL on a communicator holds its lock, and has checked under that lock that it is not
 * poisoned. So an abort, which frees NCCL's state behind the handle, never runs during another call. */
#ifndef ZS_NCCL_LOCAL_H
#define ZS_NCCL_LOCAL_H

#include "comm/nccl/nccl_comm.h"
#include "comm/nccl/nccl_lib.h"

#include <pthread.h>

/* Work that the monitor checks. */
typedef struct zs_nccl_watched {
    zs_nccl_work *ring; /* oldest at `first` */
    size_t room, first, count;
    double since; /* when the oldest became the oldest */
} zs_nccl_watched;

struct zs_nccl_comm {
    zs_nccl_comm *next; /* in the watchdog's list */
    const zs_nccl *nccl;
    char name[64];
    int rank, world;
    zs_nccl_options options;
    unsigned lifetime;    /* zs_lifetime() at creation: differs in forked children */
    pthread_mutex_t lock; /* guards what follows, and NCCL */
    zs_nccl_handle handle;
    const char *launching; /* a call that NCCL still runs in the background; NULL: none */
    zs_status failure;     /* ZS_OK, or poisoned */
    zs_nccl_result result; /* NCCL's, if NCCL failed */
    char why[1024];        /* its message */
    bool reports;          /* `lost` is still to be called */
    bool ending;           /* it is being freed: nothing handles Ctrl-C */
    zs_nccl_watched watched;
    double gone_since; /* when a peer was first seen to have exited while work was outstanding, 0: never */
};

/* Takes the lock for a call of NCCL: not in a forked child, not poisoned, no call in the background. On failure the
 * lock is not held. */
zs_status zs_nccl_enter(zs_nccl_comm *comm);

/* Releases the lock, and calls `lost` if necessary. Returns `status`. */
zs_status zs_nccl_leave(zs_nccl_comm *comm, zs_status status);

/* Handles `result` of `call`, with the lock held: waits for NCCL's call in the background; poisons unless it was a
 * bad argument; fails with the record. Releases the lock from time to time. */
zs_status zs_nccl_settle(zs_nccl_comm *comm, const char *call, zs_nccl_result result);

/* The same, but checks at least once, and waits at most `seconds`. */
zs_status zs_nccl_settle_within(zs_nccl_comm *comm, const char *call, zs_nccl_result result, double patience);

/* With the lock held: keeps the record, and aborts; the first failure wins. */
void zs_nccl_poison(zs_nccl_comm *comm, zs_status failure, const char *why);

/* The same, for `result` of `call`. */
void zs_nccl_poison_by(zs_nccl_comm *comm, const char *call, zs_nccl_result result);

/* Starts to monitor `comm`, with the process's thread, which starts with the first communicator. ZS_ERR_STATE in a
 * process that was forked from one where it runs. */
zs_status zs_nccl_monitor_add(zs_nccl_comm *comm);

/* Stops monitoring it before this returns; the thread ends with the last one. Unknown ones are allowed. Call it
 * without the lock of any communicator. */
void zs_nccl_monitor_remove(zs_nccl_comm *comm);

#endif
