/* schedule.c - see schedule.h. */
#include "engine.h"
#include "hold.h"
#include "in_backward.h"
#include "reduce.h"

/* --- sessions ------------------------------------------------------------------------------------------------------------- */

static zs_status broadcast_buffers(zs_engine *engine)
{
    for (size_t i = 0; i < engine->n_buffers; i++) {
        if (!zs_tensor_alive(engine->buffers[i])) continue;
        zs_tensor_info info;
        void *data = NULL;
        ZS_TRY(zs_tensor_describe(engine->buffers[i], &info));
        if (info.numel == 0) continue;
        if (!info.contiguous) return ZS_FAIL(ZS_ERR_UNSUPPORTED, "forward_sync_buffers needs contiguous buffers");
        ZS_TRY(zs_tensor_data(engine->buffers[i], &data));
        ZS_TRY(engine->comm->ops->broadcast(engine->comm, data, (size_t)info.numel * info.itemsize, 0));
    }
    return ZS_OK;
}

/* `held`: those that are whole by hand as well. */
static zs_status reshard_all(zs_engine *engine, bool held)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; i < engine->n; i++) {
        if (engine->units[i]->held && !held) continue;
        zs_status one = zs_unit_reshard(engine->units[i], ZS_SHARDED);
        if (status == ZS_OK) status = one;
    }
    return status;
}

static zs_status close_backward(zs_engine *engine);

/* Gradients that are packed and not posted never will be. */
static void drop_packed(zs_unit *unit)
{
    unit->packed = false;
    zs_bucket_drop(unit);
}

/* A backward that raised never reached its end: the peers still wait for this rank's gradients. Tell them that they will
 * not come, finish the rounds, and be as after any backward. */
static zs_status recover(zs_engine *engine)
{
    engine->gave_up = true;
    for (size_t i = 0; i < engine->n; i++)
        drop_packed(engine->units[i]);
    zs_status status = close_backward(engine);
    engine->gave_up = false;
    return status;
}

/* Between zero_grad() and the next gradients their memory is free for activations. */
static void discard_dead_grads(zs_engine *engine)
{
    bool held = false;
    for (size_t i = 0; i < engine->n; i++) {
        if (zs_reduce_grads_wanted(engine->units[i])) return;
        held |= engine->units[i]->grads_held;
    }
    if (!held || engine->lent_grads) return;
    for (size_t i = 0; i < engine->n; i++)
        engine->units[i]->grads_held = false;
    zs_pool_discard(engine->grads);
}

/* Are there shards that peers read? Replicated units need no meeting in forward. */
static bool has_shards(const zs_engine *engine)
{
    for (size_t i = 0; i < engine->n; i++)
        if (!engine->units[i]->replicated && engine->units[i]->n_params > 0) return true;
    return false;
}

static zs_status begin_reading(zs_engine *engine, zs_phase phase)
{
    if (!has_shards(engine)) return ZS_OK;
    ZS_TRY(engine->shards->ops->read_begin(engine->shards, engine->reader, phase));
    engine->reading = true;
    return ZS_OK;
}

static zs_status end_reading(zs_engine *engine, zs_phase phase)
{
    if (!engine->reading) return ZS_OK;
    engine->reading = false;
    return engine->shards->ops->read_end(engine->shards, engine->reader, phase);
}

static zs_status begin_session(zs_engine *engine)
{
    if (engine->phase == BACKWARD) ZS_TRY(recover(engine));
    engine->phase = FORWARD;
    engine->recording = zs_grad_mode();
    ZS_TRY(reshard_all(engine, false)); /* left by a forward whose backward never came */
    for (size_t i = 0; i < engine->n; i++)
        ZS_TRY(zs_unit_write_back(engine->units[i]));
    for (size_t i = 0; i < engine->n; i++)
        zs_unit_cast(engine->units[i]);
    discard_dead_grads(engine);
    ZS_TRY(broadcast_buffers(engine));
    return begin_reading(engine, ZS_PHASE_FORWARD);
}

static zs_status end_session(zs_engine *engine)
{
    engine->phase = IDLE;
    return end_reading(engine, ZS_PHASE_FORWARD);
}

