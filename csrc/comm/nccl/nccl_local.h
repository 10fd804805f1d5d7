/* nccl_local.h - what nccl_comm.c, nccl_lock.c, nccl_ops.c and nccl_monitor.c share; nobody else includes it.
 *
 * Whoever calls NCCL about a communicator holds its lock, and has seen under that lock that it is not
 * poisoned. So an abort, which frees what NCCL has behind the handle, never meets another call.
 */
#ifndef ZS_NCCL_LOCAL_H
#define ZS_NCCL_LOCAL_H

#include "comm/nccl/nccl_comm.h"
#include "comm/nccl/nccl_lib.h"

#include <pthread.h>

/* Work that the monitor asks about. */
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
    unsigned lifetime;    /* zs_lifetime() at birth: differs in forked children */
    pthread_mutex_t lock; /* guards what follows, and NCCL */
    zs_nccl_handle handle;
    const char *launching; /* a call that NCCL is still at work on in the background; NULL: none */
    zs_status failure;     /* ZS_OK, or poisoned */
    zs_nccl_result result; /* NCCL's, where it was that */
    char why[1024];        /* the words of that */
    bool tell;             /* `lost` has still to be called */
    bool ending;           /* it is being freed: nobody is there for Ctrl-C */
    zs_nccl_watched watched;
    double gone_since; /* when a peer was first seen gone while work was outstanding, 0: never */
};

/* Takes the lock for a call of NCCL: not in a forked child, not poisoned, nothing left in the background. On failure
 * the lock is not held. */
zs_status zs_nccl_enter(zs_nccl_comm *comm);

/* Gives the lock back, and calls `lost` where that has to be. Returns `status`. */
zs_status zs_nccl_leave(zs_nccl_comm *comm, zs_status status);

/* What `result` of `call` means, with the lock held: waits for what NCCL does in the background; poisons by what is
 * no bad argument; fails with the record. The lock is open now and then meanwhile. */
zs_status zs_nccl_settle(zs_nccl_comm *comm, const char *call, zs_nccl_result result);

/* The same, but looks at least once, and waits for so many seconds at most. */
zs_status zs_nccl_settle_within(zs_nccl_comm *comm, const char *call, zs_nccl_result result, double patience);

/* With the lock held: keeps the record, aborts; the first wins. */
void zs_nccl_poison(zs_nccl_comm *comm, zs_status failure, const char *why);

/* Likewise, by `result` of `call`. */
void zs_nccl_poison_by(zs_nccl_comm *comm, const char *call, zs_nccl_result result);

/* Starts to monitor `comm`, with the process's thread, which starts with the first communicator. ZS_ERR_STATE in a
 * process that was forked from one where it runs. */
zs_status zs_nccl_monitor_add(zs_nccl_comm *comm);

/* It is monitored no more when this returns; the thread ends with the last one. Unknown ones are allowed. Not with
 * the lock of a communicator held. */
void zs_nccl_monitor_remove(zs_nccl_comm *comm);

/* Seconds on the monotonic clock. */
double zs_nccl_now(void);

#endif
