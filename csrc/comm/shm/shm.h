/* shm.h - the internals of the shm transport: the contents of shared memory, and a rank's records of the others.
 *
 * Each rank alone writes its own words and values in shared memory; the others map and read them. So no state word ever
 * needs a lock or a compare-and-swap. (Except the turn to wake a sleeper, which ranks pass on: shm_wake.c.)
 *
 *   control  one file per rank, a zs_shm_control: state words, mailboxes, and a heap of records, one per unit and per
 *            reader. All ranks create the same records in the same order, so a record has the same offset in all heaps.
 *   buckets  one file per rank: full gradients, at offsets that the owner publishes with each post; and optimizer
 *            state (shm_state.c)
 *   flats    one file for all: for each flat the shards of all ranks, side by side, so that one mapping is the full
 *            buffer
 *
 * All atomics are sequentially consistent: sleeping and waking (shm_wake.c), like entering and leaving
 * (shm_reader.c), is "write mine, then read yours", which any weaker order breaks. On x86 this costs one locked
 * store per change. */
#ifndef ZS_SHM_H
#define ZS_SHM_H

#include <stdalign.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "base/file.h"
#include "comm/comm_local.h"
#include "comm/script.h"

enum {
    ZS_SHM_LINE = 64,       /* cache line: words with different writers are on different ones */
    ZS_SHM_MAIL = 4096,     /* largest exchange, in bytes */
    ZS_SHM_STAGE = 1 << 20, /* bytes of one piece of a broadcast: small enough for the cache */
    ZS_SHM_HEAP = 64 << 20, /* for records; costs memory only where used */
    ZS_SHM_FLATS = 1 << 16, /* flats of one group whose release is published */
    ZS_SHM_NAME = 96,       /* longest stored name of a unit or reader */
    ZS_SHM_TEXT = 1536,     /* longest reason of an abort */
};

/* A rank's act or wait. The names are the acts of the peers that end the wait. */
typedef enum zs_shm_what {
    ZS_SHM_JOINED,     /* nothing yet */
    ZS_SHM_POSTED,     /* record: unit, number: round */
    ZS_SHM_SHARED,     /* as for POSTED */
    ZS_SHM_RELEASED,   /* as for POSTED */
    ZS_SHM_EXCHANGED,  /* number: exchange */
    ZS_SHM_SENT,       /* number: piece of a broadcast, record: root */
    ZS_SHM_TAKEN,      /* number: piece of a broadcast */
    ZS_SHM_FORWARD,    /* record: reader: all peers admit a training forward */
    ZS_SHM_EVALUATION, /* record: reader, number: version: all peers admit another forward */
    ZS_SHM_BACKWARD,   /* record: reader: all peers admit a backward */
    ZS_SHM_LEFT_ALONE, /* record: reader: no peer reads this rank's shards, or is about to */
    ZS_SHM_CAUGHT_UP,  /* record: reader: no peer has made fewer looks */
    ZS_SHM_UNREAD      /* record: reader: no peer reads this rank's shards */
} zs_shm_what;

typedef struct zs_shm_act {
    zs_shm_what what;
    uint32_t record; /* offset in the heap, or the root's rank */
    uint64_t number;
    bool yields; /* a wait for it returns if all ranks wait for each other, see zs_wait */
} zs_shm_act;

/* An act that does not yield. */
static inline zs_shm_act zs_shm_act_make(zs_shm_what what, uint32_t record, uint64_t number)
{
    return (zs_shm_act){.what = what, .record = record, .number = number};
}

typedef struct zs_shm_mailbox {
    uint64_t bytes;     /* length that the sender passes: must be the same on all ranks */
    uint64_t pieces;    /* of broadcasts that the sender has taken part in: the same on all ranks */
    char call[ZS_CALL]; /* the call that it belongs to: the same on all ranks; "": one without a name */
    char data[ZS_SHM_MAIL];
} zs_shm_mailbox;

