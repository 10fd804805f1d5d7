/* engine_inside.h - the inside of an engine, for the files that make it up. A unit's files see context.h, all others
 * engine.h.
 */
#ifndef ZS_ENGINE_INSIDE_H
#define ZS_ENGINE_INSIDE_H

#include "base/refs.h"
#include "engine/engine.h"
#include "engine/graph_ranges.h"
#include "engine/keep_gathered.h"
#include "engine/plan.h"

/* What its hooks do: backward_events.c's, which makes engines. */
typedef struct zs_engine_hooks {
    zs_context_calls calls;
    /* Has the end of the running backward, or its failure, told to the engine. */
    zs_status (*backward_end)(zs_engine *);
} zs_engine_hooks;

/* See history.h. */
typedef struct zs_history {
    uint64_t window;       /* how many backwards have met all ranks, and one */
    zs_fingerprint agreed; /* what all ranks had when the last of those met them */
    /* Since then: optimizer steps; digests of their settings, summed; the step count in the last one's state; which
     * kinds of in-place operations have written to parameters and to gradients, as bits; digests of what was drawn
     * for parameters, summed; and which of those the peers have been told of. */
    uint64_t steps, settings, counts, writes, grads, draws, told_writes, told_grads, told_draws;
    /* The last load of all parameters since then; what has been loaded since, folded, and how many parameters; a
     * number for the parameters' own notes of that. */
    uint64_t full_load, loads, n_loaded, load_number;
    char written[256]; /* the last of the writes, for the peers' messages */
    bool untold;       /* they do not have it yet */
    bool in_pass;      /* a step was made by a hook of the backward that has not ended yet */
} zs_history;

typedef struct zs_join zs_join; /* see join.h */

/* See engine.h. */
struct zs_engine {
    zs_context context; /* its units' */
    zs_refs refs;
    const zs_engine_hooks *hooks;
    bool lent_grads;   /* units that went to another engine have gradients in context.grads */
    zs_reader *reader; /* owned */
    bool reading;      /* a reader session is open */
    bool spoiled;      /* a backward that failed has left gradients that are not to be used */
    zs_history history;
    uint64_t sample; /* of what the last known write has left in the shards, if `sampled`; see sample.h */
    bool sampled;
    bool writing;   /* a write has begun, and neither ended nor given way to a pass */
    bool by_hand;   /* a script has written to shards since the last pass or known write */
    bool failure;   /* the peers are told of one */
    zs_join *join;  /* what ranks tell each other within join(); NULL outside; owned */
    zs_call *calls; /* [n_calls] what a forward of the modules in their order does; owned */
    size_t n_calls;
    zs_keep_gathered keep_gathered;
    zs_engine_bytes peak;          /* the most of each that there has been */
    zs_graph_ranges ranges;        /* what its units' forwards have made of autograd's graph; see entries.h */
    struct zs_engine *next_listed; /* of the engines that have some; borrowed */
    zs_tensor **buffers;           /* [n_buffers] owned weak handles */
    size_t n_buffers;
    bool buffers_in_training; /* see zs_engine_sync_buffers */
    bool buffers_kept;        /* rank 0's have come, and no forward since has changed them in step with all ranks */
};

/* Its units: parents before children. A unit takes itself off the list. */
static inline size_t zs_engine_n_units(const zs_engine *engine)
{
    return engine->context.schedule.n;
}

/* The i-th of them. */
static inline zs_unit *zs_engine_unit(const zs_engine *engine, size_t i)
{
    return zs_unit_of(engine->context.schedule.records[i]);
}

/* The engine that a schedule begins. */
static inline zs_engine *zs_engine_of_schedule(zs_schedule *schedule)
{
    return (zs_engine *)schedule;
}

/* --- forward_events.c --------------------------------------------------------------------------------------------- */

/* A training forward is about to begin: readies units whose parameters scripts have unfrozen. */
zs_status zs_engine_thaw(zs_engine *engine);

/* --- engine.c ----------------------------------------------------------------------------------------------------- */

/* zs_engine_new, with these hooks, and actions that are carried out by `act`. */
zs_status zs_engine_make(const zs_ranks *ranks, const char *name, const zs_engine_hooks *hooks, const zs_actions *act,
                         zs_engine **out);

/* Registers a unit / takes it off the list when it dies. */
zs_status zs_engine_add(zs_engine *engine, zs_unit *unit);
void zs_engine_forget(zs_engine *engine, zs_unit *unit);

/* The second half of zs_engine_adopt: no pass of either engine is running. */
zs_status zs_engine_take_over(zs_engine *engine, zs_unit *unit);

/* Is this a thread of a backward of the model? */
static inline bool zs_backward_runs(const zs_schedule *schedule)
{
    return schedule->stage == ZS_IN_BACKWARD && zs_in_backward();
}

#endif
