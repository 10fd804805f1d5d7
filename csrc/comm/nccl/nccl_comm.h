/* nccl_comm.h - one NCCL communicator: made, used, watched, broken off.
 *
 * A collective that a peer does not come to spins on the GPU for ever, and whoever synchronises with the GPU hangs with
 * it, in code that is not ours (loss.item()). So nobody here waits for the GPU; a thread of our own looks after all
 * communicators ten times a second (nccl_monitor.c), and where one can go no further it aborts it: the kernels end, the
 * synchronisation returns, and the next call on the communicator fails with what the thread has found.
 *
 *   usable     calls queue their operation on the given stream and return; an event recorded there then comes after it
 *   poisoned   aborted, by the first failure or the monitor; each call fails with that first record
 *
 * Bad arguments (ZS_ERR_VALUE) are refused before NCCL sees them, and poison nothing. All ranks make the same calls in
 * the same order, on the CUDA device that was current when the communicator was made. One thread calls at a time; the
 * monitor is kept out by a lock. In a forked child every call fails with ZS_ERR_STATE and nothing is touched.
 */
#ifndef ZS_NCCL_COMM_H
#define ZS_NCCL_COMM_H

#include "comm/comm.h"
#include "shim/tensor.h"

typedef struct zs_nccl_comm zs_nccl_comm;

/* How many of the GPU's multiprocessors NCCL may take from computation. */
typedef enum zs_nccl_ctas {
    ZS_NCCL_CTAS_DEFAULT,
    ZS_NCCL_CTAS_EFFICIENCY, /* few (NCCL 2.27) */
} zs_nccl_ctas;

typedef struct zs_nccl_options {
    const char *name; /* for messages; copied */
    double timeout;   /* seconds: of the making, and without progress of outstanding work */
    zs_nccl_ctas ctas;
    int min_ctas, max_ctas; /* 1 to 64; 0: as NCCL likes. Equal on all ranks, like `ctas` */
    /* Both may be NULL. They are called by the monitor's thread: without the GIL, and not to call the functions
     * below. gone: is a peer known to be gone? Then with a sentence about it, which ends up in the exception. lost:
     * the communicator has been aborted on this rank by `failure`, and why; the place to tell the peers. Once. Calls
     *   of the functions below call it as well, where they find the failure. */
    bool (*gone)(void *arg, char *sentence, size_t size);
    void (*lost)(void *arg, zs_status failure, const char *why);
    void *arg; /* of both; valid until zs_nccl_comm_free */
} zs_nccl_options;

/* Something queued on the GPU. `done` is asked by the monitor's thread and must not block (cuEventQuery). */
typedef struct zs_nccl_work {
    bool (*done)(void *event);
    void *event;
    const char *what; /* for messages: "all-gather of unit 'layers.3'". Not copied: valid until the work is forgotten */
} zs_nccl_work;

/* What goes to a peer, and what comes from it. */
typedef struct zs_nccl_message {
    const void *send;
    void *receive;
    size_t bytes; /* of either; not 0 */
    int peer;     /* may be this rank */
} zs_nccl_message;

/* Makes a communicator of the ranks of `control`, over which the ranks agree first on NCCL's version, the options
 * and the id that rank 0 has made; `control` is borrowed, for the time of this call. Collective, and waits for all
 * ranks, at most half of `timeout` once they have agreed: it fails on all ranks or on none. ZS_ERR_UNSUPPORTED: no
 * NCCL on some rank, or too old for the options; ZS_ERR_DIVERGED: other options or another version there;
 * ZS_ERR_VALUE: options without sense; ZS_ERR_NCCL, ZS_ERR_PEER, ZS_ERR_TIMEOUT: the making itself. */
zs_status zs_nccl_comm_new(zs_comm *control, const zs_nccl_options *options, zs_nccl_comm **out);

/* Ends the communicator. It waits, up to 10 s, for what is still under way, and aborts what does not end; whoever
 * still needs results has waited for them before. NULL allowed. */
void zs_nccl_comm_free(zs_nccl_comm *comm);

/* ZS_OK, or what the communicator was poisoned by. Costs a lock. */
zs_status zs_nccl_comm_check(zs_nccl_comm *comm);

/* Poisons the communicator with ZS_ERR_STATE and `why`, unless it is already. `lost` is not called. */
void zs_nccl_comm_abort(zs_nccl_comm *comm, const char *why);

/* Does so with `failure`, another communicator's, and with its words as they are. */
void zs_nccl_comm_follow(zs_nccl_comm *comm, zs_status failure, const char *why);

/* Aborts all communicators of this process. Before the interpreter ends: libraries are going then. */
void zs_nccl_abort_all(const char *why);

/* Hands the monitor something that the GPU has been given to do: if the oldest of these makes no end for `timeout`
 * seconds from when it became the oldest, the communicator is aborted (ZS_ERR_TIMEOUT). In the order of one stream. */
zs_status zs_nccl_comm_watch(zs_nccl_comm *comm, zs_nccl_work work);

/* The monitor asks about `event` no more: call before it is destroyed or recorded anew. Unknown ones are allowed. */
void zs_nccl_comm_forget(zs_nccl_comm *comm, const void *event);

/* The operations. Pointers are device memory, `stream` is a CUstream. Nothing is done for sizes of 0. */

/* full[r * shard_bytes ...] = shard of rank r. `shard` lies outside of `full`, or in its own place there. */
zs_status zs_nccl_all_gather(zs_nccl_comm *comm, const void *shard, void *full, size_t shard_bytes, void *stream);

/* All messages in one launch. The n-th with a peer is the n-th that it has with this rank, of as many bytes. */
zs_status zs_nccl_messages(zs_nccl_comm *comm, const zs_nccl_message *messages, size_t count, void *stream);

/* `data` of rank `root` to all, in place. */
zs_status zs_nccl_broadcast(zs_nccl_comm *comm, void *data, size_t bytes, int root, void *stream);

#endif
