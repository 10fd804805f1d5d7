/* engine.h - the engine of one model: its units, their memory, and what users and autograd tell its schedule.
 *
 * A forward session opens when the outermost unit's module is called and closes when it returns; a backward session
 * opens with the first hook that autograd runs and closes in a callback at the end of that backward. Between sessions
 * nobody reads this rank's shards, so optimizers and users may write them. Nothing here runs Python, and nothing in
 * backward needs the GIL.
 *
 * Threads: hooks come on the thread that autograd runs the backward on, while the one that called it waits; all else
 * comes on the thread that uses the model. So calls of one engine come one at a time, which torch guarantees for one
 * backward at a time, and the user for the rest. Only retain and release may come from any thread.
 */
#ifndef ZS_ENGINE_H
#define ZS_ENGINE_H

#include "engine/usage.h"
#include "unit/context.h"
#include "unit/unit.h"

struct zs_call;

/* How far gathers go ahead. */
typedef struct zs_prefetch {
    int ahead[2]; /* units whose gathers may be under way, by zs_phase; 0: none */
} zs_prefetch;

/* The engine of a unit. */
static inline zs_engine *zs_engine_of(const zs_unit *unit)
{
    return (zs_engine *)unit->context;
}

/* What its units know of it. */
static inline zs_context *zs_engine_context(zs_engine *engine)
{
    return (zs_context *)engine;
}

/* Who takes part: borrowed. */
const zs_ranks *zs_engine_ranks(const zs_engine *engine);

/* New engine (takes references). `name` is for messages. All ranks make the same ones in the same order; collective
 * if the ranks differ. ZS_ERR_VALUE if the groups are not of one size, or no mesh. */
zs_status zs_engine_new(const zs_ranks *ranks, const char *name, zs_engine **out);

/* Adds a reference; returns `engine`. */
zs_engine *zs_engine_retain(zs_engine *engine);

/* Gives one back; NULL allowed. Units hold their engine, the engine does not hold its units. */
void zs_engine_release(void *engine);

/* Takes a unit over from the engine it has, as an outer FSDP() does with inner ones. ZS_ERR_STATE during a pass of
 * either; ZS_ERR_VALUE if they have other ranks. */
zs_status zs_engine_adopt(zs_engine *engine, zs_unit *unit);

/* Sets the order of units: parents before children, as modules appear. Gradients leave in the reverse order where a
 * transport needs one order on all ranks. `units` are this engine's, each once. */
zs_status zs_engine_set_order(zs_engine *engine, zs_unit *const *units, size_t n);

/* How far gathers go ahead; without it, one unit. */
void zs_engine_set_prefetch(zs_engine *engine, zs_prefetch prefetch);

/* How gradients and parameters of units that are made from now on cross hosts, over a transport in two levels;
 * ZS_WIRE_EXACT without it. The same on all ranks. */
void zs_engine_set_codes(zs_engine *engine, zs_wire grads, zs_wire params);

/* (Between passes) Gradients are `factor` times as large from now on, as a loss scale has changed: so is what codes
 * have lost. */
void zs_engine_rescale(const zs_engine *engine, double factor);

/* Has these units of one engine (borrowed, any number) follow `unit` in that pass; n = 0: what the last pass shows.
 * ZS_ERR_VALUE for units of another engine. */
zs_status zs_prefetch_set(zs_unit *unit, zs_phase phase, zs_unit *const *units, size_t n);

/* Has these tensors (buffers; weak handles, taken over) copied from rank 0 as each forward begins; `in_training`: as
 * one begins that autograd records, if the one before was not within no_sync(), as DDP does it. */
void zs_engine_sync_buffers(zs_engine *engine, zs_tensor **tensors, size_t n, bool in_training);

/* (Between passes, on all ranks) Copies them now, if the next recorded forward would. No-op within join(), where a
 * rank may have no data. */
zs_status zs_engine_broadcast_buffers(zs_engine *engine);

/* Before / after the forward of a unit's module. `training`: is the module in training mode? post is to be called
 * even if the forward raised; without a pre it is a no-op. */
zs_status zs_engine_pre_forward(zs_unit *unit, bool training);
zs_status zs_engine_post_forward(zs_unit *unit);

