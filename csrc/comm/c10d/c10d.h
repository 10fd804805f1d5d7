/* c10d.h - the c10d transport inside.
 *
 *   comm_c10d.c   the table, flats, small collectives
 *   c10d_turn.c   before each collective: do all ranks mean the same one?
 *   c10d_wait.c   the wait for a collective
 *   c10d_stall.c  a wait that lasts: where are the others?
 *   c10d_serve.c  a gather that this rank does not want, and that it takes part in
 *   c10d_round.c  reducing
 *   c10d_peers.c  who is gone, and why
 *   c10d_words.c  words for messages
 */
#ifndef ZS_C10D_H
#define ZS_C10D_H

#include "comm/comm_local.h"
#include "comm/script.h"
#include "device/arena.h"
#include "shim/tensor.h"

enum {
    ZS_C10D_PIECE = 4 << 20, /* bytes of a broadcast at a time */
    ZS_C10D_LISTS = 256,     /* of flats */
    ZS_C10D_SERVES = 8,      /* models of which a rank says that it may bring shards to gathers of others */
    ZS_C10D_PHRASE = 448,    /* room for what a rank does, in words */
    ZS_C10D_WORDS = 1536,    /* room for where the others are */
};

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

/* What a rank is about to do, and how it stands. Ranks that mean the same say the same in the first four and the
 * name. */
typedef struct zs_c10d_turn {
    uint64_t kind;                   /* a zs_c10d_kind */
    uint64_t number;                 /* which flat, unit, exchange or broadcast */
    uint64_t round;                  /* of the unit's gradients; the root of a broadcast; a gather's zs_wire; else 0 */
    uint64_t bytes;                  /* that each rank brings */
    uint64_t reading;                /* what the last pass reads, see zs_reading_encode */
    uint64_t slot;                   /* (gather) memory that the ranks of a host share, to gather into; 0: none */
    uint32_t serves[ZS_C10D_SERVES]; /* models whose shards are as their last forward has found them; 0: no more */
    uint64_t joinable;               /* (gather) other ranks can take part without their script asking for it */
    uint64_t model;                  /* the number of the unit's; 0: none */
    zs_fingerprint fingerprint;      /* what this rank has done to parameters */
    char owner[32];                  /* the name of the unit's model, for messages */
    char name[88];                   /* of the unit, cut off; of the call that an exchange or broadcast is part of */
} zs_c10d_turn;

/* A collective that was not waited for to its end, and what torch's threads may still write to. */
typedef struct zs_c10d_stray {
    zs_work *work;
    zs_mem *memory; /* NULL: an area */
    struct zs_c10d_stray *next;
} zs_c10d_stray;

typedef struct zs_c10d_flat zs_c10d_flat;

/* Where each rank's turn comes into turns [world]; this rank's is `mine`. */
struct zs_c10d_comm;
typedef zs_status (*zs_c10d_exchange_turns)(struct zs_c10d_comm *, const zs_c10d_turn *mine, zs_c10d_turn *turns);

typedef struct zs_c10d_comm {
    zs_comm base;
    zs_group *group;
    zs_status (*hear_said)(struct zs_c10d_comm *); /* waits for what has been said before; NULL: nothing ever has */
    zs_c10d_exchange_turns say;                    /* NULL: by a gather over the group */
    unsigned lifetime; /* zs_lifetime() at birth: differs in forked children, whose sockets are their parent's */
    zs_c10d_flat *made[ZS_C10D_LISTS]; /* flats that are alive, by their numbers; owned */
    zs_reader *readers;                /* models, by their last forwards, the latest first; they unlink themselves */
    uint64_t flats, units, messages;   /* so many so far */
    zs_c10d_peer *peers;               /* [world] */
    int gone;        /* the peer that was first seen to be gone, the cause of what follows; -1: none */
    size_t living;   /* units that are not freed, and (hosts) gathers that have an area */
    zs_arena *areas; /* owned; what one backward has out at a time; goes with the last unit; NULL: none yet */
    bool told;       /* this rank has left its last words */
    bool same_slots; /* in the last turn all ranks meant the same gather, and those of each host the same slot */
    zs_c10d_stray *strays;
    struct zs_c10d_comm *next; /* in the list of those that are kept for their strays' sake */
} zs_c10d_comm;

/* --- comm_c10d.c -------------------------------------------------------------------------------------------------- */

/* Fills a zeroed head, and learns who the peers are; collective. What a failure leaves is for zs_c10d_clear. */
zs_status zs_c10d_init(zs_c10d_comm *comm, const char *group_name, const zs_ranks_of_hosts *ranks, double timeout);

