/* turn.h - checks before each collective that all ranks run the same one.
 *
 * Some transports pair collectives up by order alone (a process group, NCCL). There each rank first sends its turn, a
 * description of its next collective. A transport supplies the exchange of turns, and its part in a gather that its
 * script does not ask for (zs_turns_ops).
 *
 *   turn.c        compares all ranks' turns: pure functions, the same conclusion on all ranks
 *   turn_text.c   names of turns in messages
 *   agree.c       exchanges turns until all agree; what this rank can contribute to others' gathers
 */
#ifndef ZS_TURN_H
#define ZS_TURN_H

#include "comm/comm.h"

enum {
    ZS_TURN_SERVES = 8,   /* models whose shards a rank may contribute to gathers of others, as it reports */
    ZS_TURN_PHRASE = 448, /* room for the text of a rank's act */
};

typedef enum zs_turn_kind {
    ZS_TURN_GATHER = 1,
    ZS_TURN_POST,
    ZS_TURN_SHARE,
    ZS_TURN_EXCHANGE,
    ZS_TURN_BROADCAST,
    ZS_TURN_GIVE_UP, /* nothing follows; ranks that reported something else learn that their backward is over */
} zs_turn_kind;

/* A rank's next collective, and its state. Ranks in the same collective have the same first four fields and name. */
typedef struct zs_turn {
    uint64_t kind;                   /* a zs_turn_kind */
    uint64_t number;                 /* which flat, unit, exchange or broadcast */
    uint64_t round;                  /* of the unit's gradients; the root of a broadcast; a gather's zs_wire; else 0 */
    uint64_t bytes;                  /* that each rank sends */
    uint64_t reading;                /* of the last pass, see zs_reading_encode */
    uint64_t slot;                   /* (gather) the host's shared memory to gather into; 0: none */
    uint32_t serves[ZS_TURN_SERVES]; /* models whose shards have not changed since their last forward; 0: no more */
    uint64_t joinable;               /* (gather) other ranks can take part even if their script does not ask for it */
    uint64_t model;                  /* the number of the unit's model; 0: none */
    zs_fingerprint fingerprint;      /* this rank's changes to parameters */
    char owner[32];                  /* the name of the unit's model, for messages */
    char name[88];                   /* of the unit, truncated; of the call that an exchange or broadcast is part of */
} zs_turn;

/* A turn of this kind; fields that are not given are 0. `name` may be NULL. */
zs_turn zs_turn_of(zs_turn_kind kind, uint64_t number, size_t bytes, const char *name);

/* --- turn.c ------------------------------------------------------------------------------------------------------- */

/* The result of comparing all ranks' turns. */
typedef struct zs_comparison {
    bool same;    /* all ranks run the same collective */
    bool synced;  /* their changes to parameters are the same, as far as these turns need it */
    int gather;   /* the rank whose gather all take part in before they send their turns again; -1: none */
    int gave_up;  /* the first rank that abandoned its backward; -1: none */
    int unsynced; /* the rank whose changed parameters keep ranks from gathering together; -1: none */
} zs_comparison;

/* Compares `turns` [world]. */
zs_comparison zs_turns_compare(const zs_turn *turns, int world);

/* Do two ranks run the same collective? An equivalence: if all ranks run that of one of them, all run the same. */
bool zs_turns_same(const zs_turn *a, const zs_turn *b);

/* Can the ranks of each host gather into one memory, independent of other hosts? */
bool zs_turns_same_slots(const zs_turn *turns, int world, int per_host);

/* Sets the fingerprints [world] to compare: of ranks in rank 0's collective, or of `all`, in any collective. Returns
 * whether a rank reads alone. */
bool zs_turns_fingerprints(const zs_turn *turns, int world, bool all, zs_fingerprint *out);

/* Fails with ZS_ERR_DIVERGED, as rank `own`: turns differ, and there is no gather. `failures`: of all ranks, as
 * text. */
zs_status zs_turns_explain(const zs_turn *turns, int world, int own, const char *failures);

/* --- turn_text.c ------------------------------------------------------------------------------------------------- */

/* Is it an exchange or a broadcast? */
bool zs_turn_talks(const zs_turn *turn);

