/* c10d.h - the internals of the c10d transport.
 *
 *   comm_c10d.c   the table, flats, small collectives
 *   c10d_turn.c   before each collective: do all ranks run the same one?
 *   c10d_wait.c   the wait for a collective
 *   c10d_stall.c  a long wait: where are the other ranks?
 *   c10d_serve.c  a gather of other ranks that this rank takes part in
 *   c10d_round.c  reducing
 *   c10d_peers.c  which ranks have exited, and why
 *   c10d_words.c  texts for messages
 */
#ifndef ZS_C10D_H
#define ZS_C10D_H

#include "comm/comm_local.h"
#include "comm/script.h"
#include "device/arena.h"
#include "shim/tensor.h"

#include <pthread.h>

enum {
    ZS_C10D_PIECE = 4 << 20, /* bytes of a broadcast at a time */
    ZS_C10D_LISTS = 256,     /* of flats */
    ZS_C10D_SERVES = 8,      /* models whose shards a rank may contribute to gathers of others, as it reports */
    ZS_C10D_PHRASE = 448,    /* room for the text of what a rank does */
    ZS_C10D_WORDS = 1536,    /* room for the text of where the others are */
};

/* The process of a rank, as far as this process can find out. */
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
    ZS_C10D_GIVE_UP, /* nothing follows; ranks that reported something else learn that their backward is over */
} zs_c10d_kind;

/* A rank's next collective, and its state. Ranks in the same collective have the same first four fields and name. */
typedef struct zs_c10d_turn {
    uint64_t kind;                   /* a zs_c10d_kind */
    uint64_t number;                 /* which flat, unit, exchange or broadcast */
    uint64_t round;                  /* of the unit's gradients; the root of a broadcast; a gather's zs_wire; else 0 */
    uint64_t bytes;                  /* that each rank sends */
    uint64_t reading;                /* of the last pass, see zs_reading_encode */
    uint64_t slot;                   /* (gather) the host's shared memory to gather into; 0: none */
    uint32_t serves[ZS_C10D_SERVES]; /* models whose shards have not changed since their last forward; 0: no more */
    uint64_t joinable;               /* (gather) other ranks can take part even if their script does not ask for it */
    uint64_t model;                  /* the number of the unit's model; 0: none */
    zs_fingerprint fingerprint;      /* what this rank has done to parameters */
    char owner[32];                  /* the name of the unit's model, for messages */
    char name[88];                   /* of the unit, truncated; of the call that an exchange or broadcast is part of */
} zs_c10d_turn;

/* A collective that was abandoned, and the memory that torch's threads may still use. */
typedef struct zs_c10d_stray {
    zs_work *work;  /* NULL: that of another one */
    zs_mem *memory; /* NULL: an area */
    struct zs_c10d_stray *next;
} zs_c10d_stray;

typedef struct zs_c10d_flat zs_c10d_flat;

/* Gets all ranks' turns into turns [world]; this rank's is `mine`. */
struct zs_c10d_comm;
typedef zs_status (*zs_c10d_exchange_turns)(struct zs_c10d_comm *, const zs_c10d_turn *mine, zs_c10d_turn *turns);

/* What a transport does that has turns, but no process group (gpu). */
typedef struct zs_c10d_hooks {
    /* Takes part in the gather `turn` with this rank's `shard`. */
    zs_status (*serve)(struct zs_c10d_comm *, const zs_c10d_turn *turn, const char *shard);
    /* Gets all ranks' texts [world], and sets this rank's in the head. */
    zs_status (*exchange_words)(struct zs_c10d_comm *, zs_diagnostics *all);
} zs_c10d_hooks;

