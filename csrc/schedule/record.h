/* record.h - the schedule's state of one unit, and of one bucket.
 *
 * When a unit is gathered, resharded and reduced depends on these fields only. Units and buckets begin with such a
 * record. One file writes each group of fields; all may read them.
 *
 *    *   SHARDED --> GATHERING --> FULL --> SHARDED     forward: gather, use, reshard
 *                              |
 *                              +-----> REDUCING --> SHARDED    backward: gradients posted, then summed
 *                                        |
 *                                        +--> GATHERING        a checkpointed block that is recomputed once more
 */
#ifndef ZS_RECORD_H
#define ZS_RECORD_H

#include "base/passes.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct zs_record zs_record;

/* See the picture above. */
typedef enum zs_unit_state { ZS_SHARDED, ZS_GATHERING, ZS_FULL, ZS_REDUCING } zs_unit_state;

/* Properties of a unit, which change only between passes (forward.c). */
typedef struct zs_traits {
    bool replicated; /* this rank holds all of its parameters */
    bool fixed;      /* and computes with them in place: they are always unsharded */
    bool empty;      /* it has no parameters */
    bool stays;      /* unsharded from forward to backward (ZeRO-2) */
    bool kept;       /* the same, because there is memory to spare (engine/keep_gathered.h) */
    bool reduces;    /* its gradients leave this rank */
    size_t bucket_bytes;
} zs_traits;

/* When its forwards ran, counted in nodes of autograd's graph; see through.c. */
typedef struct zs_span {
    int64_t begun;  /* the start of the running, or else the last forward */
    int64_t oldest; /* the start of the oldest forward whose backward may come */
    bool past;      /* the last backward has ended since */
    bool retired;   /* this backward has finished with it */
} zs_span;

/* An operation in another unit's forward that reads the parameters (reads.c). */
typedef struct zs_read {
    size_t depth;       /* open forwards at the read: it stays unsharded until the innermost ends; 0: not read */
    uint64_t operation; /* the number of the operation that read it last */
    bool used;          /* it was read, and not only kept for an expected reader */
    zs_record *by;      /* the unit whose forward read it last; borrowed; NULL: none */
    zs_record *reader;  /* the same, if it had the parameters to its end; borrowed */
} zs_read;

enum { ZS_STOPS = 4 }; /* a loop over two units needs two, as does a root that runs before and after its blocks */

/* A pass's way through a unit (unshard.c). */
typedef struct zs_stop {
    const zs_record *before; /* the unit that the pass came from; NULL: it began here; borrowed */
    zs_record *next;         /* that it went to; NULL: it ended here; borrowed */
} zs_stop;

/* The latest first, and one for each unit before. */
typedef struct zs_stops {
    zs_stop list[ZS_STOPS];
    size_t n;
} zs_stops;

/* Units to gather early (unshard.c). */
typedef struct zs_follow {
    zs_record **records; /* [n] borrowed; the array is owned */
    size_t n;
} zs_follow;

/* A bucket, lent to a unit for one round: idle again once this rank has summed its shard and all peers have read theirs
 * (rounds.c). */
typedef struct zs_lease {
    size_t bytes;    /* capacity */
    size_t asked;    /* (made in a backward) bytes of the unit that it was made for */
    bool extra;      /* beyond the plan, for ranks that differ in order; set by the executor */
    bool spare;      /* (extra) as if it did not exist, until this backward also needs one beyond the plan */
    zs_record *user; /* borrowed: the unit that packs into it or posted it; NULL if idle or lost */
    bool posted;     /* peers may be reading it. Without a user: lost, as the end of their reads is unknown */
} zs_lease;

/* A unit's round of gradients: the one being packed, and the posted one (rounds.c). */
typedef struct zs_round {
    bool syncs;         /* gradients of this backward are reduced */
    bool local;         /* it has local gradients of earlier backwards (no_sync) */
    zs_lease *packing;  /* bucket being packed, NULL if none */
    zs_lease *out;      /* posted bucket that is not idle again, NULL if none or an empty post */
    int64_t n_arrived;  /* gradients packed in this round */
    int64_t n_expected; /* parameters that need a gradient in this backward */
    bool has_frozen;    /* others do not: backward may need them after the last gradient has come */
    bool packed;        /* (in order) the round is packed and waits for its turn */
    bool posted;        /* something was posted in this backward */
    uint64_t posted_at; /* the order of posting, from 1; 0: never posted */
    bool outstanding;   /* a posted round is not yet summed; then it stands in the queue */
    bool shared;        /* (replicated) this rank has summed and shared its shard */
    zs_record *next;    /* next in that queue; borrowed */
} zs_round;

/* A unit that is stepped in backward (rounds.c). */
typedef struct zs_early {
    bool on;
    int calls; /* forwards since the last backward */
    bool over; /* this rank's backward does not need the unit again */
} zs_early;

struct zs_record {
    zs_traits is;
    zs_unit_state state; /* unshard.c */
    bool pinned;         /* unsharded by hand, through forwards (unshard.c) */
    int inside;          /* running forwards of its module (forward.c) */
    bool sync;           /* gradients are to be reduced (not in no_sync()); forward.c */
    bool was_unsynced;   /* that was off at times: a step has gradients that stay on their rank */
    zs_span span;
    zs_read read;
    zs_stops stops[2];    /* in the last passes, by zs_phase (unshard.c) */
    zs_follow by_hand[2]; /* units to gather after this one, set by users */
    zs_round round;
    zs_early early;
};

/* Are the parameters unsharded now? */
static inline bool zs_record_is_full(const zs_record *record)
{
    return record->is.fixed || record->state == ZS_FULL;
}

#endif