/* Frees what the head has. False: torch's threads may still write there, so it and its memory stay for ever. */
bool zs_c10d_clear(zs_c10d_comm *comm);

/* What a gather of the flat says, and its begin once all ranks have agreed to that. */
zs_c10d_turn zs_c10d_gather_turn(zs_c10d_comm *comm, const zs_flat_mem *flat, const char *unit);
zs_status zs_c10d_gather_agreed(zs_c10d_comm *comm, const zs_c10d_turn *turn, const char *shard, zs_target to,
                                zs_gathering **out);

/* Parts of the table, as comm_ops.h has them. */
zs_status zs_c10d_gather_finish(zs_comm *comm, zs_gathering *gathering);
zs_status zs_c10d_give_up(zs_comm *comm);
zs_status zs_c10d_reserve(zs_comm *comm, const zs_arena *plan);
size_t zs_c10d_bytes(const zs_comm *comm);
void zs_c10d_abort(zs_comm *comm, const char *reason);
zs_status zs_c10d_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all);
zs_status zs_c10d_broadcast(zs_comm *comm, void *data, size_t bytes, int root);
zs_status zs_c10d_end(zs_comm *comm, zs_fingerprint *fingerprints, bool *all);

/* --- c10d_turn.c -------------------------------------------------------------------------------------------------- */

/* A turn of this kind; what is not given is 0. `name` may be NULL. */
zs_c10d_turn zs_c10d_turn_of(zs_c10d_kind kind, uint64_t number, size_t bytes, const char *name);

/* What this rank says of `turn`. */
zs_c10d_turn zs_c10d_turn_to_send(const zs_c10d_comm *comm, const zs_c10d_turn *turn);

/* ZS_OK if collectives can be run: not after a failure, not in a forked process. */
zs_status zs_c10d_check_usable(const zs_c10d_comm *comm);

/* Do all ranks mean the same, and nothing is to be looked at? Any thread. */
bool zs_c10d_all_agree(const zs_c10d_comm *comm, const zs_c10d_turn *turns);

/* Can the ranks of each host gather into one memory, whatever the other hosts have? Any thread. */
bool zs_c10d_same_slots(const zs_c10d_comm *comm, const zs_c10d_turn *turns);

/* zs_c10d_agree, where turns [world + 1] have all ranks' already. */
zs_status zs_c10d_agree_on(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_c10d_turn *turns);

/* Says `turn` to all ranks and waits for theirs. Where they differ, takes part in what others gather until they do
 * not; where that cannot be, ZS_ERR_DIVERGED on every rank, and the transport is fit for use after that. Without
 * this, a process group pairs up whatever comes next: wrong sums, or an abort inside gloo. */
zs_status zs_c10d_agree(zs_c10d_comm *comm, const zs_c10d_turn *turn);

/* --- c10d_wait.c -------------------------------------------------------------------------------------------------- */

/* Is this a process that was forked from a rank? It must touch neither the process group nor its store. */
bool zs_c10d_is_forked(const zs_c10d_comm *comm);

/* Waits for the end of `work` (and frees it). A wait that is broken off (Ctrl-C, a peer that died) leaves the
 * collective running: the transport is then lost, and what it may still write to is kept for ever: all areas, and
 * `memory` if it is none of them (else NULL). */
zs_status zs_c10d_finish(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_work *work, zs_mem *memory);

/* As zs_c10d_finish, of what is said before a collective: where it lasts, finds out where the others are. */
zs_status zs_c10d_finish_turn(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_work *work);

/* What a wait that is no collective's waits for. */
typedef struct zs_c10d_arrival {
    bool (*arrived)(void *arg, double seconds); /* waits for so long at most; true: the wait is over */
    void *arg;
    const char *late; /* what the deadline's message says of the others */
} zs_c10d_arrival;

/* Waits for what other ranks of this host do in the course of `turn`. Fails as zs_c10d_finish does, a little later
 * than the collectives of these ranks. */
zs_status zs_c10d_watch(zs_c10d_comm *comm, const zs_c10d_turn *turn, const zs_c10d_arrival *until);

/* Waits for what ranks say before a collective, on this host or others. Where it lasts, finds out where they are. */
zs_status zs_c10d_watch_turn(zs_c10d_comm *comm, const zs_c10d_turn *turn, const zs_c10d_arrival *until);

/* `work` is not waited for: what it may still write to is kept for ever. */
void zs_c10d_leave_behind(zs_c10d_comm *comm, zs_work *work, zs_mem *memory);

/* Fails with this thread's record, put into the words of `turn`; looks for the rank that is to blame. */
zs_status zs_c10d_fail(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_status status);

