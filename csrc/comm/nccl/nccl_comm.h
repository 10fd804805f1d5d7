/* nccl_comm.h - one NCCL communicator: created, used, monitored, aborted.
 *
 * A collective that a peer never reaches spins on the GPU forever, and a thread that synchronizes with the GPU hangs
 * with it, in code that is not ours (loss.item()). So nothing here waits for the GPU; a separate thread checks all
 * communicators ten times a second (nccl_monitor.c), and aborts one that is stuck: the kernels end, the synchronization
 * returns, and the next call on the communicator fails with the thread's finding.
 *
 *   usable     calls queue their operation on the given stream and return; an event recorded there then comes after it
 *   poisoned   aborted, by the first failure or the monitor; each call fails with that first record
 *
 * Bad arguments (ZS_ERR_VALUE) are refused before NCCL sees them, and poison nothing. All ranks make the same calls
 * in the same order, on the CUDA device that was current when the communicator was created. One thread calls at a
 * time; the monitor is kept out by a lock. In a forked child every call fails with ZS_ERR_STATE and nothing is
 * touched. */
#ifndef ZS_NCCL_COMM_H
#define ZS_NCCL_COMM_H

#include "comm/comm.h"
#include "shim/tensor.h"

typedef struct zs_nccl_comm zs_nccl_comm;

/* NCCL's use of the GPU's multiprocessors. */
typedef enum zs_nccl_ctas {
    ZS_NCCL_CTAS_DEFAULT,
    ZS_NCCL_CTAS_EFFICIENCY, /* few (NCCL 2.27) */
} zs_nccl_ctas;

typedef struct zs_nccl_options {
    const char *name; /* for messages; copied */
    double timeout;   /* seconds: for creation, and without progress of outstanding work */
    zs_nccl_ctas ctas;
    int min_ctas, max_ctas; /* 1 to 64; 0: NCCL's choice. Equal on all ranks, like `ctas` */
    /* Both may be NULL. The monitor's thread calls them, without the GIL; they must not call the functions below. gone:
     * has a peer exited? Then it writes a sentence, which becomes part of the exception. lost: the communicator was
     * aborted on this rank by `failure`, with the reason; use it to inform the peers. Called once. Functions below also
     * call it if they find the failure. */
    bool (*gone)(void *arg, char *sentence, size_t size);
    void (*lost)(void *arg, zs_status failure, const char *why);
    void *arg; /* of both; valid until zs_nccl_comm_free */
} zs_nccl_options;

/* Something queued on the GPU. The monitor's thread calls `done`, which must not block (cuEventQuery). */
typedef struct zs_nccl_work {
    bool (*done)(void *event);
    void *event;
    const char *what; /* for messages: "all-gather of unit 'layers.3'". Not copied: valid until the work is forgotten */
} zs_nccl_work;

/* Creates a communicator of the ranks of `control`, over which the ranks first agree on NCCL's version, the options
 * and the id that rank 0 created; `control` is borrowed for this call. Collective; waits for all ranks, at most half
 * of `timeout` once they have agreed: it fails on all ranks or on none. ZS_ERR_UNSUPPORTED: a rank has no NCCL, or
 * one too old for the options; ZS_ERR_DIVERGED: other options or another version there; ZS_ERR_VALUE: invalid
 * options; ZS_ERR_NCCL, ZS_ERR_PEER, ZS_ERR_TIMEOUT: the creation itself failed. */
zs_status zs_nccl_comm_new(zs_comm *control, const zs_nccl_options *options, zs_nccl_comm **out);

/* Closes the communicator. Waits up to 10 s for outstanding work, and aborts the rest; callers that still need results
 * must wait for them before. NULL allowed. */
void zs_nccl_comm_free(zs_nccl_comm *comm);

/* ZS_OK, or the failure that poisoned the communicator. Costs a lock. */
zs_status zs_nccl_comm_check(zs_nccl_comm *comm);

/* Poisons the communicator with ZS_ERR_STATE and `why`, unless it is already. `lost` is not called. */
void zs_nccl_comm_abort(zs_nccl_comm *comm, const char *why);

/* Poisons it with `failure` of another communicator, and its message unchanged. */
void zs_nccl_comm_follow(zs_nccl_comm *comm, zs_status failure, const char *why);

/* Aborts all communicators of this process. Before the interpreter exits, which unloads libraries. */
void zs_nccl_abort_all(const char *why);

/* Makes the monitor watch work queued on the GPU: if the oldest such work does not end within `timeout` seconds from
 * when it became the oldest, the communicator is aborted (ZS_ERR_TIMEOUT). In the order of one stream. */
zs_status zs_nccl_comm_watch(zs_nccl_comm *comm, zs_nccl_work work);

/* Makes the monitor forget `event`: call this before it is destroyed or recorded again. Unknown ones are allowed. */
void zs_nccl_comm_forget(zs_nccl_comm *comm, const void *event);

/* The operations. Pointers are device memory, `stream` is a CUstream. Sizes of 0 are no-ops. */

/* full[r * shard_bytes ...] = shard of rank r. `shard` is outside of `full`, or its own place there. */
zs_status zs_nccl_all_gather(zs_nccl_comm *comm, const void *shard, void *full, size_t shard_bytes, void *stream);

/* All messages in one launch. The n-th message with a peer pairs with the n-th that it has with this rank, of equal
 * size. */
zs_status zs_nccl_messages(zs_nccl_comm *comm, const zs_message *messages, size_t count, void *stream);

/* Broadcasts `data` of rank `root`, in place. */
zs_status zs_nccl_broadcast(zs_nccl_comm *comm, void *data, size_t bytes, int root, void *stream);

#endif