typedef struct zs_c10d_comm {
    zs_comm base;
    zs_group *group;
    zs_status (*hear_said)(struct zs_c10d_comm *); /* waits for turns sent before; NULL: none ever were */
    zs_c10d_exchange_turns say;                    /* NULL: a gather over the group */
    const zs_c10d_hooks *hooks;                    /* NULL: it has a group */
    unsigned lifetime; /* zs_lifetime() at creation: differs in forked children, whose sockets belong to their parent */
    zs_c10d_flat *made[ZS_C10D_LISTS]; /* live flats, by their numbers; owned */
    zs_reader *readers;                /* models, by their last forwards, the latest first; they unlink themselves */
    uint64_t flats, units, messages;   /* counts so far */
    zs_c10d_peer *peers;               /* [world] */
    int gone;        /* the peer that was first seen to have exited, the cause of later failures; -1: none */
    size_t living;   /* live units, and (hosts) gathers that have an area */
    zs_arena *areas; /* owned; what one backward has out at a time; NULL: none */
    bool areas_end;  /* the last unit is freed, and so are they, as soon as none is lent */
    bool told;       /* this rank has left its reason */
    bool same_slots; /* in the last turn all ranks had the same gather, and those of each host the same slot */
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

/* The turn of a gather of the flat / *new*, for zs_c10d_gather_finish or, if it has not started, zs_c10d_gathering_free
 * (NULL allowed) / starts it, from this rank's shard into `full`, once all ranks have agreed on its turn. */
zs_c10d_turn zs_c10d_gather_turn(zs_c10d_comm *comm, const zs_flat_mem *flat, const char *unit);
zs_status zs_c10d_gathering_new(const zs_c10d_turn *turn, const zs_flat_mem *flat, zs_target to, zs_gathering **out);
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

/* A turn of this kind; fields that are not given are 0. `name` may be NULL. */
zs_c10d_turn zs_c10d_turn_of(zs_c10d_kind kind, uint64_t number, size_t bytes, const char *name);

/* The turn of an exchange or broadcast of `bytes`, with the call that it belongs to. */
zs_c10d_turn zs_c10d_talk_turn(const zs_c10d_comm *comm, zs_c10d_kind kind, size_t bytes);

/* The turn that this rank sends for `turn`. */
zs_c10d_turn zs_c10d_turn_to_send(const zs_c10d_comm *comm, const zs_c10d_turn *turn);

/* ZS_OK if collectives can run: not after a failure, not in a forked process. */
zs_status zs_c10d_check_usable(const zs_c10d_comm *comm);

/* Do all ranks have the same turn, with nothing to check? Any thread. */
bool zs_c10d_all_agree(const zs_c10d_comm *comm, const zs_c10d_turn *turns);

/* Can the ranks of each host gather into one memory, whatever other hosts do? Any thread. */
bool zs_c10d_same_slots(const zs_c10d_comm *comm, const zs_c10d_turn *turns);

/* zs_c10d_agree when turns [world + 1] already has all ranks' turns. */
zs_status zs_c10d_agree_on(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_c10d_turn *turns);

/* Sends `turn` to all ranks and waits for theirs. While they differ, takes part in what others gather; if that is
 * impossible, ZS_ERR_DIVERGED on every rank, after which the transport stays usable. Without this check, a process
 * group pairs up whatever comes next: wrong sums, or an abort inside gloo. */
zs_status zs_c10d_agree(zs_c10d_comm *comm, const zs_c10d_turn *turn);

/* --- c10d_wait.c -------------------------------------------------------------------------------------------------- */

/* Parts of the table, see comm_ops.h. */
void zs_c10d_abort(zs_comm *comm, const char *reason);
zs_status zs_c10d_check_peers(zs_comm *comm);

/* Was this process forked from a rank? It must use neither the process group nor its store. */
bool zs_c10d_is_forked(const zs_c10d_comm *comm);

/* Waits for the end of `work` (and frees it). An interrupted wait (Ctrl-C, a peer that died) leaves the collective
 * running: the transport becomes unusable, and the memory that the collective may still write to is kept forever:
 * all areas, and `memory` if it is none of them (else NULL). */
zs_status zs_c10d_finish(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_work *work, zs_mem *memory);

/* As zs_c10d_finish, for the turn sent before a collective: a long wait finds out where the other ranks are. */
zs_status zs_c10d_finish_turn(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_work *work);

/* A wait for something other than a collective. */
typedef struct zs_c10d_arrival {
    bool (*arrived)(void *arg, double seconds); /* waits at most `seconds`; true: the wait is over */
    void *arg;
    const char *late; /* what the deadline's message reports about the others */
} zs_c10d_arrival;

/* Waits for other ranks of this host within `turn`. Fails as zs_c10d_finish does, a little later than these ranks'
 * collectives. */
zs_status zs_c10d_watch(zs_c10d_comm *comm, const zs_c10d_turn *turn, const zs_c10d_arrival *until);

/* Waits for ranks' turns before a collective, on this host or others. A long wait finds out where the ranks are. */
zs_status zs_c10d_watch_turn(zs_c10d_comm *comm, const zs_c10d_turn *turn, const zs_c10d_arrival *until);

/* Abandons `work`: the memory that it may still write to is kept forever. */
void zs_c10d_leave_behind(zs_c10d_comm *comm, zs_work *work, zs_mem *memory);

/* A gather has ended: if it was abandoned, torch's threads may yet read the shard, which is kept forever, too. */
void zs_c10d_leave_source(zs_c10d_comm *comm, zs_mem *shard);

/* Fails with this thread's record, rephrased for `turn`; looks for the rank that caused the failure. */
zs_status zs_c10d_fail(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_status status);

/* Frees the text of why the transport is unusable. */
void zs_c10d_free_lost(zs_c10d_comm *comm);

/* Allocates memory for one collective, until zs_c10d_return_area, which sets it to NULL (and accepts NULL). */
zs_status zs_c10d_borrow_area(zs_c10d_comm *comm, size_t bytes, zs_mem **area);
void zs_c10d_return_area(zs_c10d_comm *comm, zs_mem **area);

/* A unit, or a gather that has an area, keeps all areas / no longer does: the last one frees them. A unit may be freed
 * while this or another thread is in a collective: what is lent then goes with its return. */
void zs_c10d_keep_areas(zs_c10d_comm *comm);
void zs_c10d_let_areas_go(zs_c10d_comm *comm);

/* Frees all areas, unless an abandoned collective may still write to them. */
void zs_c10d_free_areas(zs_c10d_comm *comm);

/* --- c10d_serve.c ------------------------------------------------------------------------------------------------- */

/* flat_new, flat_free, numbers and continue_from, see comm_ops.h: flats are found by their keys. */
void zs_c10d_numbers(const zs_comm *comm, uint64_t *out);
void zs_c10d_continue_from(zs_comm *comm, const uint64_t *numbers);
zs_status zs_c10d_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out);
void zs_c10d_flat_free(zs_comm *comm, zs_flat_mem *flat);

