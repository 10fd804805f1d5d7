/* shm.h - the shm transport inside: what lies in shared memory, and what one rank keeps about the others.
 *
 * Every rank is the only writer of its own words and values in shared memory; the others map them and look. So no
 * state word ever needs a lock or a compare-and-swap. (Only who is to wake a sleeper is handed on: shm_wake.c.)
 *
 *   control  one file per rank, a zs_shm_control: state words, mailboxes, and a heap of records, one per unit and per
 *            reader. All ranks make the same records in the same order, so a record has the same offset in every rank's
 *            heap.
 *   buckets  one file per rank: full gradients, at offsets that the owner tells with each post
 *   flats    one file for all: of each flat the shards of all ranks side by side, so that one mapping is the full
 *            buffer
 *
 * All atomics are sequentially consistent: sleeping and waking (shm_wake.c) and entering and leaving (shm_reader.c) are
 * both "write mine, then read yours", which anything weaker breaks. On x86 that costs one locked store per change.
 */
#ifndef ZS_SHM_H
#define ZS_SHM_H

#include <stdalign.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "base/file.h"
#include "comm/comm_local.h"
#include "comm/script.h"

enum {
    ZS_SHM_LINE = 64,       /* cache line: words with different writers lie on different ones */
    ZS_SHM_MAIL = 4096,     /* most bytes of one exchange */
    ZS_SHM_STAGE = 1 << 20, /* bytes of one piece of a broadcast: small enough to stay in the cache */
    ZS_SHM_HEAP = 64 << 20, /* room for records; costs memory only where used */
    ZS_SHM_FLATS = 1 << 16, /* flats of one group whose end is told */
    ZS_SHM_NAME = 96,       /* longest name kept of a unit or reader */
    ZS_SHM_TEXT = 1536,     /* longest reason of an abort */
};

/* What a rank does or waits for. The names say what the peers must have done for the wait to end. */
typedef enum zs_shm_what {
    ZS_SHM_JOINED,     /* nothing yet */
    ZS_SHM_POSTED,     /* record: unit, number: round */
    ZS_SHM_SHARED,     /* likewise */
    ZS_SHM_RELEASED,   /* likewise */
    ZS_SHM_EXCHANGED,  /* number: exchange */
    ZS_SHM_SENT,       /* number: piece of a broadcast, record: root */
    ZS_SHM_TAKEN,      /* number: piece of a broadcast */
    ZS_SHM_FORWARD,    /* record: reader: peers admit a training forward */
    ZS_SHM_EVALUATION, /* record: reader, number: version: peers admit another forward */
    ZS_SHM_BACKWARD,   /* record: reader: peers admit a backward */
    ZS_SHM_LEFT_ALONE, /* record: reader: no peer reads this rank's shards, nor is about to */
    ZS_SHM_CAUGHT_UP,  /* record: reader: no peer lags behind in looks */
    ZS_SHM_UNREAD      /* record: reader: no peer reads this rank's shards */
} zs_shm_what;

typedef struct zs_shm_act {
    zs_shm_what what;
    uint32_t record; /* offset in the heap, or the root's rank */
    uint64_t number;
    bool yields; /* a wait for it gives up if all ranks wait for each other, see zs_wait */
} zs_shm_act;

/* An act that does not yield. */
static inline zs_shm_act zs_shm_act_make(zs_shm_what what, uint32_t record, uint64_t number)
{
    return (zs_shm_act){.what = what, .record = record, .number = number};
}

typedef struct zs_shm_mailbox {
    uint64_t bytes;     /* length given by the sender: must be the same on all ranks */
    char call[ZS_CALL]; /* the call that it is part of, likewise; "": of one without a name */
    char data[ZS_SHM_MAIL];
} zs_shm_mailbox;

/* Start of each rank's control file. "own" = written by its owner only. */
typedef struct zs_shm_control {
    /* Sleeping: these two are written by others too, see shm_wake.c. */
    alignas(ZS_SHM_LINE) _Atomic uint32_t wake; /* raised by who wakes the owner */
    _Atomic uint64_t asleep; /* 0: no; else wait_id << 16 | 1 + the rank whose turn it is to wake the owner */

    /* What the owner does. wait_id is odd while it waits for the act below; it changes with every wait. */
    alignas(ZS_SHM_LINE) _Atomic uint64_t wait_id;
    _Atomic uint64_t act_what; /* yields << 63 | zs_shm_what << 32 | record */
    _Atomic uint64_t act_number;

    /* Where the owner's script is. */
    _Atomic uint64_t placed; /* 1 + the wait_id in which `place` was told; 0: never */
    char place[ZS_PLACE];

    /* Exchanges and broadcasts: counts of what the owner has done, and sizes for checking. */
    alignas(ZS_SHM_LINE) _Atomic uint64_t exchanged;
    _Atomic uint64_t sent, taken;
    uint64_t sent_bytes[2]; /* bytes left of the broadcast when piece n was sent, by parity of n */
    char doing[ZS_CALL];    /* the call that the last exchange or broadcast was part of */

    /* The end. stopped is set after the text is complete. */
    alignas(ZS_SHM_LINE) _Atomic uint32_t left; /* closed in an orderly way */
    _Atomic uint32_t ended;                     /* and before that, `past` was set */
    zs_fingerprint fingerprint;
    _Atomic uint32_t stopped; /* the zs_status of an abort, 0: none */
    char stop_text[ZS_SHM_TEXT];
    zs_diagnostics words; /* own */

    alignas(4096) zs_shm_mailbox mail[2]; /* by parity of the exchange's number */
    alignas(4096) char stage[2][ZS_SHM_STAGE];
    alignas(4096) char heap[ZS_SHM_HEAP];
    _Atomic uint64_t freed[ZS_SHM_FLATS / 64]; /* own; which of its flats, as a bitmap; see shm_flats.h */
} zs_shm_control;

