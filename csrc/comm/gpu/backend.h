/* backend.h - what carries device memory from rank to rank: NCCL, or torch's process group.
 *
 * A transport for GPUs (comm_gpu.c) is two things. A transport between the ranks' hosts says who takes part, in which
 * order, and who is gone; a backend only moves bytes, in streams, in an order that all ranks have agreed on. So each
 * way of moving is one small table.
 *
 * Rules: all ranks make the same calls in the same order. A call may return before anything has moved; what is queued
 * in its stream afterwards comes after the move, on this rank. What is read has been queued in that stream before (or
 * forked to it).
 */
#ifndef ZS_BACKEND_H
#define ZS_BACKEND_H

#include "comm/comm.h"
#include "device/device.h"

typedef struct zs_backend zs_backend;

/* Each rank's shards go to the ranks that sum them. */
typedef struct zs_swap {
    const char *name;           /* of the unit, for messages */
    int n;                      /* flats */
    size_t bytes[ZS_MAX_FLATS]; /* of a shard of each */
    /* Slice p of flat f is at send[f] + p * bytes[f]; NULL: this rank brings nothing, and what arrives from it is never
     * looked at. */
    const char *send[ZS_MAX_FLATS];
    const int *shard_of; /* [world] which shard a rank gets */
    char *receive;       /* rank r's part of flat f arrives at receive + r * stride + at[f] */
    size_t stride;       /* of all flats together */
    const size_t *at;    /* [n] */
    char *filler;        /* `stride` bytes to send for a rank without gradients; otherwise NULL */
} zs_swap;

typedef struct zs_backend_ops {
    const zs_comm_ops *table; /* the transport's */
    bool blocks; /* moves wait on the host for the peers: it has to be sure before each that they will come */
    /* full[r * bytes ...] = shard of rank r, in `stream`. `shard` may be its own place in `full`. */
    zs_status (*gather)(zs_backend *, zs_stream stream, const void *shard, char *full, size_t bytes);
    /* In the reduce stream. */
    zs_status (*swap)(zs_backend *, const zs_swap *);
    /* `data` of `root` to all, in the compute stream. */
    zs_status (*broadcast)(zs_backend *, void *data, size_t bytes, int root);
    /* ZS_OK, or why nothing can be moved any more. NULL where nobody but the calls themselves can know. */
    zs_status (*check)(zs_backend *);
    /* What is under way ends, wherever it stands; every later call fails with `why`. */
    void (*abort)(zs_backend *, const char *why);
    void (*destroy)(zs_backend *);
} zs_backend_ops;

/* Head of every backend's own struct. */
struct zs_backend {
    const zs_backend_ops *ops;
    const zs_device *device;
    int rank, world;
};

/* Over the process group of torch that is registered under `group_name`: NCCL there, or anything that takes tensors
 * of the device. The reference for the others, and for where they cannot be had. */
zs_status zs_backend_c10d_new(const zs_comm *control, const zs_device *device, const char *group_name,
                              zs_backend **out);

/* How NCCL is to be used: equal on all ranks. */
typedef struct zs_nccl_choices {
    int32_t ctas;               /* zs_nccl_ctas (nccl_comm.h) */
    int32_t min_ctas, max_ctas; /* of each communicator, 1 to 64; 0: as NCCL likes, up to what keeps the ranks from
                                 * waiting for each other for ever */
    int32_t communicators;      /* 2: gathers and reductions at a time; 1: in turn, with half of NCCL's own memory */
} zs_nccl_choices;

/* Over communicators of our own of NCCL, which the ranks of `control` make now, together, within its timeout. A
 * thread looks after them: where a peer on this host dies, or work makes no end for the timeout, what is under way
 * is aborted. Besides what zs_nccl_comm_new fails with: ZS_ERR_VALUE for more CTAs than the GPUs have room for,
 * ZS_ERR_DIVERGED for choices that differ. */
zs_status zs_backend_nccl_new(zs_comm *control, const zs_device *device, const zs_nccl_choices *choices,
                              zs_backend **out);

#endif
