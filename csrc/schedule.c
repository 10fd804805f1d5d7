/* schedule.c - see schedule.h. */
#include "engine.h"
#include "hold.h"
#include "kept.h"
#include "reduce.h"
#include "through.h"

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
    zs_through_end(unit);
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
    ZS_TRY(engine->ranks.near->ops->read_begin(engine->ranks.near, engine->reader, phase));
    engine->reading = true;
    return ZS_OK;
}

static zs_status end_reading(zs_engine *engine, zs_phase phase)
{
    if (!engine->reading) return ZS_OK;
    engine->reading = false;
    return engine->ranks.near->ops->read_end(engine->ranks.near, engine->reader, phase);
}

static zs_status begin_session(zs_engine *engine)
{
    if (engine->phase == BACKWARD) ZS_TRY(recover(engine));
    engine->phase = FORWARD;
    engine->session = zs_next_node();
    zs_prefetch_begin(engine);
    ZS_TRY(reshard_all(engine, false)); /* left by a forward whose backward never came */
    for (size_t i = 0; i < engine->n; i++)
        ZS_TRY(zs_unit_write_back(engine->units[i]));
    for (size_t i = 0; i < engine->n; i++)
        zs_unit_cast(engine->units[i]);
    if (engine->ranks.far != NULL) ZS_TRY(zs_kept_refresh(engine->ranks.far, engine->units, engine->n));
    discard_dead_grads(engine);
    ZS_TRY(broadcast_buffers(engine));
    return begin_reading(engine, ZS_PHASE_FORWARD);
}