/* The list of flats alone: numbers one that exists / forgets it. */
zs_status zs_c10d_flat_add(zs_c10d_comm *comm, zs_flat_mem *made);
void zs_c10d_flat_remove(zs_c10d_comm *comm, const zs_flat_mem *flat);

/* Is the flat this transport's? */
bool zs_c10d_is_own(zs_c10d_comm *comm, const zs_flat_mem *flat);

/* Readers: zs_local_reader_ops, plus whether anything was written since the last forward began. */
extern const zs_reader_ops zs_c10d_reader_ops;

/* The models whose shards this rank may contribute to a gather of others: those that it ran last. */
void zs_c10d_served(const zs_c10d_comm *comm, uint32_t out[ZS_C10D_SERVES]);

/* The rank whose gather comes next if `turns` [world] differ, the same on all ranks; -1: there is none that all can
 * take part in. */
int zs_c10d_choose(const zs_c10d_comm *comm, const zs_c10d_turn *turns);

/* Takes part in a gather of other ranks. */
zs_status zs_c10d_serve(zs_c10d_comm *comm, const zs_c10d_turn *turn);

/* --- c10d_stall.c ------------------------------------------------------------------------------------------------- */

/* A long wait; zero it at the start. */
typedef struct zs_c10d_stall {
    int questions;     /* sent to the others so far */
    uint64_t question; /* the number of the last one; 0: none */
    double looked;     /* when answers were last read; in seconds of waiting */
    bool told;         /* printed on stderr */
    void *answers;     /* [world]; owned; NULL: none yet */
} zs_c10d_stall;

/* The wait has taken that many seconds: when due, asks the other ranks where they are, and prints it on stderr. */
void zs_c10d_stall_check(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_c10d_stall *stall, double waited);

/* The state of the other ranks and the remedy, as text to append to a sentence; "" if none. */
void zs_c10d_stall_words(const zs_c10d_comm *comm, const zs_c10d_turn *turn, const zs_c10d_stall *stall, char *text,
                         size_t size);

/* Where everybody is, as lines (comm/where.h); "" if no rank was asked. */
void zs_c10d_stall_lines(const zs_c10d_comm *comm, const zs_c10d_stall *stall, char *text, size_t size);

/* Frees its members. */
void zs_c10d_stall_end(zs_c10d_stall *stall);

/* --- c10d_peers.c ------------------------------------------------------------------------------------------------- */

/* Finds the peers; collective. */
zs_status zs_c10d_peers_connect(zs_c10d_comm *comm);

/* Frees them. */
void zs_c10d_peers_free(zs_c10d_comm *comm);

/* Looks for a rank that has exited: one that left a reason (see the table's abort), or whose process has ended.
 * Writes a sentence to continue with "while ..."; false: none was found. */
bool zs_c10d_find_gone(zs_c10d_comm *comm, bool ask_store, char *sentence, size_t size);

/* --- c10d_words.c ------------------------------------------------------------------------------------------------- */

/* Is it an exchange or a broadcast? */
bool zs_c10d_talks(const zs_c10d_turn *turn);

/* What a rank does, as a phrase to follow "rank 0 was"; `owner` is named after the unit. */
void zs_c10d_describe(const zs_c10d_turn *turn, const char *owner, char *text, size_t size);

/* The same for an exchange or broadcast of a call with a name, with its number and bytes: where two ranks differ within
 * the same call. */
void zs_c10d_describe_talk(const zs_c10d_turn *turn, char *text, size_t size);

/* The same without numbers that change from step to step, for profiles. */
void zs_c10d_describe_brief(const zs_c10d_turn *turn, char *text, size_t size);

/* The ranks that may have caused a failure of unknown cause, as "rank 1" or "one of ranks 1, 2, 3". */
void zs_c10d_name_others(const zs_c10d_comm *comm, char *text, size_t size);

/* The remedy if not all ranks reach `turn`. */
const char *zs_c10d_remedy_of(const zs_c10d_turn *turn);

/* As zs_c10d_describe for this rank, and where its script is. */
void zs_c10d_describe_here(const zs_c10d_turn *turn, const char *owner, char *text, size_t size);

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