zs_status zs_engine_open(zs_engine *engine)
{
    if (engine->phase == BACKWARD && zs_in_backward())
        return ZS_FAIL(ZS_ERR_STATE, "whole parameters cannot be read during a backward");
    zs_status status = engine->depth == 0 ? begin_session(engine) : ZS_OK;
    if (status == ZS_OK)
        engine->depth++;
    else
        (void)end_session(engine); /* the first failure is the one that is reported */
    return status;
}

zs_status zs_engine_close(zs_engine *engine)
{
    return --engine->depth == 0 ? end_session(engine) : ZS_OK;
}

zs_status zs_engine_unshard(zs_unit *unit)
{
    if (unit->fixed || unit->held) return ZS_OK;
    ZS_TRY(zs_engine_open(unit->engine));
    zs_status status = zs_hold(unit);
    zs_status closed = zs_engine_close(unit->engine);
    return status != ZS_OK ? status : closed;
}

zs_status zs_engine_reshard(zs_unit *unit)
{
    bool running = unit->engine->phase == BACKWARD && zs_in_backward();
    if (unit->inside > 0 || running)
        return ZS_FAIL(ZS_ERR_STATE, "reshard() of unit '%s' in %s, which needs its parameters whole", unit->name,
                       running ? "a backward" : "its own forward");
    return zs_unit_reshard(unit, ZS_SHARDED);
}

/* --- forward ---------------------------------------------------------------------------------------------------------------- */

static bool recomputing(const zs_engine *engine)
{
    return engine->phase == BACKWARD && zs_in_backward();
}

/* A checkpoint around the whole model that runs its backward within another: each would end, and step, by itself. */
static zs_status check_outside(const zs_unit *unit)
{
    if (unit->stepping == NULL || !zs_in_backward()) return ZS_OK;
    return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                   "the forward of unit '%s' runs inside of a backward that is not the model's own, most likely of a "
                   "checkpoint around the whole model; optimizer_in_backward() needs use_reentrant=False there",
                   unit->name);
}

zs_status zs_engine_pre_forward(zs_unit *unit)
{
    zs_engine *engine = unit->engine;
    if (recomputing(engine)) {
        ZS_TRY(zs_in_backward_check(unit));
        return zs_unit_unshard(unit);
    }
    ZS_TRY(check_outside(unit));
    ZS_TRY(zs_engine_open(engine)); /* if it fails, the post-forward hook finds nothing to close */
    if (unit->inside++ == 0 && engine->recording) zs_in_backward_called(unit);
    return zs_unit_unshard(unit);
}

/* Whether a unit stays FULL from its forward to its backward. Mapped full buffers cost nothing to come back to; where a
 * gather costs, the outermost unit is wanted again at once. */
static bool stays_full(const zs_unit *unit, bool keep)
{
    if (unit->held) return true;
    if (!keep) return false;
    if (unit->strategy == ZS_SHARD_GRAD_OP) return true;
    return !unit->engine->shards->ops->mapped && unit->engine->depth == 1;
}

zs_status zs_engine_post_forward(zs_unit *unit, bool keep)
{
    zs_engine *engine = unit->engine;
    if (unit->inside == 0) return ZS_OK; /* recomputed in backward: stays FULL until its gradients are there */
    zs_status status = ZS_OK;
    if (--unit->inside == 0 && !stays_full(unit, keep)) status = zs_unit_reshard(unit, ZS_SHARDED);
    zs_status closed = zs_engine_close(engine);
    return status != ZS_OK ? status : closed;
}

/* --- backward --------------------------------------------------------------------------------------------------------------- */

static zs_status backward_end_hook(void *engine, int64_t unused);

static void retain_engine(void *engine)
{
    zs_engine_retain(engine);
}

/* A hook that a user registers takes the place of ours. Other units get theirs back whenever they are bound. */
static zs_status hook_fixed(const zs_engine *engine)
{
    for (size_t i = 0; i < engine->n; i++) {
        zs_unit *unit = engine->units[i];
        for (int64_t p = 0; unit->fixed && p < unit->n_params; p++)
            if (zs_tensor_alive(unit->params[p].tensor)) ZS_TRY(zs_unit_hook_param(unit, p));
    }
    return ZS_OK;
}