static zs_status end_session(zs_engine *engine)
{
    engine->phase = IDLE;
    zs_prefetch_end(engine, ZS_PHASE_FORWARD);
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

/* Unshards the unit, and lets the gathers of what follows begin. */
static zs_status make_whole(zs_unit *unit, zs_phase phase)
{
    ZS_TRY(zs_unit_unshard(unit));
    zs_prefetch_note(unit, phase);
    return zs_prefetch_next(unit, phase);
}

zs_status zs_engine_pre_forward(zs_unit *unit)
{
    zs_engine *engine = unit->engine;
    zs_through_begin(unit);
    if (recomputing(engine)) return make_whole(unit, ZS_PHASE_BACKWARD);
    ZS_TRY(zs_engine_open(engine)); /* if it fails, the post-forward hook finds nothing to close */
    unit->inside++;
    if (engine->depth == 1) engine->outermost_gathers = unit->n_params > 0;
    return make_whole(unit, ZS_PHASE_FORWARD);
}

/* Whether a unit stays FULL from its forward to its backward. Mapped full buffers cost nothing to come back to; where a
 * gather costs, the outermost unit is wanted again at once, or if it has no parameters, the last of those within. */
static bool stays_full(const zs_unit *unit, bool keep)
{
    if (unit->held) return true;
    if (!keep) return false;
    if (unit->strategy == ZS_SHARD_GRAD_OP) return true;
    const zs_engine *engine = unit->engine;
    if (engine->ranks.near->ops->mapped) return false;
    return engine->depth == 1 || (!engine->outermost_gathers && zs_prefetch_is_last(unit));
}

zs_status zs_engine_post_forward(zs_unit *unit, bool keep)
{
    zs_engine *engine = unit->engine;
    if (keep) zs_through_expect(unit);
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

static zs_status begin_backward(zs_engine *engine)
{
    if (engine->phase == BACKWARD) return ZS_OK;
    zs_hook hook = {backward_end_hook, retain_engine, zs_engine_release, engine, 0};
    ZS_TRY(zs_hook_backward_end(&hook));
    engine->phase = BACKWARD;
    engine->next_post = 0;
    engine->comm->heard = false;
    zs_prefetch_begin(engine);
    for (size_t i = 0; i < engine->n; i++) {
        engine->units[i]->syncs = engine->units[i]->sync;
        engine->units[i]->packed = false;
    }
    discard_dead_grads(engine);
    return begin_reading(engine, ZS_PHASE_BACKWARD);
}

/* With create_graph=True autograd records what backward does. That graph would be walked when the units are sharded again,
 * and would not pass their hooks. */
static zs_status refuse_double_backward(const zs_unit *unit)
{
    if (!zs_grad_mode() || unit->fixed) return ZS_OK;
    return ZS_FAIL(
        ZS_ERR_STATE,
        "backward with create_graph=True (a gradient penalty, a Hessian) reached unit '%s', which is sharded: "
        "gradients of gradients need whole parameters after the backward. Use strategy='no_shard' for this "
        "model, or a penalty without second derivatives",
        unit->name);
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

/* (Collective transports) Posts what is packed and whose turn has come. */
static zs_status post_due(zs_engine *engine)
{
    while (engine->next_post < engine->n) {
        zs_unit *next = in_post_order(engine, engine->next_post);
        if (next->cunit != NULL && next->syncs && !next->packed) return ZS_OK;
        ZS_TRY(post_unit(next));
        engine->next_post++;
    }
    return ZS_OK;
}

/* This rank has all that it will pack of the unit in this backward. */
static zs_status give_out(zs_unit *unit)
{
    ZS_TRY(zs_unit_reshard(unit, unit->cunit != NULL && unit->syncs ? ZS_REDUCING : ZS_SHARDED));
    unit->packed = true;
    return ZS_OK;
}

/* (Collective transports) Gives out the units that this backward is through with, where that of the forward `stamp` begins:
 * in one place on all ranks. */
static zs_status retire(zs_engine *engine, int64_t stamp)
{
    if (engine->comm->ops->mapped) return ZS_OK;
    for (size_t i = 0; i < engine->n; i++) {
        zs_unit *unit = in_post_order(engine, i);
        if (unit->held) continue; /* its weights may be used in other units' forwards as well */
        if (unit->retired || !zs_through_with(unit, stamp, engine->session)) continue;
        unit->retired = true;
        if (!unit->posted) ZS_TRY(give_out(unit));
    }
    return post_due(engine);
}

static zs_status before_backward_hook(void *pointer, int64_t stamp)
{
    zs_unit *unit = pointer;
    ZS_TRY(refuse_double_backward(unit));
    ZS_TRY(begin_backward(unit->engine));
    zs_through_fired(unit, stamp);
    ZS_TRY(retire(unit->engine, stamp));
    ZS_TRY(make_whole(unit, ZS_PHASE_BACKWARD));
    return zs_reduce_begin(unit, -1);
}

zs_hook zs_engine_backward_hook(zs_unit *unit)
{
    return (zs_hook){before_backward_hook, zs_unit_retain, zs_unit_release, unit, zs_through_stamp(unit)};
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

/* Do ranks meet to gather the unit? */
static bool gathers_together(const zs_unit *unit)
{
    return !unit->replicated && !unit->engine->ranks.near->ops->mapped;
}

/* All gradients of the unit are here. Where ranks meet to gather, that is not the moment: another rank may use fewer
 * parameters, and waits for this one elsewhere. */
static zs_status on_complete(zs_unit *unit)
{
    zs_engine *engine = unit->engine;
    if (gathers_together(unit)) return ZS_OK;
    /* A mapped full buffer costs nothing: it stays, for weights that are recomputed once more. A cast copy goes, unless
     * backward may still need frozen parameters in it. */
    if (unit->replicated && !unit->has_frozen)
        ZS_TRY(zs_unit_reshard(unit, unit->syncs ? ZS_REDUCING : ZS_SHARDED));
    if (engine->comm->ops->mapped) return post_unit(unit);
    unit->packed = true;
    return post_due(engine);
}

static zs_status grad_ready_hook(void *pointer, int64_t i)
{
    zs_unit *unit = pointer;
    if (!zs_unit_is_full(unit)) return used_outside(unit, i, "");
    ZS_TRY(check_whole(unit, i));
    ZS_TRY(begin_backward(unit->engine));
    if (unit->replicated && !unit->syncs) {
        zs_reduce_keep(unit, i);
        return ZS_OK;
    }
    ZS_TRY(zs_reduce_begin(unit, i));
    bool complete = false;
    ZS_TRY(zs_reduce_pack(unit, i, &complete));
    return complete ? on_complete(unit) : ZS_OK;
}

zs_status zs_unit_hook_param(zs_unit *unit, int64_t i)
{
    if (unit->params[i].grad == NULL) return ZS_OK;
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

static zs_status close_backward(zs_engine *engine)
{
    zs_status status = post_rest(engine);
    zs_prefetch_end(engine, ZS_PHASE_BACKWARD);
    zs_status resharded = reshard_all(engine, true);
    if (status == ZS_OK) status = zs_bucket_drain_all(engine->buckets);
    if (status == ZS_OK) status = resharded;
    engine->phase = IDLE;
    if (status == ZS_ERR_DIVERGED) end_rounds(engine);
    if (status != ZS_OK) forget_backward(engine);
    for (size_t i = 0; i < engine->n && status == ZS_OK; i++)
        status = zs_reduce_end(engine->units[i]);
    for (size_t i = 0; i < engine->n; i++)
        zs_through_end(engine->units[i]);
    zs_status ended = end_reading(engine, ZS_PHASE_BACKWARD);
    if (status == ZS_OK) status = ended;
    if (status == ZS_OK) status = zs_bucket_settle_all(engine->buckets);
    return status;
}

/* A backward has raised. What needs no peer is done at once, so that a zero_grad() that follows means what it says; the
 * peers are told by recover(), at the next forward. */
static void abandon_backward(zs_engine *engine)
{
    (void)reshard_all(engine, true);
    zs_prefetch_end(engine, ZS_PHASE_BACKWARD);
    for (size_t i = 0; i < engine->n; i++) {
        drop_packed(engine->units[i]);
        zs_reduce_hand_out(engine->units[i]);
    }
}

static zs_status backward_end_hook(void *pointer, int64_t arg)
{
    if (arg != ZS_BACKWARD_ABANDONED) return close_backward(pointer);
    abandon_backward(pointer);
    return ZS_OK;
}
