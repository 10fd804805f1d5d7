/* c10d.h - the internals of the c10d transport.
 *
 *   comm_c10d.c   the table, flats, small collectives
 *   c10d_turn.c   how ranks exchange turns (comm/turn.h)
 *   c10d_wait.c   the wait for a collective
 *   c10d_stall.c  a long wait: where are the other ranks?
 *   c10d_round.c  reducing
 *   c10d_peers.c  which ranks have exited, and why
 */
#ifndef ZS_C10D_H
#define ZS_C10D_H

#include "comm/comm_local.h"
#include "comm/process_watch.h"
#include "comm/script.h"
#include "comm/turn.h"
#include "device/arena.h"
#include "shim/tensor.h"

#include <pthread.h>

enum {
    ZS_C10D_PIECE = 4 << 20, /* bytes of a broadcast at a time */
    ZS_C10D_TEXT = 1536,     /* room for the text of where the others are */
};

/* A collective that was abandoned, and the memory that torch's threads may still use. */
typedef struct zs_c10d_stray {
    zs_work *work;  /* NULL: that of another one */
    zs_mem *memory; /* NULL: an area */
    struct zs_c10d_stray *next;
} zs_c10d_stray;

typedef struct zs_c10d_comm {
    zs_comm base;
    zs_turns turns; /* which the head points to */
    zs_group *group;
    zs_status (*wait_queued)(struct zs_c10d_comm *); /* waits for turns sent before; NULL: none ever were */
    unsigned lifetime; /* zs_lifetime() at creation: differs in forked children, whose sockets belong to their parent */
    zs_process_watch *peers; /* owned */
    int gone;                /* the peer that was first seen to have exited, the cause of later failures; -1: none */
    size_t living;           /* live units, and (hosts) gathers that have an area */
    zs_arena *areas;         /* owned; memory that one backward has out at a time; NULL: none */
    bool areas_end;          /* the last unit is freed, and so are they, as soon as none is lent */
    bool reported;           /* this rank has published its reason */
    pthread_mutex_t areas_lock;
    bool has_strays; /* also one that is in no list, for lack of memory */
    zs_c10d_stray *strays;
    struct zs_c10d_comm *next; /* next in the list of those kept for their strays */
} zs_c10d_comm;

/* --- comm_c10d.c -------------------------------------------------------------------------------------------------- */

/* Fills a zeroed head, and finds the peers; collective. After a failure call zs_c10d_clear. */
zs_status zs_c10d_init(zs_c10d_comm *comm, const char *group_name, const zs_ranks_of_hosts *ranks, double timeout);

/* Frees the head's members. False: torch's threads may still write there, so it and its memory stay forever. */
bool zs_c10d_clear(zs_c10d_comm *comm);

/* *new*, for zs_c10d_gather_finish or, if it has not started, zs_c10d_gathering_free (NULL allowed) / starts it, from
 * this rank's shard into `full`, once all ranks have agreed on its turn. */
zs_status zs_c10d_gathering_new(const zs_turn *turn, const zs_flat_mem *flat, zs_target to, zs_gathering **out);
void zs_c10d_gathering_free(zs_gathering *gathering);
zs_status zs_c10d_gather_agreed(zs_c10d_comm *comm, const char *shard, char *full, zs_gathering *gathering);

/* Parts of the table, see comm_ops.h. */
zs_status zs_c10d_gather_finish(zs_comm *comm, zs_gathering *gathering);
zs_status zs_c10d_give_up(zs_comm *comm);
zs_status zs_c10d_reserve(zs_comm *comm, const zs_arena *plan);
size_t zs_c10d_bytes(const zs_comm *comm);
zs_status zs_c10d_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all);
zs_status zs_c10d_broadcast(zs_comm *comm, void *data, size_t bytes, int root);
zs_status zs_c10d_end(zs_comm *comm, zs_fingerprint *fingerprints, bool *all);

/* --- c10d_turn.c -------------------------------------------------------------------------------------------------- */

/* Exchanges turns over the group. */
extern const zs_turns_ops zs_c10d_turns_ops;

/* ZS_OK if collectives can run: not after a failure, not in a forked process. */
zs_status zs_c10d_check_usable(zs_comm *comm);

/* zs_turns_agree, after everything queued before. */
zs_status zs_c10d_agree(zs_c10d_comm *comm, const zs_turn *turn);

/* --- c10d_wait.c -------------------------------------------------------------------------------------------------- */

/* Parts of the table, see comm_ops.h. */
void zs_c10d_abort(zs_comm *comm, const char *reason);
zs_status zs_c10d_check_peers(zs_comm *comm);

/* Was this process forked from a rank? It must use neither the process group nor its store. */
bool zs_c10d_is_forked(const zs_c10d_comm *comm);

/* Waits for the end of `work` (and frees it). An interrupted wait (Ctrl-C, a peer that died) leaves the collective
 * running: the transport becomes unusable, and the memory that the collective may still write to is kept forever:
 * all areas, and `memory` if it is none of them (else NULL). */
zs_status zs_c10d_finish(zs_c10d_comm *comm, const zs_turn *turn, zs_work *work, zs_mem *memory);

