/* engine.h - the inside of an engine, for the files that make it up: engine.c (what it has), session.c, backward.c and
 * schedule.c (what it does), and those that plan or count for it. A unit's files see engine_facts.h, all others schedule.h.
 */
#ifndef ZS_ENGINE_H
#define ZS_ENGINE_H

#include "unit/offload.h"
#include "unit/plan.h"
#include "unit/prefetch.h"
#include "unit/usage.h"

/* Which pass is running. FAILED: a backward has raised here; what needs no peer is put in order, and the peers' part of it
 * is done before anything else (zs_engine_settle). */
typedef enum engine_phase { IDLE, FORWARD, BACKWARD, FAILED } engine_phase;

/* See history.h. */
typedef struct zs_history {
    uint64_t reductions;             /* backwards that have ended, well or not */
    uint64_t stepped;                /* how many had when an optimizer stepped last */
    uint64_t window;                 /* how many of them went well on all ranks, and one */
    uint64_t steps, loads, n_loaded; /* since the last of those: steps and loads, folded; parameters loaded */
    uint64_t agreed, told;           /* what all ranks had at that time; what the peers are told now */
} zs_history;

/* See schedule.h. */
struct zs_engine {
    long refs;
    /* See zs_engine_hook_param: the schedule's. */
    zs_status (*hook_param)(zs_unit *, int64_t);
    zs_ranks ranks;          /* counted references */
    int n_parts;             /* slices of a copy of the model */
    int part;                /* this rank's */
    int *part_of;            /* [ranks.all->world] each rank's; owned */
    zs_arena *arena;         /* owned */
    zs_pool *grads;          /* owned: memory of its units' gradients */
    bool lent_grads;         /* units that went to another engine have gradients in that memory */
    zs_bucket_pool *buckets; /* owned */
    zs_offload offload;      /* with a counted reference */
    zs_reader *reader;       /* owned */
    zs_unit **units;         /* [n] borrowed: a unit takes itself off the list; parents before children */
    size_t n;
    engine_phase phase;
    zs_prefetch prefetch;
    zs_unit *latest;        /* made whole last in this pass; borrowed */
    zs_unit *last;          /* made whole last in the last forward; borrowed */
    bool outermost_gathers; /* the forward that is running began with a unit that has parameters */
    zs_unit **open;         /* [n_open] what holds the session open, the innermost last: forwards of units that are
                             * running; NULL: a session opened by hand, or of a unit that is gone; owned */
    size_t n_open, open_room;
    bool recording; /* autograd was on when the forward session began: a backward may follow */
    bool reading;   /* a reader session is open */
    bool spoiled;   /* a backward that failed has left gradients that are not to be used */
    bool gave_up;   /* the backward being closed was abandoned here */
    zs_history history;
    uint64_t sample; /* of what the last write has left in the shards, if `sampled`; see sample.h */
    bool sampled;
    bool mishap;      /* the peers are told of one */
    int64_t session;  /* when the last session of forwards began, in nodes of the graph */
    size_t next_post; /* (collective transports) how many units have posted in this backward */
    zs_call *calls;   /* [n_calls] what a forward of the modules in their order does; owned */
    size_t n_calls;
    bool reserved;        /* for the units, calls and settings that it has now */
    zs_engine_bytes peak; /* the most of each that there has been */
    zs_tensor **buffers;  /* [n_buffers] owned weak handles */
    size_t n_buffers;
};

/* --- engine.c ------------------------------------------------------------------------------------------------------------- */

/* zs_engine_new, of an engine whose parameters get their hooks from `hook_param`. */
zs_status zs_engine_make(const zs_ranks *ranks, const char *name, zs_status (*hook_param)(zs_unit *, int64_t),
                         zs_engine **out);

#endif
