/* engine.h - the engine of one model: its units, their memory, and the events that it passes to the schedule.
 *
 * A forward session opens when the outermost unit's module is called and closes when the call returns; a backward
 * session opens with the first hook that autograd runs and closes in a callback at the end of that backward. Between
 * sessions no peer reads this rank's shards, so optimizers and users may write them. Nothing here runs Python, and
 * nothing in backward needs the GIL.
 *
 * Threads: hooks run on the thread that runs the backward, while the thread that called it waits; everything else runs
 * on the thread that uses the model. So an engine's calls come one at a time: torch guarantees it within a backward,
 * and the user otherwise. Only retain and release may come from any thread.
 */
#ifndef ZS_ENGINE_H
#define ZS_ENGINE_H

#include "comm/traffic.h"
#include "engine/usage.h"
#include "unit/context.h"
#include "unit/unit.h"
#include <stdint.h>

/* Counts of this process so far, or between two steps. */
typedef struct zs_counts {
    int64_t time, waited; /* nanoseconds; waits as in profile.h; a time of 0: none yet */
    zs_traffic traffic;
} zs_counts;

struct zs_call;
struct zs_dry_events;

/* Number of units to gather ahead. */
typedef struct zs_prefetch {
    int ahead[2]; /* gathers that may be in flight, by zs_phase; 0: none */
} zs_prefetch;

/* The engine of a unit. */
static inline zs_engine *zs_engine_of(const zs_unit *unit)
{
    return (zs_engine *)unit->context;
}

/* The part of the engine that its units use. */
static inline zs_context *zs_engine_context(zs_engine *engine)
{
    return (zs_context *)engine;
}

/* The engine's number: this process never gives it to another engine. */
uint64_t zs_engine_number(const zs_engine *engine);

/* The engine's transports: borrowed. */
const zs_ranks *zs_engine_ranks(const zs_engine *engine);

/* New engine (takes references). `name` is for messages. All ranks create the same engines in the same order;
 * collective if the groups differ. ZS_ERR_VALUE if the groups are not of one size, or no mesh. */
zs_status zs_engine_new(const zs_ranks *ranks, const char *name, zs_engine **out);

/* Adds a reference; returns `engine`. */
zs_engine *zs_engine_retain(zs_engine *engine);

/* Drops a reference; NULL allowed. Units hold their engine; the engine does not hold its units. */
void zs_engine_release(void *engine);

/* Moves a unit from its engine to this one, as an outer FSDP() does with inner units. ZS_ERR_STATE during a pass of
 * either; ZS_ERR_VALUE if their ranks differ. */
zs_status zs_engine_adopt(zs_engine *engine, zs_unit *unit);

/* Sets the order of units: parents before children, in the order of modules. Where a transport needs one order on all
 * ranks, gradients are posted in the reverse order. `units` are this engine's, each once. */
zs_status zs_engine_set_order(zs_engine *engine, zs_unit *const *units, size_t n);

/* Sets how many units ahead to gather; the default is one. */
void zs_engine_set_prefetch(zs_engine *engine, zs_prefetch prefetch);

/* Sets how gradients and parameters of units created from now on travel between hosts, over a transport with two
 * levels; the default is ZS_WIRE_EXACT. The same on all ranks. */
void zs_engine_set_codes(zs_engine *engine, zs_wire grads, zs_wire params);

/* Adds the gradients of `n_leaves` backwards of all ranks together in the order of base/tree.h, and divides the sum by
 * `n_leaves`; before units are created, the same on all ranks. Then no_sync() has no effect. ZS_ERR_VALUE for fewer
 * leaves than ranks. */
zs_status zs_engine_add_leaves(zs_engine *engine, int n_leaves);

/* The next micro-batch of a step begins, with one backward. ZS_ERR_STATE if a parameter has a .grad, as the sum would
 * be added to it. / Has it ended? */
zs_status zs_engine_begin_leaf(zs_engine *engine);
bool zs_engine_leaf_is_done(const zs_engine *engine);

/* Drops the gradients of a step that is not complete: its first backward comes next. */
void zs_engine_restart_step(zs_engine *engine);

