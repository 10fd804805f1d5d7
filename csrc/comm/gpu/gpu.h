/* gpu.h - the internals of the transports for GPUs.
 *
 *   comm_gpu.c        flats and gathers, small exchanges, the check of order
 *   gpu_order.c       which move differs if ranks diverged
 *   gpu_turn.c        turns before each move: ranks may run different units
 *   gpu_round.c       reducing
 *   gpu_coded.c       the same in fewer bytes between hosts
 *   gpu_state.c       failures, memory to receive into
 *   gpu_transports.c  the tables
 *   backend.h         what moves the bytes
 */
#ifndef ZS_GPU_H
#define ZS_GPU_H

#include "comm/comm_local.h"
#include "comm/gpu/backend.h"
#include "comm/turn.h"
#include "comm/wire_sizes.h"
#include "device/arena.h"
#include "device/cuda_api.h"

/* Ranks compare these to verify that they asked their backends for the same moves in the same order. */
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
    zs_turns turns;      /* without `ops`: hosts meet at the begin and end of sessions alone */
    zs_turn *room;       /* [world + 1] of turns; owned */
    size_t living;       /* live units */
    size_t lost_bytes;   /* of all their `lost` */
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

/* A move has failed: reports the reason to the peers, stops the backend, and returns `status`. */
zs_status zs_gpu_fail(zs_gpu_comm *comm, zs_status status);

/* Handles the result of a wait for the peers' hosts. An interrupted one (Ctrl-C) fails as a move does: the GPUs here
 * may wait for peers that this rank will not reach, and the next wait for these hosts would block again. */
zs_status zs_gpu_after_wait(zs_gpu_comm *comm, zs_status status);

/* Creates the arena that rounds receive into, unless it exists / takes `bytes` of it, for the reduce stream / for the
 * gather stream / returns it; NULL: nothing. */
zs_status zs_gpu_make_areas(zs_gpu_comm *comm);
zs_status zs_gpu_take_area(zs_gpu_comm *comm, size_t bytes, zs_mem **area);
zs_status zs_gpu_take_codes(zs_gpu_comm *comm, size_t bytes, zs_mem **area);
void zs_gpu_return_area(const zs_gpu_comm *comm, zs_mem **area);

/* Takes an event, for ordering only / returns it. */
zs_status zs_gpu_event_take(zs_gpu_comm *comm, zs_cu_event *out);
void zs_gpu_event_give(zs_gpu_comm *comm, zs_cu_event event);

/* --- gpu_order.c -------------------------------------------------------------------------------------------------- */

/* Records that this rank asks for a move. */
void zs_gpu_order_add(zs_gpu_comm *comm, const char *what, const char *unit, size_t bytes);

/* This rank's last move, in words. */
const char *zs_gpu_order_last(const zs_gpu_comm *comm);

/* An exchange of the hosts that does not compare their calls: the exchanged bytes show the difference. */
zs_status zs_gpu_compare_hosts(const zs_gpu_comm *comm, const void *mine, size_t bytes, void *all);

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
    uint64_t number;   /* the same on all ranks */
    zs_cunit *control; /* its round between the hosts, without a bucket; owned */
    zs_mem *received;  /* area of that round, NULL: none */
    zs_cu_event read;  /* the bucket of the last round has been read */
    uint64_t session;  /* the session in which that was last recorded */
    zs_wire_sums sums; /* where gradients cross hosts as codes */
    zs_mem *lost;      /* [hosts] of `sums.bytes`: what codes have lost so far; owned; NULL: exact */
    zs_sources hosts;  /* the headers of a coded round that was sent */
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

/* --- gpu_coded.c -------------------------------------------------------------------------------------------------- */

/* Bytes of the code of a shard of parameters; 0, uncoded, also on one host, and over backends without `exchange`. */
size_t zs_gpu_code_bytes(const zs_comm *comm, zs_wire wire, zs_dtype dtype, size_t shard_bytes);

/* code_room. */
size_t zs_gpu_code_room(const zs_comm *comm, zs_wire wire, zs_dtype dtype, size_t shard_bytes);

/* Gathers the codes of all ranks' shards, in the gather stream. */
zs_status zs_gpu_gather_codes(zs_gpu_comm *comm, size_t code_bytes, const char *shard, char *codes);

/* Decodes `bytes` of codes. */
zs_status zs_gpu_decode(const zs_gpu_comm *comm, zs_stream stream, const char *codes, size_t bytes, char *out);

/* The sums of a unit's gradients that cross hosts; exact: none, ranks send each other shards. */
zs_wire_sums zs_gpu_sums_of(const zs_comm *comm, const zs_cunit_spec *spec);

/* Memory of a coded round / of a unit's `lost`. */
size_t zs_gpu_coded_bytes(const zs_comm *comm, const zs_cunit_spec *spec, const zs_wire_sums *sums);
size_t zs_gpu_lost_bytes(const zs_comm *comm, const zs_wire_sums *sums);

/* Determines whether a unit's rounds are coded, and allocates their memory / frees it. */
zs_status zs_gpu_coded_init(zs_gpu_comm *comm, zs_gpu_unit *unit);
void zs_gpu_coded_clear(zs_gpu_comm *comm, zs_gpu_unit *unit);

/* Sends a coded round whose header is posted: waits for the headers of all ranks / sets its sources. */
zs_status zs_gpu_send_coded(zs_gpu_comm *comm, zs_gpu_unit *unit);
void zs_gpu_arrive_coded(zs_gpu_comm *comm, zs_gpu_unit *unit);

/* rescale, of the table. */
void zs_gpu_rescale(zs_comm *comm, zs_cunit *cunit, double factor);

/* --- gpu_turn.c --------------------------------------------------------------------------------------------------- */

/* Exchanges turns over the control transport. */
extern const zs_turns_ops zs_gpu_turns_ops;

/* Returns when all ranks are about to make this move, and takes part in the others' gathers until then:
 * ZS_ERR_DIVERGED if that is impossible, with nothing queued. No-ops without turns. */
zs_status zs_gpu_agree(zs_gpu_comm *comm, const zs_turn *turn);
zs_status zs_gpu_agree_on_gather(zs_gpu_comm *comm, const zs_flat_mem *flat, const char *unit, bool coded);
zs_status zs_gpu_agree_on_round(zs_gpu_comm *comm, const zs_gpu_unit *unit, zs_turn_kind kind);
zs_status zs_gpu_agree_to_talk(zs_gpu_comm *comm, zs_turn_kind kind, size_t bytes, int root);

/* read_begin, of the table. */
zs_status zs_gpu_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading);

/* publish, published, locate and end: forwarded to the transport between hosts. */
void zs_gpu_publish(zs_comm *comm, zs_topic topic, const char *text);
const char *zs_gpu_published(const zs_comm *comm, int rank, zs_topic topic);
bool zs_gpu_locate(zs_comm *comm, char (*texts)[ZS_WHERE]);
zs_status zs_gpu_end(zs_comm *comm, zs_fingerprint *fingerprints, bool *all);

#endif