/* Start of each rank's control file. "own" = written only by its owner. */
typedef struct zs_shm_control {
    /* Sleeping: others write these two as well, see shm_wake.c. */
    alignas(ZS_SHM_LINE) _Atomic uint32_t wake; /* raised by the rank that wakes the owner */
    _Atomic uint64_t asleep; /* 0: no; else wait_id << 16 | 1 + the rank whose turn it is to wake the owner */

    /* The owner's act. wait_id is odd while it waits for the act below; it changes with every wait. */
    alignas(ZS_SHM_LINE) _Atomic uint64_t wait_id;
    _Atomic uint64_t act_what; /* yields << 63 | zs_shm_what << 32 | record */
    _Atomic uint64_t act_number;

    /* The place of the owner's script. */
    _Atomic uint64_t placed; /* 1 + the wait_id in which `place` was published; 0: never */
    char place[ZS_PLACE];
    _Atomic uint32_t asked;   /* a peer wants to know its line; the owner sets it back */
    _Atomic bool answering;   /* one of the owner's threads writes the two below */
    _Atomic int64_t where_at; /* in ns of the monotonic clock, when `where` was true; 0: it changes, or never was */
    char where[ZS_WHERE];

    /* Exchanges and broadcasts: how many the owner has done, and sizes for checks. */
    alignas(ZS_SHM_LINE) _Atomic uint64_t exchanged;
    _Atomic uint64_t sent, taken;
    uint64_t sent_bytes[2];     /* bytes left of the broadcast when piece n was sent, by parity of n */
    char sent_call[2][ZS_CALL]; /* its call, by parity of n */
    char doing[ZS_CALL];        /* the call that the last exchange or broadcast belonged to */

    /* The last text that the owner posted, see shm_state.c: odd while it changes. */
    _Atomic uint64_t post_number, post_at, post_bytes;

    /* The end. `stopped` is set after the text is complete. */
    alignas(ZS_SHM_LINE) _Atomic uint32_t left; /* closed in an orderly way */
    _Atomic uint32_t ended;                     /* set after `fingerprint` */
    zs_fingerprint fingerprint;
    _Atomic uint32_t stopped; /* the zs_status of an abort, 0: none */
    char stop_text[ZS_SHM_TEXT];
    zs_diagnostics texts; /* own */

    alignas(4096) zs_shm_mailbox mail[2]; /* by parity of the exchange's number */
    alignas(4096) char stage[2][ZS_SHM_STAGE];
    alignas(4096) char heap[ZS_SHM_HEAP];
    _Atomic uint64_t freed[ZS_SHM_FLATS / 64]; /* own; which of its flats, as a bitmap; see shm_flats.c */
} zs_shm_control;

/* One round's post. There are two, by parity of the round: no rank posts round k + 2 before all have released round
 * k, since posting k + 1 requires this rank's release of k, and posting k + 2 requires that k + 1 was collected from
 * all. */
typedef struct zs_shm_post {
    uint64_t index;  /* the bucket's number in its owner's file */
    uint64_t offset; /* its place there, constant for one index */
    uint64_t bytes;  /* its capacity, also constant; 0: only the header was posted */
} zs_shm_post;

/* Head of a unit's record; the headers of two rounds follow. */
typedef struct zs_shm_unit_record {
    char name[ZS_SHM_NAME];
    uint64_t n_params, shards_bytes; /* compared with the peers' before the first collect */
    alignas(ZS_SHM_LINE) _Atomic uint64_t posted;
    _Atomic uint64_t shared, released; /* rounds, counted from 1 */
    alignas(ZS_SHM_LINE) zs_shm_post post[2];
    alignas(uint64_t) char headers[]; /* zs_round_header, by parity of the round */
} zs_shm_unit_record;

/* Bytes of a record with its headers. */
static inline size_t zs_shm_unit_record_bytes(size_t header_bytes)
{
    return sizeof(zs_shm_unit_record) + 2 * header_bytes;
}

/* A reader's record: nearly all of its state is one word, see shm_word.h. */
typedef struct zs_shm_reader_record {
    char name[ZS_SHM_NAME];
    alignas(ZS_SHM_LINE) _Atomic uint64_t word;
    _Atomic uint64_t work; /* a digest of the operations by hand since its last known write; set before the word */
    _Atomic uint64_t
        looks; /* low half: how many looks at its version since the script's last collective; raised once it reads, set
                  to 0 before the word's version changes. High half: how many such collectives it has reached */
    _Atomic uint64_t
        fingerprint[ZS_FINGERPRINT_WORDS]; /* a zs_fingerprint; set before the word that begins a forward */
} zs_shm_reader_record;

/* The high half of `looks`. */
static inline uint64_t zs_shm_meetings(uint64_t looks)
{
    return looks >> 32;
}

/* A peer's bucket, mapped here. */
typedef struct zs_shm_view {
    char *ptr; /* NULL: not mapped yet */
    size_t bytes;
} zs_shm_view;

/* This rank's state of one rank (itself too). */
typedef struct zs_shm_peer {
    zs_shm_control *control; /* NULL until connected */
    pid_t pid;               /* in that rank's own namespace; for messages */
    int pidfd;               /* readable once it is dead; -1 for this rank */
    int buckets;             /* its file of buckets; -1 for this rank */
    zs_shm_view *views;      /* its buckets by index */
    size_t n_views;
    bool dead; /* according to pidfd */
} zs_shm_peer;