/* Describes a rank's act, as a phrase to follow "rank 0 was"; `owner` is named after the unit. / The same for this
 * rank, and where its script is. / For two ranks that differ within the same call. / Without numbers that change from
 * step to step, for profiles. */
void zs_turn_describe(const zs_turn *turn, const char *owner, char *text, size_t size);
void zs_turn_describe_here(const zs_turn *turn, const char *owner, char *text, size_t size);
void zs_turn_describe_talk(const zs_turn *turn, char *text, size_t size);
void zs_turn_describe_brief(const zs_turn *turn, char *text, size_t size);

/* The remedy if not all ranks reach it. */
const char *zs_turn_remedy(const zs_turn *turn);

/* --- agree.c ------------------------------------------------------------------------------------------------------ */

/* A transport's exchange of turns. */
typedef struct zs_turns_ops {
    /* Gets all ranks' turns [world]; this rank's is `mine`. */
    zs_status (*exchange)(zs_comm *, const zs_turn *mine, zs_turn *turns);
    /* Gets all ranks' texts [world]; this rank's are in the head. `turn`: this rank's. */
    zs_status (*exchange_texts)(zs_comm *, const zs_turn *turn, zs_diagnostics *all);
    /* Takes part in the gather `turn` with this rank's shard, which lies in `mem`. */
    zs_status (*serve)(zs_comm *, const zs_turn *turn, const char *shard, zs_mem *mem);
    /* ZS_OK if collectives can run. */
    zs_status (*usable)(zs_comm *);
    /* Fails with this thread's record: the transport is unusable from now on. */
    zs_status (*fail)(zs_comm *, const zs_turn *turn, zs_status status);
} zs_turns_ops;

enum { ZS_TURN_LISTS = 256 }; /* of flats */

typedef struct zs_turn_flat zs_turn_flat;

/* A transport's state of turns, zeroed at first: what `turns` in its head points to. */
struct zs_turns {
    const zs_turns_ops *ops;            /* NULL: ranks exchange no turns */
    zs_turn_flat *flats[ZS_TURN_LISTS]; /* live flats, by their numbers; owned */
    zs_reader *readers;                 /* models, by their last forwards, the latest first; they unlink themselves */
    uint64_t n_flats, n_units, n_talks; /* counts so far */
    bool same_slots; /* in the last turn all ranks had the same gather, and those of each host the same slot */
};

/* The turn of a gather of the flat / of an exchange or broadcast of `bytes`, with the call that it belongs to. */
zs_turn zs_gather_turn(const zs_comm *comm, const zs_flat_mem *flat, const char *unit);
zs_turn zs_talk_turn(const zs_comm *comm, zs_turn_kind kind, size_t bytes);

/* The turn that this rank sends for `turn`. */
zs_turn zs_turn_to_send(const zs_comm *comm, const zs_turn *turn);

/* Sends `turn` to all ranks and waits for theirs; `turns` [world + 1] is room for them. While they differ, takes part
 * in what others gather; if that is impossible, ZS_ERR_DIVERGED on every rank, after which the transport stays usable.
 * Without this check, a process group pairs up different collectives: wrong sums, or an abort inside gloo. */
zs_status zs_turns_agree(zs_comm *comm, const zs_turn *turn, zs_turn *turns);

/* The same when `turns` already has all ranks' turns. */
zs_status zs_turns_agree_on(zs_comm *comm, const zs_turn *turn, zs_turn *turns);

/* flat_new, flat_free, numbers and continue_from, see comm_ops.h: flats are found by their keys. */
zs_status zs_turns_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out);
void zs_turns_flat_free(zs_comm *comm, zs_flat_mem *flat);
void zs_turns_numbers(const zs_comm *comm, uint64_t *out);
void zs_turns_continue_from(zs_comm *comm, const uint64_t *numbers);

/* By the fields' names: zs_local_reader_ops, plus whether anything was written since the last forward began. */
zs_status zs_turns_reader_new(zs_comm *comm, const char *name, zs_reader **out);
void zs_turns_reader_free(zs_comm *comm, zs_reader *reader);
zs_status zs_turns_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading);
zs_status zs_turns_write_begin(zs_comm *comm, zs_reader *reader);
void zs_turns_write_end(zs_comm *comm, zs_reader *reader, bool known);

/* The table of these, and zs_local_read_end. */
extern const zs_reader_ops zs_turns_reader_ops;

#endif