/* Does a forward of this model run on this thread? */
bool zs_engine_in_forward(const zs_engine *engine);

/* Within a forward of the same model that runs on this thread: an operation reads the parameters of a unit. As if
 * its module were called there, it is unsharded, or stays so, until that forward ends. `operation`: a number, the
 * same for all that it reads. No-op where no such forward runs. */
zs_status zs_engine_read(zs_unit *unit, uint64_t operation);

/* The same of an operation that writes to them: a unit that is unsharded for reads alone is sharded again. */
zs_status zs_engine_unread(zs_unit *unit);

/* How many forwards and sessions are open now, for zs_engine_unwind. */
size_t zs_engine_n_open(const zs_engine *engine);

/* Ends what has been opened since there were `n_open`: forwards that an exception left whose hooks torch does not
 * run then (KeyboardInterrupt, SystemExit). No-op if they have ended. The first failure is reported, and all end. */
zs_status zs_engine_unwind(zs_engine *engine, size_t n_open);

/* If a backward has raised here: tells the peers, who still wait for this rank's gradients, that they will not come,
 * finishes the rounds, and waits until nobody reads this rank's shards, so that they may be written. Else a no-op. */
zs_status zs_engine_settle(zs_engine *engine);

/* Parameters are about to be written between passes (a step, a load), and have been: settles, waits until no peer
 * reads the shards, and admits none until the end. What raises in between needs no end: the next pass is one. */
zs_status zs_engine_write_begin(zs_engine *engine);
void zs_engine_write_end(zs_engine *engine);

/* zs_engine_write_begin for an optimizer's step. ZS_ERR_STATE if .grad holds what a failed backward has left there. */
zs_status zs_engine_before_step(zs_engine *engine);

/* Opens / closes a session by hand, for reading whole parameters outside of forward. Same meetings as a forward. If
 * open fails, nothing is open that was not before. */
zs_status zs_engine_open(zs_engine *engine);
zs_status zs_engine_close(zs_engine *engine);

/* Within a session: unshards a unit for reading (`exact`: in its parameters' own dtype), and shards it again. summon is
 * collective, dismiss is not. ZS_ERR_STATE if `exact`, and the unit is unsharded in another dtype. */
zs_status zs_engine_summon(zs_unit *unit, bool exact);
zs_status zs_engine_dismiss(zs_unit *unit);

/* Makes a unit whole by hand (`exact`: in its parameters' own dtype), and sharded again. It stays whole until then,
 * through forwards, or to the end of the next backward. unshard is collective, reshard is not. No-ops for replicated
 * units. ZS_ERR_STATE in a backward, and for reshard in the unit's forward. */
zs_status zs_engine_unshard(zs_unit *unit, bool exact);
zs_status zs_engine_reshard(zs_unit *unit);

/* Has `show` called, from whatever thread a backward ends on, where Python sees the parameters of some units as
 * other than they are then (context->n_stale_classes). */
void zs_engine_on_stale_classes(void (*show)(zs_engine *engine));

/* The hook to put before the backward of a forward of the unit. `stamp`: that forward's zs_schedule_stamp. */
zs_hook zs_engine_backward_hook(zs_unit *unit, int64_t stamp);

/* --- memory (reserve.c) ------------------------------------------------------------------------------------------- */

/* What a forward of the modules in their order does, for plans: see plan.h. `calls` [n] is taken over; its units are
 * this engine's. */
void zs_engine_set_calls(zs_engine *engine, struct zs_call *calls, size_t n);

/* Reserves the slots and buckets of a step, unless they are; no-op during a pass. ZS_ERR_MEMORY. */
zs_status zs_engine_reserve(zs_engine *engine);

/* What the units and a step will take of memory, of a new transport, in bytes (`stepped`: as if all units were
 * stepped in backward). */
zs_status zs_engine_predict(zs_engine *engine, bool stepped, zs_engine_bytes *out);

/* How many memory mappings the units and a step will add to this process where ranks map each other's memory, at
 * most. */
zs_status zs_engine_predict_mappings(const zs_engine *engine, size_t *out);

#endif