/* Do gradients cross hosts as codes? */
bool zs_engine_codes_gradients(const zs_engine *engine);

/* (Between passes) Scales the error feedback of wire codes by `factor`, after a change of the loss scale. */
void zs_engine_rescale(const zs_engine *engine, double factor);

/* Makes these units (borrowed) follow `unit` in that pass; n = 0: as in the last pass. ZS_ERR_VALUE for units of
 * another engine. */
zs_status zs_prefetch_set(zs_unit *unit, zs_phase phase, zs_unit *const *units, size_t n);

/* Copies these buffers (weak handles, taken over) from rank 0 at the start of each forward; `in_training`: of each
 * recorded forward, unless the one before was within no_sync(), as DDP does. */
void zs_engine_sync_buffers(zs_engine *engine, zs_tensor **tensors, size_t n, bool in_training);

/* (Between passes, on all ranks) Copies them now if the next recorded forward would. */
zs_status zs_engine_broadcast_buffers(zs_engine *engine);

/* Before / after the forward of a unit's module. `training`: the module's mode. Call post even if the forward raised;
 * without a pre it is a no-op. */
zs_status zs_engine_pre_forward(zs_unit *unit, bool training);
zs_status zs_engine_post_forward(zs_unit *unit);

/* Does code of a forward or backward of this model run on this thread, where its parameters are the full ones? Not
 * while a write has begun there, such as a step. */
bool zs_engine_in_forward(const zs_engine *engine);

/* Has a write begun that neither its end nor a pass has ended, or does a step in backward run? */
bool zs_engine_is_written(const zs_engine *engine);

/* Within a forward of the same model on this thread: an operation reads the parameters of a unit. Unshards the unit
 * until that forward ends, as if its module were called there. `operation`: a number, equal for all units that the
 * operation reads. No-op outside such a forward. */
zs_status zs_engine_read(zs_unit *unit, uint64_t operation);

/* The same for an operation that writes to them: reshards a unit that only reads unsharded. */
zs_status zs_engine_unread(zs_unit *unit);

/* The number of open forwards and sessions, for zs_engine_unwind. */
size_t zs_engine_n_open(const zs_engine *engine);

/* Ends forwards and sessions beyond the first `n_open`, for exceptions after which torch runs no hooks
 * (KeyboardInterrupt, SystemExit). No-op if they have ended. Reports the first failure after ending all. */
zs_status zs_engine_unwind(zs_engine *engine, size_t n_open);

/* If a backward has raised here: reports to the peers that this rank's gradients will not come, completes the rounds,
 * and waits until no peer reads this rank's shards. Otherwise a no-op. */
zs_status zs_engine_settle(zs_engine *engine);

/* Before / after writing parameters (a step, a load): settles, waits until no peer reads the shards, and keeps readers
 * out until the end. A forward around it is interrupted meanwhile, which is a collective. The next pass also ends a
 * write; write_end without one is a no-op. */
zs_status zs_engine_write_begin(zs_engine *engine);
zs_status zs_engine_write_end(zs_engine *engine);

/* Counts between the last two optimizer steps; of several steps after one backward, the first is used. false: there
 * were no two. */
bool zs_engine_pace(const zs_engine *engine, zs_counts *between);

/* zs_engine_write_begin for an optimizer's step, or at the end of its closure. ZS_ERR_STATE if .grad holds a failed
 * backward's result. */
zs_status zs_engine_before_step(zs_engine *engine, bool in_closure);

/* Opens / closes a session by hand, to read unsharded parameters outside a forward. Makes the collectives that a
 * forward makes. A failed open leaves no session open. */
zs_status zs_engine_open(zs_engine *engine);
zs_status zs_engine_close(zs_engine *engine);

/* Within a session: unshards a unit for reading (`exact`: in its parameters' own dtype) / reshards it. summon is
 * collective, dismiss is not. ZS_ERR_STATE if `exact`, and the unit is unsharded in another dtype. */
zs_status zs_engine_summon(zs_unit *unit, bool exact);
zs_status zs_engine_dismiss(zs_unit *unit);