static zs_status begin_backward(zs_engine *engine)
{
    if (engine->phase == BACKWARD) return ZS_OK;
    for (size_t i = 0; i < engine->n; i++)
        ZS_TRY(zs_in_backward_begin(engine->units[i]));
    ZS_TRY(hook_fixed(engine));
    zs_hook hook = {backward_end_hook, retain_engine, zs_engine_release, engine, 0};
    ZS_TRY(zs_hook_backward_end(&hook));
    engine->phase = BACKWARD;
    engine->next_post = 0;
    engine->comm->heard = false;
    for (size_t i = 0; i < engine->n; i++)
        engine->units[i]->syncs = engine->units[i]->sync;
    discard_dead_grads(engine);
    return begin_reading(engine, ZS_PHASE_BACKWARD);
}

static zs_status before_backward_hook(void *pointer, int64_t unused)
{
    (void)unused;
    zs_unit *unit = pointer;
    ZS_TRY(begin_backward(unit->engine));
    if (zs_in_backward_is_over(unit)) return ZS_OK; /* an output that is another unit's, too, and comes late */
    ZS_TRY(zs_unit_unshard(unit));
    return zs_reduce_begin(unit, -1);
}

zs_hook zs_engine_backward_hook(zs_unit *unit)
{
    return (zs_hook){before_backward_hook, zs_unit_retain, zs_unit_release, unit, 0};
}

static zs_status post_unit(zs_unit *unit)
{
    unit->packed = false;
    if (unit->cunit == NULL || !unit->syncs) return ZS_OK;
    ZS_TRY(zs_reduce_post(unit));
    /* Where sharing is a collective too, doing it at once keeps one order of collectives on all ranks. */
    bool at_once = unit->replicated && !unit->engine->comm->ops->mapped;
    return at_once ? zs_bucket_drain_all(unit->engine->buckets) : ZS_OK;
}

/* The i-th unit to post where all ranks must agree on an order: children before parents, last modules first. */
static zs_unit *in_post_order(const zs_engine *engine, size_t i)
{
    return engine->units[engine->n - 1 - i];
}

static zs_status post_when_due(zs_unit *unit)
{
    zs_engine *engine = unit->engine;
    if (engine->comm->ops->mapped) return post_unit(unit);
    unit->packed = true;
    while (engine->next_post < engine->n) {
        zs_unit *next = in_post_order(engine, engine->next_post);
        if (next->cunit != NULL && next->syncs && !next->packed) return ZS_OK;
        ZS_TRY(post_unit(next));
        engine->next_post++;
    }
    return ZS_OK;
}

static zs_status used_outside(const zs_unit *unit, int64_t i, const char *of_what)
{
    return ZS_FAIL(
        ZS_ERR_STATE,
        "a gradient%s arrived for parameter '%s', and its unit '%s' is sharded: the parameter was used "
        "outside the unit's forward (a penalty over model.parameters(), a weight read by another module), or "
        "the forward's output was hidden in an object that zshard does not look into (return tensors, "
        "tuples, lists, dicts or dataclasses)",
        of_what, unit->params[i].name, unit->name);
}

/* A graph that was made of the slice gives the slice's gradient, whatever the parameter is by now. */
static zs_status check_whole(const zs_unit *unit, int64_t i)
{
    zs_grad_info grad;
    ZS_TRY(zs_grad_describe(unit->params[i].tensor, &grad));
    if (grad.numel == unit->params[i].numel) return ZS_OK;
    zs_grad_set(unit->params[i].tensor, NULL);
    return used_outside(unit, i, " of this rank's slice");
}

static zs_status grad_ready_hook(void *pointer, int64_t i)
{
    zs_unit *unit = pointer;
    ZS_TRY(zs_in_backward_check(unit));
    if (!zs_unit_is_full(unit)) return used_outside(unit, i, "");
    ZS_TRY(check_whole(unit, i));
    ZS_TRY(begin_backward(unit->engine));
    if (zs_in_backward_alone(unit)) return zs_in_backward_arrived(unit, i);
    if (unit->replicated && !unit->syncs) {
        zs_reduce_keep(unit, i);
        return ZS_OK;
    }
    ZS_TRY(zs_reduce_begin(unit, i));
    bool complete = false;
    ZS_TRY(zs_reduce_pack(unit, i, &complete));
    if (!complete) return ZS_OK;
    /* An adapter's gradients may all be there before backward goes through the frozen layer under it: then the unit stays
     * whole until the end. */
    if (!unit->has_frozen) ZS_TRY(zs_unit_reshard(unit, unit->syncs ? ZS_REDUCING : ZS_SHARDED));
    return post_when_due(unit);
}

