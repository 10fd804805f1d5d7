/* gpu.h - the internals of the transports for GPUs.
 *
 *   comm_gpu.c        flats and gathers, small exchanges, the check of order
 *   gpu_order.c       which move differs if ranks diverged
 *   gpu_round.c       reducing
 *   gpu_transports.c  the tables
 *   backend.h         what moves the bytes
 */
#ifndef ZS_GPU_H
#define ZS_GPU_H

#include "comm/comm_local.h"
#include "comm/gpu/backend.h"
#include "device/arena.h"
#include "device/cuda_api.h"

/* What ranks compare to verify that they asked their backends for the same moves in the same order. */
typedef struct zs_gpu_order {
    uint64_t gave_up;           /* this rank has abandoned its backward here */
    uint64_t count;             /* number of moves */
    uint64_t hash;              /* of all moves */
    zs_fingerprint fingerprint; /* compared when a session ends */
} zs_gpu_order;

enum { ZS_GPU_MOVES = 256 }; /* moves that are remembered, since all ranks last agreed */

/* A move that was asked for. */
typedef struct zs_gpu_move {
    uint64_t hash;  /* of all moves up to it */
    char what[112]; /* in words; truncated */
} zs_gpu_move;

typedef struct zs_gpu_comm {
    zs_comm base;
    zs_comm *control;    /* between the hosts; counted reference */
    zs_backend *backend; /* owned */
    uint64_t flats;      /* number so far */
    size_t living;       /* live units */
    zs_arena *areas;     /* owned; what rounds receive into; NULL: none yet */
    zs_gpu_order order;
    uint64_t agreed;              /* how many moves, of all, were the same on all ranks at the last comparison */
    zs_gpu_move *moves;           /* [ZS_GPU_MOVES + 1] those since; then the last of more; owned */
    zs_gpu_move *last;            /* of them; NULL: none yet */
    zs_gpu_order *orders;         /* [world] the ranks' orders, as last compared; owned */
    zs_fingerprint *fingerprints; /* [world] room for the fingerprints among them; owned */
    zs_cu_event *idle;            /* [n_idle] unused events; owned */
    size_t n_idle, idle_room;
} zs_gpu_comm;

/* ZS_OK if the transport works and has found no error meanwhile. */
zs_status zs_gpu_usable(zs_gpu_comm *comm);

/* Records a move before it is made; if moves block, asks whether all ranks are about to make it: ZS_ERR_DIVERGED. */
zs_status zs_gpu_note(zs_gpu_comm *comm, const char *what, const char *unit, size_t bytes);

/* A move has failed: reports the reason to the peers, stops the backend, and returns `status`. */
zs_status zs_gpu_fail(zs_gpu_comm *comm, zs_status status);

/* Handles the result of a wait for the peers' hosts. An interrupted one (Ctrl-C) fails as a move does: the GPUs here
 * may wait for peers that this rank will not reach, and the next wait for these hosts would block again. */
zs_status zs_gpu_after_wait(zs_gpu_comm *comm, zs_status status);

/* Creates the arena that rounds receive into, unless it exists. */
zs_status zs_gpu_make_areas(zs_gpu_comm *comm);

/* Takes an event, for ordering only / returns it. */
zs_status zs_gpu_event_take(zs_gpu_comm *comm, zs_cu_event *out);
void zs_gpu_event_give(zs_gpu_comm *comm, zs_cu_event event);

/* --- gpu_order.c -------------------------------------------------------------------------------------------------- */

/* Records that this rank asks for a move. */
void zs_gpu_order_add(zs_gpu_comm *comm, const char *what, const char *unit, size_t bytes);

/* This rank's last move, in words. */
const char *zs_gpu_order_last(const zs_gpu_comm *comm);

/* Does any rank's order, of those just exchanged, differ from rank 0's? Sets *rank to the first such rank. */
bool zs_gpu_order_differs(const zs_gpu_comm *comm, int *rank);

/* Fails with ZS_ERR_DIVERGED, and names the first move in which rank `other` and rank 0 differ. Collective. */
zs_status zs_gpu_order_fail(zs_gpu_comm *comm, int other);

/* --- comm_gpu.c: the rest of the table, see comm_ops.h ------------------------------------------------------------ */

/* By the field's name. */
void zs_gpu_abort(zs_comm *comm, const char *reason);
zs_status zs_gpu_broadcast(zs_comm *comm, void *data, size_t bytes, int root);
zs_status zs_gpu_broadcast_device(zs_comm *comm, void *data, size_t bytes, int root);
size_t zs_gpu_bytes(const zs_comm *comm);
void zs_gpu_close(zs_comm *comm);
void zs_gpu_destroy(zs_comm *comm);
zs_status zs_gpu_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all);
zs_status zs_gpu_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out);
zs_status zs_gpu_gather_device(zs_comm *comm, const void *mine, size_t bytes, void *all);
zs_status zs_gpu_gather_finish(zs_comm *comm, zs_gathering *gathering);
zs_status zs_gpu_gather_start(zs_comm *comm, const zs_flat_mem *flat, const char *name, zs_target to,
                              zs_gathering **out);
zs_status zs_gpu_give_up(zs_comm *comm);
zs_status zs_gpu_read_end(zs_comm *comm, zs_reader *reader, zs_phase phase);
zs_status zs_gpu_reserve(zs_comm *comm, const zs_arena *plan);

/* --- gpu_round.c: units' part of the table, see comm_ops.h -------------------------------------------------------- */

/* room: device memory. */
zs_room zs_gpu_room(const zs_comm *comm, const zs_cunit_spec *spec);

typedef struct zs_gpu_unit {
    zs_cunit base;
    zs_cunit *control; /* its round between the hosts, without a bucket; owned */
    zs_mem *received;  /* area of that round, NULL: none */
    zs_cu_event read;  /* the bucket of the last round has been read */
    uint64_t session;  /* the session in which that was last recorded */
} zs_gpu_unit;

/* zs_round_ops, by the field's name. */
zs_status zs_gpu_unit_init(zs_comm *comm, zs_cunit *cunit);
void zs_gpu_unit_clear(zs_comm *comm, zs_cunit *cunit);
void zs_gpu_renamed(zs_comm *comm, zs_cunit *cunit);
zs_status zs_gpu_usable_for_rounds(zs_comm *comm);
zs_status zs_gpu_send(zs_comm *comm, zs_cunit *cunit);
zs_status zs_gpu_arrive(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);
zs_status zs_gpu_share(zs_comm *comm, zs_cunit *cunit);
zs_status zs_gpu_release(zs_comm *comm, zs_cunit *cunit);
void zs_gpu_drop(zs_comm *comm, zs_cunit *cunit);
zs_status zs_gpu_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);

/* tell, said and end: forwarded to the transport between hosts. */
void zs_gpu_publish(zs_comm *comm, zs_topic topic, const char *text);
const char *zs_gpu_published(const zs_comm *comm, int rank, zs_topic topic);
zs_status zs_gpu_end(zs_comm *comm, zs_fingerprint *fingerprints, bool *all);

#endif
