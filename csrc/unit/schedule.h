/* schedule.h - the engine of one model: what its hooks do, in which order, and when a pass begins and ends.
 *
 * The one idea: a forward session opens when the outermost unit's module is called and closes when it returns; a backward
 * session opens with the first hook that autograd runs and closes in a callback at the end of that backward. Between
 * sessions nobody reads this rank's shards, so optimizers and users may write them. Nothing here runs Python, and nothing
 * in backward needs the GIL.
 */
#ifndef ZS_SCHEDULE_H
#define ZS_SCHEDULE_H

#include "comm/comm.h"
#include "device/arena.h"
#include "unit/bucket.h"
#include "unit/prefetch.h"
#include "unit/unit.h"

struct zs_call;

/* Memory of one model on this rank, in bytes. */
typedef struct zs_engine_bytes {
    size_t shards, kept, grads, slots, buckets;
    size_t transport; /* the transport's own, for all models that use it */
    size_t
        offloaded; /* what of all these lies elsewhere, with the optimizers' state there: in files, in a GPU's host */
    size_t total;  /* of all but that */
} zs_engine_bytes;

/* Who takes part in what. */
typedef struct zs_ranks {
    zs_comm *all;    /* they reduce */
    zs_comm *shards; /* those of them that one copy of the model is cut over, each group of them another copy (hybrid);
                      * `all` if there is one */
    zs_comm
        *near; /* those that gather from each other: `shards`, or where a copy is kept (kept.h) those that share it */
    zs_comm *far; /* those that have the same part of that copy; NULL if none is kept */
} zs_ranks;

/* New engine (takes references). `name` is for messages. All ranks make the same ones in the same order; collective if the
 * ranks differ. ZS_ERR_VALUE if the groups are not of one size, or no mesh. */
zs_status zs_engine_new(const zs_ranks *ranks, const char *name, zs_engine **out);

/* Adds a reference; returns `engine`. */
zs_engine *zs_engine_retain(zs_engine *engine);

/* Gives one back; NULL allowed. Units hold their engine, the engine does not hold its units. */
void zs_engine_release(void *engine);

/* Who takes part: borrowed. */
const zs_ranks *zs_engine_ranks(const zs_engine *engine);
zs_comm *zs_engine_comm(const zs_engine *engine); /* all ranks */

/* Where its units' memory lies. */
const zs_device *zs_engine_device(const zs_engine *engine);

/* How many slices one copy of the model is cut into, which of them this rank has, and which each rank has [all->world]. */
int zs_engine_n_parts(const zs_engine *engine);
int zs_engine_part(const zs_engine *engine);
const int *zs_engine_part_of(const zs_engine *engine);

/* Memory: borrowed. */
zs_arena *zs_engine_arena(const zs_engine *engine);
zs_pool *zs_engine_grads(const zs_engine *engine);
zs_bucket_pool *zs_engine_buckets(const zs_engine *engine);

/* What of its units goes to a disk. Set it before they are made. */
struct zs_offload *zs_engine_offload(zs_engine *engine);

/* Registers a unit / takes it off the list when it dies. */
zs_status zs_engine_add(zs_engine *engine, zs_unit *unit);
void zs_engine_forget(zs_engine *engine, zs_unit *unit);

/* Takes a unit over from the engine it has, as an outer FSDP() does with inner ones. Not during a pass. */
zs_status zs_engine_adopt(zs_engine *engine, zs_unit *unit);

/* Sets the order of units: parents before children, as modules appear. Gradients leave in the reverse order where a
 * transport needs one order on all ranks. `units` are this engine's, each once. */
zs_status zs_engine_set_order(zs_engine *engine, zs_unit *const *units, size_t n);

/* How far gathers go ahead; without it, one unit in backward and none in forward. */
void zs_engine_set_prefetch(zs_engine *engine, zs_prefetch prefetch);