zs_status zs_unit_hook_param(zs_unit *unit, int64_t i)
{
    bool stepped = zs_in_backward_alone(unit) && zs_tensor_requires_grad(unit->params[i].tensor);
    if (unit->params[i].grad == NULL && !stepped) return ZS_OK;
    zs_hook hook = {grad_ready_hook, zs_unit_retain, zs_unit_release, unit, i};
    return zs_hook_grad_ready(unit->params[i].tensor, &hook);
}

/* Collective transports: whatever this rank has not posted, it will not. */
static zs_status tell_gave_up(zs_engine *engine)
{
    zs_comm *comm = engine->comm;
    bool told = comm->heard || engine->next_post == engine->n;
    comm->heard = false;
    return told ? ZS_OK : comm->ops->give_up(comm);
}

static zs_status post_rest(zs_engine *engine)
{
    if (engine->gave_up && !engine->comm->ops->mapped) return tell_gave_up(engine);
    for (size_t i = 0; i < engine->n; i++) {
        zs_unit *unit = in_post_order(engine, i);
        if (unit->bucket != NULL || !unit->posted) ZS_TRY(post_unit(unit)); /* no-op for those that stay local */
    }
    return ZS_OK;
}

/* What a failed pass leaves is put in order without the peers; they learn of it by their own waits. */
static void forget_backward(zs_engine *engine)
{
    for (size_t i = 0; i < engine->n; i++) {
        drop_packed(engine->units[i]);
        (void)zs_reduce_end(engine->units[i]);
        zs_in_backward_forget(engine->units[i]);
    }
    zs_bucket_forget_rounds(engine->buckets);
}

/* The rounds that all ranks have posted can be ended in order, though their sums are of no use. */
static void end_rounds(zs_engine *engine)
{
    bool before = engine->gave_up;
    engine->gave_up = true;
    (void)zs_bucket_drain_all(engine->buckets);
    engine->gave_up = before;
}

/* What is stepped in backward and was not yet: now that no peer reads. */
static zs_status step_rest(zs_engine *engine)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; i < engine->n && status == ZS_OK; i++)
        status = zs_in_backward_finish(engine->units[i], !engine->gave_up);
    return status;
}

static zs_status close_backward(zs_engine *engine)
{
    zs_status resharded = ZS_OK;
    for (size_t i = 0; i < engine->n; i++) {
        zs_status one = zs_in_backward_graph_done(engine->units[i]);
        if (resharded == ZS_OK) resharded = one;
    }
    zs_status status = post_rest(engine);
    zs_status others = reshard_all(engine, true);
    if (resharded == ZS_OK) resharded = others;
    if (status == ZS_OK) status = zs_bucket_drain_all(engine->buckets);
    if (status == ZS_OK) status = resharded;
    engine->phase = IDLE;
    if (status == ZS_ERR_DIVERGED) end_rounds(engine);
    if (status != ZS_OK) forget_backward(engine);
    for (size_t i = 0; i < engine->n && status == ZS_OK; i++)
        status = zs_reduce_end(engine->units[i]);
    zs_status ended = end_reading(engine, ZS_PHASE_BACKWARD);
    if (status == ZS_OK) status = ended;
    if (status == ZS_OK) status = zs_bucket_settle_all(engine->buckets);
    if (status == ZS_OK) status = step_rest(engine);
    return status;
}

/* A backward has raised. What needs no peer is done at once, so that a zero_grad() that follows means what it says; the
 * peers are told by recover(), at the next forward. */
static void abandon_backward(zs_engine *engine)
{
    (void)reshard_all(engine, true);
    for (size_t i = 0; i < engine->n; i++) {
        drop_packed(engine->units[i]);
        zs_reduce_hand_out(engine->units[i]);
        zs_in_backward_abandon(engine->units[i]);
    }
}

static zs_status backward_end_hook(void *pointer, int64_t arg)
{
    if (arg != ZS_BACKWARD_ABANDONED) return close_backward(pointer);
    abandon_backward(pointer);
    return ZS_OK;
}