/* As zs_c10d_finish, for the turn sent before a collective: a long wait finds out where the other ranks are. */
zs_status zs_c10d_finish_turn(zs_c10d_comm *comm, const zs_turn *turn, zs_work *work);

/* A wait for something other than a collective. */
typedef struct zs_c10d_arrival {
    bool (*arrived)(void *arg, double seconds); /* waits at most `seconds`; true: the wait is over */
    void *arg;
    const char *late; /* the deadline's message about the others */
    bool patient;     /* a little longer, as the others may be about to report why */
} zs_c10d_arrival;

/* Waits for the other ranks' messages of `turn`. Fails as zs_c10d_finish does. */
zs_status zs_c10d_watch(zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_arrival *until);

/* Waits for ranks' turns before a collective, on this host or others. A long wait finds out where the ranks are. */
zs_status zs_c10d_watch_turn(zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_arrival *until);

/* A gather has ended: if it was abandoned, torch's threads may still read the shard, so that is kept forever as
 * well. */
void zs_c10d_leave_source(zs_c10d_comm *comm, zs_mem *shard);

/* Fails with this thread's record, rephrased for `turn`; looks for the rank that caused the failure. */
zs_status zs_c10d_fail(zs_c10d_comm *comm, const zs_turn *turn, zs_status status);

/* Frees the text of why the transport is unusable. */
void zs_c10d_free_lost(zs_c10d_comm *comm);

/* Allocates memory for one collective, until zs_c10d_return_area, which sets it to NULL (and accepts NULL). */
zs_status zs_c10d_borrow_area(zs_c10d_comm *comm, size_t bytes, zs_mem **area);
void zs_c10d_return_area(zs_c10d_comm *comm, zs_mem **area);

/* A unit, or a gather that has an area, keeps all areas / no longer does: the last one frees them. A unit may be freed
 * while this or another thread is in a collective: areas lent then are freed on return. */
void zs_c10d_keep_areas(zs_c10d_comm *comm);
void zs_c10d_let_areas_go(zs_c10d_comm *comm);

/* Frees all areas, unless an abandoned collective may still write to them. */
void zs_c10d_free_areas(zs_c10d_comm *comm);

/* --- c10d_stall.c ------------------------------------------------------------------------------------------------- */

/* A long wait; zero it at the start. */
typedef struct zs_c10d_stall {
    int questions;     /* sent to the others so far */
    uint64_t question; /* the number of the last one; 0: none */
    double looked;     /* when answers were last read; in seconds of waiting */
    bool reported;     /* printed on stderr */
    void *answers;     /* [world]; owned; NULL: none yet */
} zs_c10d_stall;

/* The wait has taken that many seconds: when due, asks the other ranks where they are, and prints it on stderr. */
void zs_c10d_stall_check(zs_c10d_comm *comm, const zs_turn *turn, zs_c10d_stall *stall, double waited);

/* The state of the other ranks and the remedy, as text to append to a sentence; "" if none. */
void zs_c10d_stall_text(const zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_stall *stall, char *text,
                        size_t size);

/* The places of all ranks, as lines (comm/where.h); "" if no rank was asked. */
void zs_c10d_stall_lines(const zs_c10d_comm *comm, const zs_c10d_stall *stall, char *text, size_t size);

/* The ranks that may have caused a failure of unknown cause, as "rank 1" or "one of ranks 1, 2, 3". */
void zs_c10d_name_others(const zs_c10d_comm *comm, char *text, size_t size);

/* Frees its members. */
void zs_c10d_stall_end(zs_c10d_stall *stall);

/* --- c10d_peers.c ------------------------------------------------------------------------------------------------- */

/* Finds the peers; collective. */
zs_status zs_c10d_peers_connect(zs_c10d_comm *comm);

/* Looks for a rank that has exited: one that left a reason (see the table's abort), or whose process has ended.
 * Writes a sentence to continue with "while ..."; false: none was found. */
bool zs_c10d_find_gone(zs_c10d_comm *comm, bool ask_store, char *sentence, size_t size);

/* --- c10d_round.c: zs_round_ops, by the field's name -------------------------------------------------------------- */

typedef struct zs_c10d_unit {
    zs_cunit base;
    uint64_t number;
    zs_work *work;           /* the all_to_all in flight, NULL: none */
    zs_mem *sent, *received; /* areas of the round that is out, NULL: none */
} zs_c10d_unit;

/* room; without units. */
zs_room zs_c10d_room(const zs_comm *comm, const zs_cunit_spec *spec);
zs_room zs_c10d_room_without_units(const zs_comm *comm);

/* Of units. */
zs_status zs_c10d_unit_init(zs_comm *comm, zs_cunit *cunit);
void zs_c10d_unit_clear(zs_comm *comm, zs_cunit *cunit);
void zs_c10d_finish_round(zs_comm *comm, zs_cunit *cunit);

/* Of rounds. `send` starts the collective and does not wait. */
zs_status zs_c10d_send(zs_comm *comm, zs_cunit *cunit);
zs_status zs_c10d_arrive(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);
zs_status zs_c10d_share(zs_comm *comm, zs_cunit *cunit);
void zs_c10d_drop(zs_comm *comm, zs_cunit *cunit);

#endif
