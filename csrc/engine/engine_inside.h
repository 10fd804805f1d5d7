/* engine_inside.h - the inside of an engine, for the engine's own files. Units' files include context.h, all others
 * engine.h. */
#ifndef ZS_ENGINE_INSIDE_H
#define ZS_ENGINE_INSIDE_H

#include "base/refs.h"
#include "engine/engine.h"
#include "engine/graph_ranges.h"
#include "engine/keep_gathered.h"
#include "engine/plan.h"
#include "schedule/schedule.h"
#include "unit/context.h"

/* The engine's hooks, supplied by backward_events.c. */
typedef struct zs_engine_hooks {
    zs_context_calls calls;
    /* Makes the running backward call the engine at its end, or when it fails. */
    zs_status (*backward_end)(zs_engine *);
} zs_engine_hooks;

/* See history.h. */
typedef struct zs_history {
    uint64_t window;       /* the number of backwards in which all ranks communicated, plus one */
    zs_fingerprint agreed; /* all ranks' fingerprint in the last of those */
    /* Since then: optimizer steps; digests of their settings, summed; the step count in the last one's state; which
     * kinds of in-place operations have written to parameters and to gradients, as bits; digests of random draws into
     * parameters, summed; and the ones already published. */
    uint64_t steps, settings, counts, writes, grads, draws, told_writes, told_grads, told_draws;
    /* The last load of all parameters since then; a digest of later loads, and their number of parameters; the number
     * of the load, for zs_param.loaded_in. */
    uint64_t full_load, loads, n_loaded, load_number;
    char written[256]; /* the last write, for the peers' messages */
    bool in_pass;      /* a hook of the running backward made a step */
} zs_history;

/* The last two optimizer steps, each with the counts of its time. */
typedef struct zs_pace {
    zs_counts last, before;
    bool due; /* a backward has ended since */
} zs_pace;

/* See engine.h. */
struct zs_engine {
    zs_context context; /* its units' */
    zs_refs refs;
    uint64_t number; /* see zs_engine_number */
    const zs_engine_hooks *hooks;
    zs_reader *reader; /* owned */
    bool reading;      /* a reader session is open */
    size_t held;       /* sessions opened by hand: parameters must not change in them */
    bool spoiled;      /* a failed backward left gradients that must not be used */
    zs_history history;
    zs_pace pace;
    /* Ranges of the backward that runs, of its unit, and of an optimizer's step; NULL: none. */
    zs_profile *backward, *unit_backward, *step;
    const zs_unit *in_backward; /* the unit of the latter; compared only */
    uint64_t sample;            /* (sampled) of the shards after the last known write; see history.c */
    bool sampled;
    bool writing;     /* a write has begun, and neither it nor a pass has ended it */
    bool steps;       /* it is an optimizer's step, which no forward may end; else a closure's, say */
    bool interrupted; /* a write has, within a forward, which has not continued yet */
    bool by_hand;     /* a script has written to shards since the last pass or known write */
    zs_call *calls;   /* [n_calls] owned: the events of a forward of the modules in their order */
    size_t n_calls;
    zs_keep_gathered keep_gathered;
    zs_engine_bytes peak; /* of each kind */
    zs_engine_shown shown;
    zs_graph_ranges ranges;        /* the graph nodes of its units' forwards; see entries.c */
    struct zs_engine *next_listed; /* next engine with ranges; borrowed */
    zs_tensor **buffers;           /* [n_buffers] owned weak handles */
    size_t n_buffers;
    bool buffers_in_training; /* see zs_engine_sync_buffers */
    bool buffers_kept;        /* they are rank 0's, and no collective forward has changed them since */
};

/* Its units: parents before children. A unit removes itself when it is freed. */
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

/* Before a training forward: prepares units whose parameters scripts have unfrozen. */
zs_status zs_engine_thaw(zs_engine *engine);

/* --- engine.c ----------------------------------------------------------------------------------------------------- */

/* zs_engine_new with these hooks, and `act` as the executor. */
zs_status zs_engine_make(const zs_ranks *ranks, const char *name, const zs_engine_hooks *hooks, const zs_actions *act,
                         zs_engine **out);

/* Adds a unit / removes it when it is freed. */
zs_status zs_engine_add(zs_engine *engine, zs_unit *unit);
void zs_engine_forget(zs_engine *engine, zs_unit *unit);

/* The second half of zs_engine_adopt: no pass of either engine is running. */
zs_status zs_engine_take_over(zs_engine *engine, zs_unit *unit);

/* Is this a thread of a backward of the model? */
static inline bool zs_backward_runs(const zs_schedule *schedule)
{
    return schedule->stage == ZS_IN_BACKWARD && zs_in_backward();
}

/* --- acts.c ------------------------------------------------------------------------------------------------------- */

/* The actions of an engine's schedule. */
extern const zs_actions zs_engine_actions;

/* --- spoiled.c ---------------------------------------------------------------------------------------------------- */

/* ZS_ERR_STATE, naming the parameter, if one shows such a gradient. */
zs_status zs_engine_check_spoiled(zs_engine *engine);

/* After a failed backward: undoes its changes to the unit's gradients, or marks gradients that must not be used. */
void zs_engine_undo_grads(zs_unit *unit);

/* --- buffers.c ---------------------------------------------------------------------------------------------------- */

/* A forward begins: copies the buffers if it is due. */
zs_status zs_buffers_sync(zs_engine *engine, const zs_entry *entry);

/* Releases the tensors. */
void zs_buffers_free(zs_engine *engine);

/* --- engine_list.c ------------------------------------------------------------------------------------------------ */

/* Adds an engine, once / removes it before it is freed, if it is listed. From any thread. */
void zs_engine_list_add(zs_engine *engine);
void zs_engine_list_remove(zs_engine *engine);

/* *out: [*n] new references to the listed engines; the caller frees the array with free(). ZS_ERR_MEMORY. */
zs_status zs_engine_list_take(zs_engine ***out, size_t *n);

/* --- history.c ---------------------------------------------------------------------------------------------------- */

/* A known write has ended: samples its result. */
void zs_sample_written(zs_engine *engine);

/* The engine's units have changed: forgets the sample. */
void zs_sample_forget(zs_engine *engine);

/* Sets in *reading a sample of the shards now, and whether it differs from the last. 0 and false where reading them is
 * not cheap: on GPUs and disks. */
void zs_sample_take(zs_engine *engine, zs_reading *reading);

/* --- pace.c ------------------------------------------------------------------------------------------------------- */

typedef struct zs_engine zs_engine;

/* The backward of a forward of the unit begins: from here on, until another unit's begins or this one's gradients are
 * handed over, a trace shows the time as that unit's. */
void zs_pace_backward(zs_unit *unit);

/* The unit's gradients have been handed over. */
void zs_pace_posted(const zs_unit *unit);

/* The backward is over, whether it succeeded or failed: ends its ranges. */
void zs_pace_backward_end(zs_engine *engine);

/* The gradients of a backward are there; `stepped`: it has made the optimizer's step. */
void zs_pace_reduced(zs_engine *engine, bool stepped);

/* An optimizer's step of the model begins / is over. The latter is not called if the step raised, and does nothing
 * without a step. */
void zs_pace_step(zs_engine *engine);
void zs_pace_stepped(zs_engine *engine);

#endif
