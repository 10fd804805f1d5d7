/* hosts.h - the transport for several hosts with the same number of ranks each, in two levels.
 *
 * Ranks of one host communicate over `local` (shm), and each rank with its counterparts, the ranks at its place on the
 * other hosts, over separate connections (`links`). So data crosses the wire once per host, not once per rank: shards
 * go straight into memory that the host's ranks share, and gradients are summed within the host first.
 *
 * Its head is a c10d transport over all ranks. That agrees on each collective before it starts (comm/turn.h), so all
 * ranks know that the others have reached it, and does all that the two levels cannot do, such as gathers that some
 * ranks do not need.
 *
 *   comm_hosts.c     the table, creation and end
 *   hosts_queue.c    queued gathers and rounds
 *   hosts_gather.c   memory that a host's ranks share, and gathering into it
 *   hosts_signals.c  signals to the host's ranks: turns and arrivals
 *   hosts_turns.c    ranks' turns before each collective, in two levels
 *   hosts_round.c    reducing; hosts_pieces.c: the part that crosses hosts
 *   hosts_coded.c    sums that cross hosts in fewer bytes
 *   hosts_params.c   parameters that cross in fewer bytes
 *   hosts_links.c    the connections to the counterparts, and what moves over them
 */
#ifndef ZS_HOSTS_H
#define ZS_HOSTS_H

#include "comm/c10d/c10d.h"
#include "comm/wire_sizes.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/uio.h>

typedef struct zs_hosts_turns zs_hosts_turns;
typedef struct zs_hosts_op zs_hosts_op;

typedef struct zs_hosts_comm {
    zs_c10d_comm c10d;          /* of all ranks */
    zs_comm *local;             /* of this host's ranks; counted reference; used only here */
    struct links *links;        /* to the counterparts; owned */
    int hosts, host;            /* number of hosts, and this one's index */
    int lane;                   /* this rank's place on its host */
    zs_flat_mem bells;          /* of `local`: a page for each of the host's ranks */
    uint64_t gathers;           /* in two levels, so far; the same on all ranks */
    uint64_t slots;             /* a digest of the slots created so far, in order */
    size_t lost_bytes;          /* of all its units, see zs_hosts_lost_new */
    zs_hosts_turns *turns;      /* owned; NULL: they go over the group of all ranks */
    zs_hosts_op *first;         /* the first whose turn has not been received yet; borrowed */
    pthread_mutex_t local_lock; /* of `local`, while the thread may use it */
} zs_hosts_comm;

/* Ranks of each host. */
static inline int zs_hosts_per_host(const zs_hosts_comm *self)
{
    return self->c10d.base.per_host;
}

/* The rank at place `lane` on host `host`. */
static inline int zs_hosts_rank(const zs_hosts_comm *self, int host, int lane)
{
    return host * zs_hosts_per_host(self) + lane;
}

/* --- hosts_links.c ------------------------------------------------------------------------------------------------ */

/* Pieces of memory in one direction: each flat, and a header. */
enum { ZS_HOSTS_PARTS = ZS_MAX_FLATS + 1 };

/* One exchange between a rank and a counterpart. Its owner zeroes it, and keeps it and the memory in place until it is
 * done or left. */
typedef struct zs_hosts_move {
    struct iovec out[ZS_HOSTS_PARTS], in[ZS_HOSTS_PARTS]; /* (changes as it moves) */
    int n_out, n_in;
    void (*arrived)(void *arg, bool good); /* called when all has been received, on any thread; NULL: nothing is */
    void *arg;
    _Atomic int left; /* directions that are not done; 0: done, or never begun */
    struct zs_hosts_move *next[2];
} zs_hosts_move;

/* Begins it; all ranks begin theirs in the same order. After a failure `arrived` is not called. */
zs_status zs_hosts_move_begin(zs_hosts_comm *self, int host, zs_hosts_move *move);