/* Unshards a unit by hand (`exact`: in its parameters' own dtype) / reshards it. It stays unsharded until then, through
 * forwards, or until the end of the next backward. unshard is collective, reshard is not. No-ops for replicated units.
 * ZS_ERR_STATE in a backward, and for reshard in the unit's forward. */
zs_status zs_engine_unshard(zs_unit *unit, bool exact);
zs_status zs_engine_reshard(zs_unit *unit);

/* Sets `show`, which is called on the thread on which a backward ends if Python sees some units' parameters in the
 * wrong class (context->n_stale_classes). */
void zs_engine_on_stale_classes(void (*show)(zs_engine *engine));

/* The hook to put before the backward of a forward of the unit. `stamp`: that forward's zs_schedule_stamp. */
zs_hook zs_engine_backward_hook(zs_unit *unit, int64_t stamp);

/* --- memory (reserve.c) ------------------------------------------------------------------------------------------- */

/* Sets the events of a forward of the modules in their order, for plans: see plan.h. Takes over `calls` [n], whose
 * units are this engine's. */
void zs_engine_set_calls(zs_engine *engine, struct zs_call *calls, size_t n);

/* Reserves the slots and buckets of a step, unless that is done; no-op during a pass. ZS_ERR_MEMORY. */
zs_status zs_engine_reserve(zs_engine *engine);

/* Predicts the bytes that the units and a step will take, with a new transport (`stepped`: as if all units were stepped
 * in backward). */
zs_status zs_engine_predict(zs_engine *engine, bool stepped, zs_engine_bytes *out);

/* Predicts the acts of a training step (dry.h): free out->list, also after a failure. */
zs_status zs_engine_predict_events(const zs_engine *engine, struct zs_dry_events *out);

/* Predicts the most memory mappings that the units and a step add to this process where ranks map each other's memory.
 */
zs_status zs_engine_predict_mappings(const zs_engine *engine, size_t *out);

/* --- entries.c ---------------------------------------------------------------------------------------------------- */

/* Visits a graph, as zs_py_visit_graph does; `roots` is its own. */
typedef zs_status (*zs_visit)(void *roots, const zs_graph_visitor *visitor);

/* Hooks the nodes at which a backward from `roots` enters forwards of units of any engine. ZS_ERR_MEMORY. */
zs_status zs_entries_hook(zs_visit visit, void *roots);

/* --- position.c --------------------------------------------------------------------------------------------------- */

typedef struct zs_position {
    const char *pass; /* "forward", "backward"; "": between passes */
    uint64_t steps;   /* of the optimizer, since the model was wrapped */
    char unit[96];    /* the unit that the last or the running pass unsharded last; "": none */
} zs_position;

/* Of the model whose pass runs, or else of the one that trained last. Not exact while another thread runs a pass. With
 * Python's lock, under which units are freed. */
void zs_position_find(zs_position *out);

/* --- pin.c -------------------------------------------------------------------------------------------------------- */

/* Makes the unit FULL on a copy; `exact`: in its parameters' own dtype. It stays FULL until it is resharded, as at the
 * end of each backward. Inside a session; collective. No-op if it is pinned already. ZS_ERR_STATE if `exact` and the
 * unit is unsharded in the compute dtype. */
zs_status zs_pin(zs_unit *unit, bool exact);

/* Before the unit's forward or backward: ZS_ERR_STATE if it is pinned with values other than those it computes with. */
zs_status zs_pin_check(const zs_unit *unit);

/* --- forward_writes.c --------------------------------------------------------------------------------------------- */

/* A script is about to write to the unit's shards. No-op outside a forward of its model. Collective the first time.
 * ZS_ERR_STATE in a forward without gradients if peers map the shards, since one rank may run it alone. */
zs_status zs_forward_write_begin(zs_unit *unit);

/* The unit is about to be gathered. Collective if it has been written to in this forward, otherwise a no-op. */
zs_status zs_forward_write_settle(zs_unit *unit);

/* The forward ends: settles all of its model's units. */
zs_status zs_forward_writes_end(zs_engine *engine);

#endif
