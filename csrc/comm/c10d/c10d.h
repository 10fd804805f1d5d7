/* c10d.h - the c10d transport inside.
 *
 *   comm_c10d.c   the table, flats, small collectives
 *   c10d_turn.c   before each collective: do all ranks mean the same one? and the wait for it
 *   c10d_round.c  reducing
 *   c10d_peers.c  who is gone, and why
 */
#ifndef ZS_C10D_H
#define ZS_C10D_H

#include "comm/comm_local.h"
#include "device/arena.h"
#include "shim/tensor.h"

enum { ZS_C10D_PIECE = 4 << 20 }; /* bytes of a broadcast at a time */

/* Who runs a rank, as far as this process can find out. */
typedef struct zs_c10d_peer {
    int pid;
    int pidfd; /* -1: on another host, or in another namespace of pids */
} zs_c10d_peer;

typedef enum zs_c10d_kind {
    ZS_C10D_GATHER = 1,
    ZS_C10D_POST,
    ZS_C10D_SHARE,
    ZS_C10D_EXCHANGE,
    ZS_C10D_BROADCAST,
    ZS_C10D_GIVE_UP, /* nothing follows; ranks that said something else hear that their backward is over */
} zs_c10d_kind;

/* What a rank is about to do. Ranks that mean the same say the same, byte for byte. */
typedef struct zs_c10d_turn {
    uint64_t kind;    /* a zs_c10d_kind */
    uint64_t number;  /* which flat, unit, exchange or broadcast */
    uint64_t round;   /* of the unit's gradients; the root of a broadcast; else 0 */
    uint64_t bytes;   /* that each rank brings */
    uint64_t reading; /* what a gather is for, see zs_reading_told; else 0 */
    zs_past past;     /* where parameters or their gradients travel; else 0 */
    char name[88];    /* of the unit, cut off; for messages */
} zs_c10d_turn;

/* A collective that was not waited for to its end, and what torch's threads may still write to. */
typedef struct zs_c10d_stray {
    zs_work *work;
    zs_mem *memory; /* NULL: an area */
    struct zs_c10d_stray *next;
} zs_c10d_stray;

typedef struct zs_c10d_comm {
    zs_comm base;
    zs_group *group;
    uint64_t flats, units, messages; /* so many so far */
    zs_c10d_peer *peers;             /* [world] */
    int gone;                        /* the peer that was first seen to be gone, the cause of what follows; -1: none */
    size_t living;                   /* units that are not freed */
    zs_arena *areas; /* owned; what one backward has out at a time; goes with the last unit; NULL: none yet */
    bool told;       /* this rank has left its last words */
    zs_c10d_stray *strays;
    struct zs_c10d_comm *next; /* in the list of those that are kept for their strays' sake */
} zs_c10d_comm;

/* --- c10d_turn.c ------------------------------------------------------------------------------------------------------ */

/* A turn of this kind; what is not given is 0. `name` may be NULL. */
zs_c10d_turn zs_c10d_turn_of(zs_c10d_kind kind, uint64_t number, size_t bytes, const char *name);

/* Says `turn` to all ranks and waits for theirs. ZS_ERR_DIVERGED on every rank if they differ; the transport is fit for
 * use after that. Without this, a process group pairs up whatever comes next: wrong sums, or an abort inside gloo. */
zs_status zs_c10d_agree(zs_c10d_comm *comm, const zs_c10d_turn *turn);

/* Waits for the end of `work` (and frees it). A wait that is broken off (Ctrl-C, a peer that died) leaves the collective
 * running: the transport is then lost, and what it may still write to is kept for ever: all areas, and `memory` if it is
 * none of them (else NULL). */
zs_status zs_c10d_finish(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_work *work, zs_mem *memory);

/* Fails with this thread's record, put into the words of `turn`; looks for the rank that is to blame. */
zs_status zs_c10d_fail(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_status status);

/* Memory for one collective, until it is given to zs_c10d_return_area, which makes it NULL (and may get NULL). */
zs_status zs_c10d_borrow_area(zs_c10d_comm *comm, size_t bytes, zs_mem **area);
void zs_c10d_return_area(zs_c10d_comm *comm, zs_mem **area);

/* Gives all areas back, unless a collective that was not waited for may still write there. */
void zs_c10d_free_areas(zs_c10d_comm *comm);

/* --- c10d_peers.c ------------------------------------------------------------------------------------------------------- */

/* Learns who the peers are; collective. */
zs_status zs_c10d_peers_meet(zs_c10d_comm *comm);

/* Frees what that made. */
void zs_c10d_peers_free(zs_c10d_comm *comm);

/* Looks for a rank that is gone: one that left word (see the table's abort), or whose process has ended. Writes a
 * sentence about it that goes on with "while ..."; false: none was found. */
bool zs_c10d_find_gone(zs_c10d_comm *comm, bool ask_store, char *sentence, size_t size);

/* The ranks that may have to do with a failure whose cause was not found, as "rank 1" or "one of ranks 1, 2, 3". */
void zs_c10d_name_others(const zs_c10d_comm *comm, char *text, size_t size);

/* --- c10d_round.c: units' part of the table, as comm_ops.h has it ------------------------------------------------------- */

/* room. */
zs_room zs_c10d_room(const zs_cunit_spec *spec, int world);

/* cunit_new. */
zs_status zs_c10d_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out);

/* cunit_free; waits for a collective that is under way. NULL allowed. */
void zs_c10d_cunit_free(zs_comm *comm, zs_cunit *cunit);

/* post: starts the collective and does not wait. */
zs_status zs_c10d_post(zs_comm *comm, zs_cunit *cunit, const zs_bucket *bucket, const uint64_t *used);

/* collect. A round that fails here is over. */
zs_status zs_c10d_collect(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out);

/* share. */
zs_status zs_c10d_share(zs_comm *comm, zs_cunit *cunit);

/* collect_shared. */
zs_status zs_c10d_collect_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out);

/* release. */
zs_status zs_c10d_release(zs_comm *comm, zs_cunit *cunit);

/* reusable. */
zs_status zs_c10d_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);

#endif