/* Memory for one collective, until it is given to zs_c10d_return_area, which makes it NULL (and may get NULL). */
zs_status zs_c10d_borrow_area(zs_c10d_comm *comm, size_t bytes, zs_mem **area);
void zs_c10d_return_area(zs_c10d_comm *comm, zs_mem **area);

/* Gives all areas back, unless a collective that was not waited for may still write there. */
void zs_c10d_free_areas(zs_c10d_comm *comm);

/* --- c10d_serve.c ------------------------------------------------------------------------------------------------- */

/* flat_new, flat_free, numbers and go_on_from, as comm_ops.h has them: flats are found again by their keys. */
void zs_c10d_numbers(const zs_comm *comm, uint64_t *out);
void zs_c10d_go_on_from(zs_comm *comm, const uint64_t *numbers);
zs_status zs_c10d_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out);
void zs_c10d_flat_free(zs_comm *comm, zs_flat_mem *flat);

/* Is it among them? */
bool zs_c10d_is_own(zs_c10d_comm *comm, const zs_flat_mem *flat);

/* Readers: zs_local_reader_ops, which also know whether anything was written since the last forward began. */
extern const zs_reader_ops zs_c10d_reader_ops;

/* Of which models this rank may bring shards to a gather of others: those that it has run last. */
void zs_c10d_served(const zs_c10d_comm *comm, uint32_t out[ZS_C10D_SERVES]);

/* The rank whose gather comes next where `turns` [world] differ, the same on all ranks; -1: there is none that all
 * can take part in. */
int zs_c10d_choose(const zs_c10d_comm *comm, const zs_c10d_turn *turns);

/* Takes part in a gather of others. */
zs_status zs_c10d_serve(zs_c10d_comm *comm, const zs_c10d_turn *turn);

/* --- c10d_stall.c ------------------------------------------------------------------------------------------------- */

/* A wait that lasts; zeroed at its begin. */
typedef struct zs_c10d_stall {
    int questions;     /* asked of the others so far */
    uint64_t question; /* the number of the last; 0: none */
    double looked;     /* for answers, last; in seconds of waiting */
    bool told;         /* on stderr */
    void *answers;     /* [world]; owned; NULL: none yet */
} zs_c10d_stall;

/* The wait has lasted so many seconds: asks where the others are, and tells it on stderr, when it is time for that. */
void zs_c10d_stall_check(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_c10d_stall *stall, double waited);

/* What it has found of the others, and what to do, as text that goes on a sentence; "" if nothing. */
void zs_c10d_stall_words(const zs_c10d_comm *comm, const zs_c10d_turn *turn, const zs_c10d_stall *stall, char *text,
                         size_t size);

/* Frees what it has found. */
void zs_c10d_stall_end(zs_c10d_stall *stall);

/* --- c10d_peers.c ------------------------------------------------------------------------------------------------- */

/* Learns who the peers are; collective. */
zs_status zs_c10d_peers_connect(zs_c10d_comm *comm);

/* Frees what that made. */
void zs_c10d_peers_free(zs_c10d_comm *comm);

/* Looks for a rank that is gone: one that left word (see the table's abort), or whose process has ended. Writes a
 * sentence about it that goes on with "while ..."; false: none was found. */
bool zs_c10d_find_gone(zs_c10d_comm *comm, bool ask_store, char *sentence, size_t size);

/* --- c10d_words.c ------------------------------------------------------------------------------------------------- */

/* What a rank does, as a phrase that fits behind "rank 0 was"; `owner` is said behind the unit. */
void zs_c10d_describe(const zs_c10d_turn *turn, const char *owner, char *text, size_t size);

/* The same without numbers that differ from step to step, for profiles. */
void zs_c10d_describe_brief(const zs_c10d_turn *turn, char *text, size_t size);

/* The ranks that may have to do with a failure whose cause was not found, as "rank 1" or "one of ranks 1, 2, 3". */
void zs_c10d_name_others(const zs_c10d_comm *comm, char *text, size_t size);

/* What to do where ranks are not at `turn` together. */
const char *zs_c10d_remedy_of(const zs_c10d_turn *turn);

/* The same as zs_c10d_describe of what this rank does, with where its script is. */
void zs_c10d_describe_here(const zs_c10d_turn *turn, const char *owner, char *text, size_t size);

/* --- c10d_round.c: zs_round_ops, by the field's name -------------------------------------------------------------- */

typedef struct zs_c10d_unit {
    zs_cunit base;
    uint64_t number;
    zs_work *work;           /* the all_to_all that is under way, NULL: none */
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