typedef struct zs_shm {
    zs_comm base;
    unsigned lifetime;          /* zs_lifetime() at creation: differs in forked children */
    int listener;               /* socket, -1 once connected */
    int control_fd, pidfd;      /* own */
    zs_file *buckets;           /* own */
    zs_file *flats;             /* of all ranks; NULL until connected */
    int flats_fd;               /* the same, created by rank 0, until connected; -1: none */
    uint64_t *flat_offsets;     /* [ZS_SHM_FLATS] offsets of this rank's shards of the flats in that file */
    _Atomic size_t n_flats;     /* number so far */
    zs_shm_peer *peers;         /* [world] */
    struct pollfd *polls;       /* [world], for pidfds */
    zs_shm_control *own;        /* peers[rank].control */
    size_t heap_used;           /* bytes of the heap in use */
    uint64_t exchanges, pieces; /* counts of exchanges and of pieces of broadcasts */
    int spins;                  /* checks before a wait sleeps */
    bool connected, closed;
} zs_shm;

/* Rank `rank`'s copy of the unit's record at offset `record`. */
static inline zs_shm_unit_record *zs_shm_unit_at(const zs_shm *shm, int rank, uint32_t record)
{
    return (zs_shm_unit_record *)(void *)(shm->peers[rank].control->heap + record);
}

/* Rank `rank`'s copy of the reader's record at offset `record`. */
static inline zs_shm_reader_record *zs_shm_reader_at(const zs_shm *shm, int rank, uint32_t record)
{
    return (zs_shm_reader_record *)(void *)(shm->peers[rank].control->heap + record);
}

/* Are calls allowed? Not before connecting, after closing, or in a forked child. */
bool zs_shm_live(const zs_shm *shm);

/* The same as a status: ZS_ERR_STATE, with the reason; a rank that has aborted is refused too (its peers' waits have
 * failed, so anything it would still send could only mislead them). */
zs_status zs_shm_usable(const zs_shm *shm);

/* Creates a record of `bytes` in this rank's heap, which starts with `name`; all ranks create the same ones in the
 * same order. */
zs_status zs_shm_record(zs_shm *shm, size_t bytes, const char *name, uint32_t *record);

/* --- telling the peers -------------------------------------------------------------------------------------------- */

/* Records, for the peers' messages, that this rank has now done `act`. */
void zs_shm_note(zs_shm *shm, zs_shm_act act);

/* Stores `value` in a state word of this rank, and wakes the peers that waited only for this. */
void zs_shm_set(zs_shm *shm, _Atomic uint64_t *word, uint64_t value);

/* Wakes all sleeping peers: this rank has ended. */
void zs_shm_wake_all(zs_shm *shm);

/* Reports to the peers that this rank cannot continue; their waits then fail with `status`. Idempotent. */
void zs_shm_stop(zs_shm *shm, zs_status status, const char *reason);

/* publish: publishes a text. */
void zs_shm_publish_text(zs_comm *comm, zs_topic topic, const char *text);

/* --- looking at them ---------------------------------------------------------------------------------------------- */

/* Asks the system which peers have died since. */
void zs_shm_look_at_lives(zs_shm *shm);

/* Has a rank aborted? For calls that do not wait. */
zs_status zs_shm_check_stop(const zs_shm *shm);

/* published: a text that rank `rank` has published. */
const char *zs_shm_published_text(const zs_comm *comm, int rank, zs_topic topic);

/* A rank's state at one moment. */
typedef struct zs_shm_moment {
    zs_shm_act act;   /* as published: its wait, or its last act */
    uint64_t wait_id; /* odd: it waits */
    int missing;      /* the rank that it waits for, -1: none */
} zs_shm_moment;

/* The published state of rank `r`, without `missing`. */
zs_shm_moment zs_shm_state_of(const zs_shm *shm, int r);

/* The lowest rank that has not done what `who` needs for `act`; -1 if there is none. */
int zs_shm_missing(const zs_shm *shm, int who, zs_shm_act act);

/* The same, but the first one from `from` on, in a circle. */
int zs_shm_missing_from(const zs_shm *shm, int who, zs_shm_act act, int from);

/* Does this rank's `act` still wait for rank `r`? */
bool zs_shm_is_missing(const zs_shm *shm, int r, zs_shm_act act);

/* --- shm_needs.c -------------------------------------------------------------------------------------------------- */

/* ZS_ERR_UNSUPPORTED, with the limit, the rest of it and the need, if rank `rank` cannot join `world` ranks. A limit
 * that cannot be read (no /proc) is not checked. */
