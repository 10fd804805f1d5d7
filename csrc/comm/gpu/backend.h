/* backend.h - moves device memory between ranks: NCCL, or torch's process group.
 *
 * A transport for GPUs (comm_gpu.c) has two parts. A transport between the ranks' hosts decides which ranks take part
 * and in which order, and notices ranks that exit; a backend only moves bytes, in streams, in an order that all ranks
 * have agreed on. So each backend is one small table.
 *
 * Rules: all ranks make the same calls in the same order. A call may return before anything has moved; work queued in
 * its stream afterwards runs after the move, on this rank. The move reads the results of earlier work in that stream
 * (or forked to it). */
#ifndef ZS_BACKEND_H
#define ZS_BACKEND_H

#include "comm/comm.h"
#include "device/device.h"

typedef struct zs_backend zs_backend;

/* Sends each rank's shards to the ranks that sum them. */
typedef struct zs_swap {
    const char *name;           /* of the unit, for messages */
    int n;                      /* number of flats */
    size_t bytes[ZS_MAX_FLATS]; /* of one shard of each */
    /* Shard p of flat f is at send[f] + p * bytes[f]; NULL: this rank has no gradients; it sends bytes that no rank
     * reads. */
    const char *send[ZS_MAX_FLATS];
    const int *shard_of; /* [world] the shard that each rank gets */
    char *receive;       /* rank r's shard of flat f arrives at receive + r * stride + at[f] */
    size_t stride;       /* of all flats together */
    const size_t *at;    /* [n] */
    char *filler;        /* `stride` bytes to send for a rank without gradients; otherwise NULL */
} zs_swap;

typedef struct zs_backend_ops {
    const zs_comm_ops *table; /* the transport's */
    /* full[r * bytes ...] = shard of rank r, in `stream`. `shard` may be its own place in `full`. */
    zs_status (*gather)(zs_backend *, zs_stream stream, const void *shard, char *full, size_t bytes);
    /* In the reduce stream. */
    zs_status (*swap)(zs_backend *, const zs_swap *);
    /* All messages at once, in the reduce stream: the n-th with a rank pairs with the n-th that it has with this one.
     * NULL: not supported. */
    zs_status (*exchange)(zs_backend *, const char *unit, const zs_message *messages, size_t n);
    /* Broadcasts `data` of `root`, in the compute stream. */
    zs_status (*broadcast)(zs_backend *, void *data, size_t bytes, int root);
    /* ZS_OK, or the reason why no move is possible any more. NULL if only the calls themselves can find out. */
    zs_status (*check)(zs_backend *);
    /* Ends outstanding moves in any state; every later call fails with `why`. */
    void (*abort)(zs_backend *, const char *why);
    void (*destroy)(zs_backend *);
} zs_backend_ops;

/* Head of every backend's own struct. */
struct zs_backend {
    const zs_backend_ops *ops;
    const zs_device *device;
    int rank, world;
    bool meets; /* hosts agree before each move: it waits for the peers, or ranks may run different units */
};

/* Uses the process group that torch registered under `group_name`: NCCL, or any that takes the device's tensors. The
 * reference for other backends, and the fallback where they are not available. */
zs_status zs_backend_c10d_new(const zs_comm *control, const zs_device *device, const char *group_name,
                              zs_backend **out);

/* How to use NCCL: equal on all ranks. */
typedef struct zs_nccl_choices {
    int32_t ctas;               /* zs_nccl_ctas (nccl_comm.h) */
    int32_t min_ctas, max_ctas; /* of each communicator, 1 to 64; 0: NCCL's choice, but without deadlocks */
    int32_t communicators;      /* 2: gathers and reductions overlap; 1: in turn, with half of NCCL's own memory */
    int32_t any_order;          /* 1: ranks may run different units, or the same in another order */
} zs_nccl_choices;

/* Uses its own NCCL communicators, which the ranks of `control` create now, together, within its timeout. A thread
 * monitors them: if a peer on this host dies, or work makes no progress for the timeout, it aborts outstanding work.
 * Besides the errors of zs_nccl_comm_new: ZS_ERR_VALUE for more CTAs than the GPUs have room for, ZS_ERR_DIVERGED
 * for choices that differ. */
zs_status zs_backend_nccl_new(zs_comm *control, const zs_device *device, const zs_nccl_choices *choices,
                              zs_backend **out);

#endif