/* Are all `moves` [hosts] done, or will they never be? / Waits for that. */
bool zs_hosts_moves_done(zs_hosts_comm *self, const zs_hosts_move *moves);
zs_status zs_hosts_moves_finish(zs_hosts_comm *self, const zs_turn *turn, zs_hosts_move *moves);

/* Abandons them: if they are not done, all connections end, so nothing writes to their memory afterwards. */
void zs_hosts_moves_leave(zs_hosts_comm *self, zs_hosts_move *moves);

/* `fds` [2 * hosts], copied: for each host a connected socket to send over, and one to receive from; -1 for this
 * one. */
zs_status zs_hosts_links_new(zs_hosts_comm *self, const int *fds);
void zs_hosts_links_stop(zs_hosts_comm *self, const char *why); /* idempotent */
void zs_hosts_links_free(zs_hosts_comm *self);                  /* NULL allowed */

/* Returns `status`. If the transport is now unusable, reports this and the reason to the host's other ranks at once. */
zs_status zs_hosts_pass(zs_hosts_comm *self, zs_status status);

/* --- hosts_signals.c ---------------------------------------------------------------------------------------------- */

/* Creates the pages; collective over the host. */
zs_status zs_hosts_signals_new(zs_hosts_comm *self);

/* The signal that a gather's `n` collectives have ended. */
typedef struct zs_hosts_arrival zs_hosts_arrival;
zs_status zs_hosts_arrival_new(zs_hosts_comm *self, uint64_t gather, int n, zs_hosts_arrival **out);

/* One of them has ended, on any thread; the last frees it. If all succeeded, this rank's shards of the gather are
 * there. */
void zs_hosts_arrived(void *arrival, bool good);

/* The events that ranks of a host watch for on each other's pages. */
typedef enum zs_hosts_event {
    ZS_HOSTS_ARRIVED,  /* its shards of gather `number` */
    ZS_HOSTS_SENT,     /* its turn `number` */
    ZS_HOSTS_RECEIVED, /* turn `number` of the hosts that it receives for its host */
} zs_hosts_event;

/* This rank has sent, or received, turns up to `number`. Any thread. */
void zs_hosts_mark(zs_hosts_comm *self, zs_hosts_event event, uint64_t number);

/* This rank receives no more turns. */
void zs_hosts_mark_failed(zs_hosts_comm *self, const char *why);

/* One event of all ranks of the host. */
typedef struct zs_hosts_awaited {
    zs_hosts_comm *self;
    zs_hosts_event event;
    uint64_t number;
    const char *why; /* why it will never happen; NULL: unknown; borrowed */
} zs_hosts_awaited;

/* Has it happened, or is there a `why`? Waits for a change, for at most `seconds`. */
bool zs_hosts_poll(zs_hosts_awaited *it, double seconds);

/* Waits until the shards of all ranks of the host are there, this rank's too. */
zs_status zs_hosts_await(zs_hosts_comm *self, const zs_turn *turn, uint64_t gather);

/* Reports to the host's other ranks that this rank sends no more: their waits fail at once. */
void zs_hosts_break_off(zs_hosts_comm *self, const char *why);

/* --- hosts_turns.c ------------------------------------------------------------------------------------------------ */

typedef enum zs_hosts_ticket_state {
    ZS_HOSTS_QUEUED,  /* it belongs to the thread */
    ZS_HOSTS_BEGUN,   /* all ranks have the same turn, and it has begun here */
    ZS_HOSTS_STOPPED, /* the turns are there; the thread sends only urgent ones until zs_hosts_go_on */
} zs_hosts_ticket_state;

/* This rank's next collective, and its progress. */
typedef struct zs_hosts_ticket {
    zs_turn mine;
    zs_turn *turns; /* [world] of all ranks, once they are there; borrowed */
    /* If all ranks have the same turn: begins it, on the thread. False: leaves it to the script's thread. NULL: all
     * are left to it. */
    bool (*begin)(zs_hosts_comm *, struct zs_hosts_ticket *);
    bool urgent;                 /* it precedes all others */
    zs_hosts_ticket_state state; /* read it after zs_hosts_wait_ticket */
    struct zs_hosts_ticket *next;
} zs_hosts_ticket;