/* One round's post. Two of them, by parity of the round: nobody posts round k + 2 before all have released round k,
 * since posting k + 1 needs the own release of k, and posting k + 2 follows collecting k + 1 from all. */
typedef struct zs_shm_post {
    uint64_t index;  /* bucket's number in its owner's file */
    uint64_t offset; /* its place there, constant for one index */
    uint64_t bytes;  /* its capacity, constant likewise; 0: nothing but the header was posted */
} zs_shm_post;

/* Head of a unit's record; two rounds' headers follow. */
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

/* A reader's record: nearly its whole state is one word, see shm_word.h. */
typedef struct zs_shm_reader_record {
    char name[ZS_SHM_NAME];
    alignas(ZS_SHM_LINE) _Atomic uint64_t word;
    _Atomic uint64_t work; /* a digest of the operations by hand since its last known write; set before the word */
    _Atomic uint64_t
        looks; /* low half: how many at its version since the last collective of the script's; raised once it reads, set
                             * to 0 before the word has another. High half: how many such collectives it has come to */
    _Atomic uint64_t
        fingerprint[ZS_FINGERPRINT_WORDS]; /* a zs_fingerprint; set before the word that begins a forward */
} zs_shm_reader_record;

/* The high half of `looks`. */
static inline uint64_t zs_shm_meetings(uint64_t looks)
{
    return looks >> 32;
}

/* A peer's bucket as mapped here. */
typedef struct zs_shm_view {
    char *ptr; /* NULL: not mapped yet */
    size_t bytes;
} zs_shm_view;

/* What this rank keeps about one rank (itself too). */
typedef struct zs_shm_peer {
    zs_shm_control *control; /* NULL until connected */
    pid_t pid;               /* as that rank knows itself; for messages */
    int pidfd;               /* readable once it is dead; -1 for ourselves */
    int buckets;             /* its file of buckets; -1 for ourselves */
    zs_shm_view *views;      /* its buckets by index */
    size_t n_views;
    bool dead; /* pidfd has said so */
} zs_shm_peer;

typedef struct zs_shm {
    zs_comm base;
    unsigned lifetime;          /* zs_lifetime() at birth: differs in forked children */
    int listener;               /* socket, -1 once connected */
    int control_fd, pidfd;      /* own */
    zs_file *buckets;           /* own */
    zs_file *flats;             /* of all ranks; NULL until connected */
    int flats_fd;               /* the same, made by rank 0, until connected; -1: none */
    uint64_t *flat_offsets;     /* [ZS_SHM_FLATS] where the own parts of the flats begin in that file */
    _Atomic size_t n_flats;     /* so many so far */
    zs_shm_peer *peers;         /* [world] */
    struct pollfd *polls;       /* [world], for pidfds */
    zs_shm_control *own;        /* peers[rank].control */
    size_t heap_used;           /* bytes of the heap that have records */
    uint64_t exchanges, pieces; /* counts of exchanges and of pieces of broadcasts */
    int spins;                  /* looks before a wait goes to sleep */
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

/* Have calls a meaning: not before connecting, nor after closing, nor in a forked child. */
bool zs_shm_live(const zs_shm *shm);

/* The same as a status: ZS_ERR_STATE, saying which; and a rank that has aborted stays out (its peers' waits have
 * failed, so what it would still say can only mislead them). */
zs_status zs_shm_usable(const zs_shm *shm);

/* Makes a record of `bytes` in the own heap, which starts with `name`; all ranks make the same ones in the same
 * order. */
zs_status zs_shm_record(zs_shm *shm, size_t bytes, const char *name, uint32_t *record);

/* --- telling the peers -------------------------------------------------------------------------------------------- */

/* Remembers, for the peers' messages, that this rank has now done `act`. */
void zs_shm_note(zs_shm *shm, zs_shm_act act);

/* Stores `value` in an own state word and wakes the peers that waited for nothing else. */
void zs_shm_set(zs_shm *shm, _Atomic uint64_t *word, uint64_t value);

/* Wakes all peers that sleep: this rank has come to an end. */
void zs_shm_wake_all(zs_shm *shm);

/* Tells the peers that this rank cannot go on; `status` is what their waits then fail with. Idempotent. */
void zs_shm_stop(zs_shm *shm, zs_status status, const char *reason);

/* tell. */
void zs_shm_publish_text(zs_comm *comm, zs_topic topic, const char *text);

/* --- looking at them ---------------------------------------------------------------------------------------------- */

/* Has somebody aborted? For calls that do not wait. */
zs_status zs_shm_check_stop(const zs_shm *shm);

/* said. */
const char *zs_shm_published_text(const zs_comm *comm, int rank, zs_topic topic);

/* Where a rank was seen. */
typedef struct zs_shm_moment {
    zs_shm_act act;   /* as published: what it waits for, or has done last */
    uint64_t wait_id; /* odd: it waits */
    int missing;      /* the rank it waits for, -1: none */
} zs_shm_moment;

/* What rank `r` has published, without `missing`. */
zs_shm_moment zs_shm_state_of(const zs_shm *shm, int r);

/* The lowest rank that has not done what `who` needs for `act`; -1 if none is missing. */
int zs_shm_missing(const zs_shm *shm, int who, zs_shm_act act);

/* The same, but the first one counted from `from` on, in a circle. */
int zs_shm_missing_from(const zs_shm *shm, int who, zs_shm_act act, int from);

/* Has rank `r` not yet done what this rank needs for `act`? */
bool zs_shm_is_missing(const zs_shm *shm, int r, zs_shm_act act);

#endif
