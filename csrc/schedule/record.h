/* record.h - what the schedule knows of one unit, and of one bucket.
 *
 * When a unit is gathered, resharded and reduced hangs on these few facts and on nothing else. Units and
 * buckets begin with such a record. Each group of fields has one file that writes it; everybody may read.
 *
 *   SHARDED --> GATHERING --> FULL --> SHARDED     forward: gather, use, give back
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

/* What a unit is: it is made so, and changes between passes at most (forward.c). */
typedef struct zs_traits {
    bool replicated; /* this rank holds all of its parameters */
    bool fixed;      /* and computes with them where they lie: they are unsharded all the time */
    bool empty;      /* it has no parameters */
    bool stays;      /* unsharded from forward to backward (ZeRO-2) */
    bool kept;       /* likewise, since there is memory to spare (engine/keep_gathered.h) */
    bool reduces;    /* its gradients leave this rank */
    size_t bucket_bytes;
} zs_traits;

/* When its forwards ran, in nodes of autograd's graph (through.c, which tells what they are for). */
typedef struct zs_span {
    int64_t begun;  /* when the forward that is running, or ran last, began */
    int64_t oldest; /* when the oldest of those began whose backward may come */
    bool past;      /* the last backward has ended since */
    bool retired;   /* this backward is through with it */
} zs_span;

/* An operation in another unit's forward that reads the parameters (reads.c). */
typedef struct zs_read {
    size_t depth; /* how many forwards were open then: it is unsharded until the innermost of them ends; 0: not read */
    uint64_t operation; /* the number of the one that has read it last */
    bool used;          /* it was read indeed, and is not only kept for a reader that may come */
    zs_record *by;      /* in whose forward it was read last; borrowed; NULL: none */
    zs_record *reader;  /* that one, if it had the parameters to its end; borrowed */
} zs_read;

/* Units that are to be gathered early (unshard.c). */
typedef struct zs_follow {
    zs_record **records; /* [n] borrowed; the array is owned */
    size_t n;
} zs_follow;

/* A bucket: lent to a unit for one round, it comes back when this rank has summed its shard and all peers have read
 * theirs (rounds.c). */
typedef struct zs_lease {
    size_t bytes;       /* that it holds */
    zs_record *user;    /* borrowed: who packs into it, or whose posted round it carries; NULL if idle or lost */
    bool posted;        /* peers may be reading it. Without a user: lost, since nobody can tell when they are done */
    uint64_t posted_at; /* order of posting, to reuse the oldest */
} zs_lease;

/* Its round of gradients: the one that is being packed, and the one that is out (rounds.c). */
typedef struct zs_round {
    bool syncs;         /* gradients of this backward are reduced */
    bool local;         /* gradients of earlier backwards have stayed here (no_sync) */
    zs_lease *packing;  /* bucket being packed, NULL if none */
    zs_lease *out;      /* bucket that is posted and not idle again, NULL if none or an empty post */
    int64_t n_arrived;  /* gradients packed in this round */
    int64_t n_expected; /* parameters that want a gradient in this backward */
    bool has_frozen;    /* others do not: backward may need those after the last gradient has come */
    bool packed;        /* (in order) the round is packed and waits for its turn */
    bool posted;        /* something was posted in this backward */
    bool outstanding;   /* a posted round is not yet summed; then it stands in the queue */
    bool shared;        /* (replicated) this rank's shard of it is summed and shared */
    zs_record *next;    /* next in that queue; borrowed */
} zs_round;

/* A unit that is stepped in backward (rounds.c). */
typedef struct zs_early {
    bool on;
    int calls; /* forwards since the last backward */
    bool over; /* nothing of this rank's backward will want the unit again */
} zs_early;

struct zs_record {
    zs_traits is;
    zs_unit_state state; /* unshard.c */
    bool pinned;         /* unsharded by hand, through forwards (unshard.c) */
    int inside;          /* forwards of its module that are running (forward.c) */
    bool sync;           /* the user wants gradients reduced (not in no_sync()); forward.c */
    zs_span span;
    zs_read read;
    zs_record *next[2];        /* gathered after this one in the last pass, by zs_phase; borrowed (unshard.c) */
    zs_record *ended_after[2]; /* the last pass that came here from this one ended here; NULL: it did not (unshard.c) */
    zs_follow by_hand[2];      /* the same as users want it */
    zs_round round;
    zs_early early;
};

/* Are the parameters whole right now? */
static inline bool zs_record_is_full(const zs_record *record)
{
    return record->is.fixed || record->state == ZS_FULL;
}

#endif