/* Queues it, and does not wait. The ticket must stay in place until zs_hosts_wait_ticket, or zs_hosts_take_back. */
void zs_hosts_enqueue(zs_hosts_comm *self, zs_hosts_ticket *ticket);

/* Waits for all ranks' turns. After a failure the ticket is not queued, and its turn is lost. */
zs_status zs_hosts_wait_ticket(zs_hosts_comm *self, zs_hosts_ticket *ticket);

/* Is there nothing to wait for? */
bool zs_hosts_has_turned(zs_hosts_comm *self, const zs_hosts_ticket *ticket);

/* After a STOPPED ticket: sends the next ones / returns them to the caller, as none of them was sent. */
void zs_hosts_go_on(zs_hosts_comm *self);
void zs_hosts_take_back(zs_hosts_comm *self);

/* From now on ranks send their turns in two levels, if the process group can; collective. */
zs_status zs_hosts_turns_new(zs_hosts_comm *self);

/* Turns can no longer be received, on other hosts either; returns `status`. */
zs_status zs_hosts_turns_fail(zs_hosts_comm *self, zs_status status);

/* Stops receiving turns. Idempotent. */
void zs_hosts_turns_stop(zs_hosts_comm *self);

/* Stops and frees them. NULL allowed. */
void zs_hosts_turns_free(zs_hosts_comm *self);

/* --- hosts_queue.c ------------------------------------------------------------------------------------------------ */

/* Actions on an op. */
typedef struct zs_hosts_acts {
    bool (*can)(const zs_hosts_comm *, const zs_hosts_op *); /* may the thread begin it? NULL: always */
    zs_status (*begin)(zs_hosts_comm *, zs_hosts_op *);      /* on the thread, once all ranks have the same turn */
    zs_status (*begin_here)(zs_hosts_comm *, zs_hosts_op *); /* on the script's thread, once all ranks agree */
    void (*undo)(zs_hosts_comm *, zs_hosts_op *);            /* after a failure; NULL: nothing */
} zs_hosts_acts;

/* A gather or a round. Its owner must keep it in place while it is `queued`. */
struct zs_hosts_op {
    zs_hosts_ticket ticket; /* the first member; the owner provides its turns, [zs_hosts_op_turns] */
    const zs_hosts_acts *acts;
    zs_model model;
    zs_status status;
    char why[ZS_C10D_TEXT]; /* of its failure */
    bool queued;            /* its turn has not been received yet */
    zs_hosts_op *next;
};

/* Room for turns: all ranks', and this rank's next one. */
static inline size_t zs_hosts_op_turns(const zs_hosts_comm *self)
{
    return (size_t)self->c10d.base.world + 1;
}

/* Queues it; it begins as soon as all ranks have queued it. After a failure it is not queued. */
zs_status zs_hosts_op_enqueue(zs_hosts_comm *self, zs_hosts_op *op, const zs_turn *turn);

/* Waits until `end`, and all that was queued before it, has begun; NULL: all. A failure of any of these is reported
 * here or by zs_hosts_op_failure. */
zs_status zs_hosts_wait_until(zs_hosts_comm *self, const zs_hosts_op *end);
zs_status zs_hosts_wait_queued(zs_c10d_comm *comm);
zs_status zs_hosts_op_failure(const zs_hosts_op *op);

/* Would zs_hosts_wait_until return at once? (It may still wait for earlier operations.) */
bool zs_hosts_has_begun(zs_hosts_comm *self, const zs_hosts_op *op);

/* --- hosts_gather.c: see comm_ops.h ------------------------------------------------------------------------------- */

/* slot_new. */
zs_status zs_hosts_slot_new(zs_comm *comm, size_t bytes, zs_mem **out);

/* gather_start. */
zs_status zs_hosts_gather_start(zs_comm *comm, const zs_flat_mem *flat, const char *unit, zs_target to,
                                zs_gathering **out);