/* Has these tensors (buffers; weak handles, taken over) copied from rank 0 at each forward session. */
zs_status zs_engine_sync_buffers(zs_engine *engine, zs_tensor **tensors, size_t n);

/* Before / after the forward of a unit's module. `training`: is the module in training mode? `keep`: gradients will be wanted
 * (autograd records and an output has history). post is to be called even if the forward raised; without a pre it is a no-op. */
zs_status zs_engine_pre_forward(zs_unit *unit, bool training);
zs_status zs_engine_post_forward(zs_unit *unit, bool keep);

/* How many forwards and sessions are open now, for zs_engine_unwind. */
size_t zs_engine_n_open(const zs_engine *engine);

/* Ends what has been opened since there were `n_open`: forwards that an exception left whose hooks torch does not run then
 * (KeyboardInterrupt, SystemExit). No-op if they have ended. The first failure is reported, and all end. */
zs_status zs_engine_unwind(zs_engine *engine, size_t n_open);

/* If a backward has raised here: tells the peers, who still wait for this rank's gradients, that they will not come,
 * finishes the rounds, and waits until nobody reads this rank's shards, so that they may be written. Else a no-op. */
zs_status zs_engine_settle(zs_engine *engine);

/* Parameters are about to be written between passes (a step, a load), and have been: settles, waits until no peer reads the
 * shards, and admits none until the end. What raises in between needs no end: the next pass is one. */
zs_status zs_engine_write_begin(zs_engine *engine);
void zs_engine_write_end(zs_engine *engine);

/* zs_engine_write_begin for an optimizer's step. ZS_ERR_STATE if .grad holds what a failed backward has left there. */
zs_status zs_engine_before_step(zs_engine *engine);

/* Opens / closes a session by hand, for reading whole parameters outside of forward. Same meetings as a forward. If open
 * fails, nothing is open that was not before. */
zs_status zs_engine_open(zs_engine *engine);
zs_status zs_engine_close(zs_engine *engine);

/* Makes a unit whole by hand (`exact`: in its parameters' own dtype), and sharded again. It stays whole until then, through forwards, or to the end of the next
 * backward. unshard is collective, reshard is not. No-ops for replicated units. ZS_ERR_STATE in a backward, and for reshard
 * in the unit's forward. */
zs_status zs_engine_unshard(zs_unit *unit, bool exact);
zs_status zs_engine_reshard(zs_unit *unit);

/* The hook to put before the backward of a unit's outputs. */
zs_hook zs_engine_backward_hook(zs_unit *unit);

/* Sets the gradient hook on parameter `i`; cheap if it is there. */
zs_status zs_unit_hook_param(zs_unit *unit, int64_t i);

/* Did this rank abandon the backward that is being closed? */
bool zs_engine_gave_up(const zs_engine *engine);

/* --- memory (reserve.c) --------------------------------------------------------------------------------------------- */

/* What a forward of the modules in their order does, for plans: see plan.h. `calls` [n] is taken over; its units are this
 * engine's. */
void zs_engine_set_calls(zs_engine *engine, struct zs_call *calls, size_t n);

/* The units, or what decides about their memory, have changed: what is reserved is no longer right. */
void zs_engine_replan(zs_engine *engine);

/* Reserves the slots and buckets of a step, unless they are; no-op during a pass. ZS_ERR_MEMORY. */
zs_status zs_engine_reserve(zs_engine *engine);

/* Memory in bytes: held now; the most that there has been of each since the engine was made; what the units and a step will
 * take, of a new transport (`stepped`: as if all units were stepped in backward). */
zs_engine_bytes zs_engine_memory(const zs_engine *engine);
zs_engine_bytes zs_engine_peak(zs_engine *engine);
zs_status zs_engine_predict(zs_engine *engine, bool stepped, zs_engine_bytes *out);

/* More memory may be held than before: counts it for the peak. */
void zs_engine_note_peak(zs_engine *engine);

#endif