zs_status zs_shm_check_limits(int rank, int world);

/* --- shm_state.c -------------------------------------------------------------------------------------------------- */

/* See zs_state_ops. */
extern const zs_state_ops zs_shm_state;

/* --- shm_wait.c --------------------------------------------------------------------------------------------------- */

/* Waits until no rank is missing. Fails with ZS_ERR_PEER (one died, left or aborted), ZS_ERR_DIVERGED (proven: all
 * ranks wait for each other), ZS_ERR_TIMEOUT, or ZS_ERR_TORCH (interrupted). */
zs_status zs_shm_wait(zs_shm *shm, zs_shm_act act);

/* The same, but returns with *reached false instead of ZS_ERR_DIVERGED. */
zs_status zs_shm_wait_or_yield(zs_shm *shm, zs_shm_act act, bool *reached);

/* outlive. */
void zs_shm_outlive(zs_comm *comm, double seconds);

/* --- shm_wake.c --------------------------------------------------------------------------------------------------- */

/* Before a sleep, while this rank's wait for `act` is published: gives a missing rank the turn to wake this one. False:
 * no rank is missing now. *seen is for zs_shm_sleep. */
bool zs_shm_prepare_sleep(zs_shm *shm, zs_shm_act act, uint32_t *seen);

/* Sleeps until woken since *seen, or for `seconds`; may return early without a reason. */
void zs_shm_sleep(zs_shm *shm, uint32_t seen, double seconds);

/* The wait is over: no rank is to wake this one. */
void zs_shm_get_up(zs_shm *shm);

/* --- shm_flats.c -------------------------------------------------------------------------------------------------- */

/* flat_new. */
zs_status zs_shm_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out);

/* numbers and continue_from, see comm_ops.h: of flats, and how much of the flats' file and of the records' heap is in
 * use. */
void zs_shm_numbers(const zs_comm *comm, uint64_t *out);
void zs_shm_continue_from(zs_comm *comm, const uint64_t *numbers);

/* The transport closes: flats freed after this keep their pages, as others may continue to evaluate, until all
 * processes have closed the file. */
void zs_shm_flats_end(zs_shm *shm);

/* --- shm_report.c ------------------------------------------------------------------------------------------------- */

enum { ZS_SHM_PHRASE = 192 }; /* bytes of the text of one rank's act */

/* Describes this rank's wait, without the numbers that change from step to step: "reduce gradients of unit 'a'". */
void zs_shm_describe(const zs_shm *shm, zs_shm_act act, char *text, size_t size);

/* Failures with their messages: a peer's death, an orderly exit, a deadline, a circle. `missing` is the rank waited
 * for; `moments` [world] are those of the proof, as the ranks may have moved on by the time of the message. */
zs_status zs_shm_fail_dead(const zs_shm *shm, zs_shm_act act, int dead, int missing);
zs_status zs_shm_fail_left(const zs_shm *shm, zs_shm_act act, int left);
zs_status zs_shm_fail_timeout(const zs_shm *shm, zs_shm_act act, int missing, double waited);
zs_status zs_shm_fail_circle(const zs_shm *shm, const zs_shm_moment *moments);

/* This rank exchanges or broadcasts within the call `ours`, rank `r` within `theirs`. */
zs_status zs_shm_fail_calls(const zs_shm *shm, const char *ours, int r, const char *theirs);

/* Rank `r` has reached an exchange of another kind. */
zs_status zs_shm_fail_apart(const zs_shm *shm, zs_shm_act act, int r);

/* Prints a line on stderr about a long wait, and one for each rank that says where it is. */
void zs_shm_print_stall(zs_shm *shm, zs_shm_act act, double waited);

/* --- shm_round.c -------------------------------------------------------------------------------------------------- */

/* A unit. Its record stays after it is freed: peers may still read it. */
typedef struct zs_shm_unit {
    zs_cunit base;
    uint32_t record; /* offset in the heap */
    bool compared;   /* the peers' records describe the same unit */
} zs_shm_unit;

/* Of units. */
zs_status zs_shm_unit_init(zs_comm *comm, zs_cunit *cunit);
void zs_shm_renamed(zs_comm *comm, zs_cunit *cunit);

/* Of rounds. `send` never waits. */
zs_status zs_shm_send(zs_comm *comm, zs_cunit *cunit);
zs_status zs_shm_arrive(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);
zs_status zs_shm_share(zs_comm *comm, zs_cunit *cunit);
zs_status zs_shm_arrive_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);
zs_status zs_shm_release(zs_comm *comm, zs_cunit *cunit);
zs_status zs_shm_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);

#endif