/* gather_finish. */
zs_status zs_hosts_gather_finish(zs_comm *comm, zs_gathering *gathering);

/* --- hosts_params.c ----------------------------------------------------------------------------------------------- */

/* code_room: of all hosts' codes. */
size_t zs_hosts_code_room(const zs_comm *comm, zs_wire wire, zs_dtype dtype, size_t shard_bytes);

/* Codes a shard, in `bytes`. */
void zs_hosts_encode_shard(const float *shard, size_t bytes, zs_bf16 *out);

/* Replaces parameters of `bytes` by the values that their codes decode to. */
void zs_hosts_round(float *params, size_t bytes);

/* A gather's codes, which are decoded into their places as they arrive. It frees itself. */
typedef struct zs_hosts_decoding zs_hosts_decoding;
zs_status zs_hosts_decoding_new(zs_hosts_comm *self, size_t code_bytes, zs_mem *codes, zs_target to,
                                zs_hosts_arrival *arrival, zs_hosts_decoding **out);

/* The argument of zs_hosts_code_arrived, to call when the collective from `host` has ended, on any thread; that
 * signals `arrival` last. */
void *zs_hosts_decoding_part(zs_hosts_decoding *decoding, int host);
void zs_hosts_code_arrived(void *part, bool good);

/* --- hosts_coded.c ------------------------------------------------------------------------------------------------ */

/* Creates what codes have lost, zeroed, and counts it; none if sums are exact. */
zs_status zs_hosts_lost_new(zs_hosts_comm *self, const zs_wire_sums *sums, float **lost);

/* Frees it. */
void zs_hosts_lost_free(zs_hosts_comm *self, const zs_wire_sums *sums, float *lost);

/* Zeroes it. */
void zs_hosts_lost_drop(const zs_hosts_comm *self, const zs_wire_sums *sums, float *lost);

/* Multiplies it; values that become infinite or NaN are set to 0. */
void zs_hosts_lost_scale(const zs_hosts_comm *self, const zs_wire_sums *sums, float *lost, double factor);

/* Encodes the sums for a host, and keeps the error in `lost` for the next round. */
void zs_hosts_encode(const zs_wire_sums *sums, float *lost, const float *values, zs_bf16 *out);

/* Decodes `bytes` of codes. */
void zs_hosts_decode(const zs_bf16 *code, size_t bytes, float *out);

/* --- hosts_round.c: see comm_ops.h -------------------------------------------------------------------------------- */

/* room. */
zs_room zs_hosts_room(const zs_comm *comm, const zs_cunit_spec *spec);

/* bucket_new. */
zs_status zs_hosts_bucket_new(zs_comm *comm, size_t bytes, zs_bucket *out);

/* bucket_free. */
void zs_hosts_bucket_free(zs_comm *comm, zs_bucket *bucket);

/* Of units. */
zs_status zs_hosts_unit_init(zs_comm *comm, zs_cunit *cunit);
void zs_hosts_unit_clear(zs_comm *comm, zs_cunit *cunit);
void zs_hosts_renamed(zs_comm *comm, zs_cunit *cunit);
void zs_hosts_finish_round(zs_comm *comm, zs_cunit *cunit);

/* Of rounds. Once all ranks have reached it, the round begins: it is summed within the host, and the sums start to
 * cross. */
zs_status zs_hosts_send(zs_comm *comm, zs_cunit *cunit);
zs_status zs_hosts_begun(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *done);
zs_status zs_hosts_arrive(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);
zs_status zs_hosts_arrive_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);
void zs_hosts_drop(zs_comm *comm, zs_cunit *cunit);
zs_status zs_hosts_share(zs_comm *comm, zs_cunit *cunit);
zs_status zs_hosts_release(zs_comm *comm, zs_cunit *cunit);
zs_status zs_hosts_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);
void zs_hosts_rescale(zs_comm *comm, zs_cunit *cunit, double factor);

#endif
