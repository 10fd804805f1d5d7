/* backward.c - the schedule's backward: from the first hook that autograd runs to the callback at its end. See schedule.h.
 *
 * The one idea: gradients leave as soon as a unit's are complete, where ranks need not agree on when; elsewhere when the
 * backward is through with the unit (through.h), which all ranks see at the same hook.
 */
#include "unit/bucket.h"
#include "unit/engine.h"
#include "unit/grads.h"
#include "unit/history.h"
#include "unit/hold.h"
#include "unit/in_backward.h"
#include "unit/reduce.h"
#include "unit/rounds.h"
#include "unit/schedule.h"
#include "unit/session.h"
#include "unit/through.h"

#include <math.h>
#include <stdio.h>

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

/* Is what a parameter shows as .grad left from a backward that failed? Zeros are nobody's. */
static zs_status is_spoiled(const zs_unit *unit, const zs_param *param, bool *spoiled)
{
    *spoiled = false;
    if (param->grad == NULL || !zs_tensor_alive(param->tensor)) return ZS_OK;
    ZS_TRY(zs_grad_is(param->tensor, param->grad, spoiled));
    zs_grad_info grad;
    if (*spoiled) ZS_TRY(zs_grad_describe(param->tensor, &grad));
    if (!*spoiled || !grad.dense) return ZS_OK;
    zs_numbers numbers = {grad.data, grad.numel, grad.dtype};
    double largest = 0;
    ZS_TRY(zs_device_norm(zs_engine_device(unit->engine), &numbers, 1, (double)INFINITY, &largest));
    *spoiled = largest != 0;
    return ZS_OK;
}

static zs_status check_spoiled(zs_engine *engine)
{
    for (size_t i = 0; i < engine->n && engine->spoiled; i++) {
        zs_unit *unit = engine->units[i];
        for (int64_t p = 0; p < unit->n_params; p++) {
            bool spoiled = false;
            ZS_TRY(is_spoiled(unit, &unit->params[p], &spoiled));
            if (spoiled)
                return ZS_FAIL(ZS_ERR_STATE,
                               "the .grad of parameter '%s' was accumulated before a backward that failed, which has "
                               "already added some of its gradients: call zero_grad() on all ranks before the next "
                               "backward or optimizer step",
                               unit->params[p].name);
        }
    }
    engine->spoiled = false;
    return ZS_OK;
}

zs_status zs_engine_before_step(zs_engine *engine)
{
    ZS_TRY(zs_engine_settle(engine));
    ZS_TRY(check_spoiled(engine));
    return zs_session_write_begin(engine);
}

static zs_status begin_backward(zs_engine *engine)
{
    if (engine->phase == BACKWARD) return ZS_OK;
    ZS_TRY(zs_engine_settle(engine)); /* another backward has raised, and no forward came between */
    ZS_TRY(check_spoiled(engine));
    for (size_t i = 0; i < engine->n; i++)
        ZS_TRY(zs_in_backward_begin(engine->units[i]));
    ZS_TRY(hook_fixed(engine));
    zs_hook hook = {backward_end_hook, retain_engine, zs_engine_release, engine, 0};
    ZS_TRY(zs_hook_backward_end(&hook));
    engine->phase = BACKWARD;
    engine->next_post = 0;
    engine->ranks.all->heard = false;
    zs_prefetch_begin(engine);
    for (size_t i = 0; i < engine->n; i++) {
        engine->units[i]->syncs = engine->units[i]->sync;
        engine->units[i]->packed = false;
        zs_in_backward_open(engine->units[i]);
    }
    zs_session_discard_dead_grads(engine);
    return zs_session_begin_reading(engine, &(zs_reading){.pass = ZS_PASS_BACKWARD});
}

/* With create_graph=True autograd records what backward does. That graph would be walked when the units are sharded again,
 * and would not pass their hooks. */
static zs_status refuse_double_backward(const zs_unit *unit)
{
    if (!zs_grad_mode() || unit->fixed) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE,
                   "backward with create_graph=True (gradient penalty, Hessian) is not supported for unit '%s', which "
                   "is sharded: double backward needs the full parameters after the first backward; use "
                   "strategy='no_shard', or a penalty without second derivatives",
                   zs_unit_label(unit->name));
}

static zs_status post_unit(zs_unit *unit)
{
    unit->packed = false;
    if (unit->cunit == NULL || !unit->syncs) return ZS_OK;
    ZS_TRY(zs_reduce_post(unit));
    /* Where sharing is a collective too, doing it at once keeps one order of collectives on all ranks. */
    bool at_once = unit->replicated && !unit->engine->ranks.all->ops->mapped;
    return at_once ? zs_rounds_drain_all(unit->engine->buckets) : ZS_OK;
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
    if (engine->ranks.all->ops->mapped) return ZS_OK;
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
    if (zs_in_backward_is_over(unit)) return ZS_OK; /* an output that comes late, and that nothing depends on */
    zs_through_fired(unit, stamp);
    ZS_TRY(retire(unit->engine, stamp));
    ZS_TRY(zs_session_make_whole(unit, ZS_PHASE_BACKWARD));
    return zs_grads_begin(unit, -1);
}

zs_hook zs_engine_backward_hook(zs_unit *unit)
{
    return (zs_hook){before_backward_hook, zs_unit_retain, zs_unit_release, unit, zs_through_stamp(unit)};
}

static zs_status used_outside(const zs_unit *unit, int64_t i, const char *of_what)
{
    return ZS_FAIL(
        ZS_ERR_STATE,
        "got a gradient for %sparameter '%s' of unit '%s', which is sharded: the parameter was used outside the unit's "
        "forward (a penalty over model.parameters(), a weight read by another module), or the forward returned its "
        "output in an object that zshard does not search (return tensors, tuples, lists, dicts or dataclasses); call "
        "module.unshard() before such a use, or register the method that uses it with zshard.register_forward_method()",
        of_what, unit->params[i].name, zs_unit_label(unit->name));
}

/* A graph that was made of the slice gives the slice's gradient, whatever the parameter is by now. */
static zs_status check_whole(const zs_unit *unit, int64_t i)
{
    zs_grad_info grad;
    ZS_TRY(zs_grad_describe(unit->params[i].tensor, &grad));
    if (grad.numel == unit->params[i].numel) return ZS_OK;
    ZS_TRY(zs_grad_set(unit->params[i].tensor, NULL));
    return used_outside(unit, i, "the shard of ");
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
    bool step_early = unit->stepping != NULL; /* on the slice */
    if ((unit->replicated || step_early) && !unit->has_frozen)
        ZS_TRY(zs_unit_reshard(unit, unit->syncs ? ZS_REDUCING : ZS_SHARDED));
    if (engine->ranks.all->ops->mapped) return post_unit(unit);
    unit->packed = true;
    return post_due(engine);
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
    ZS_TRY(zs_grads_begin(unit, i));
    bool complete = false;
    ZS_TRY(zs_reduce_pack(unit, i, &complete));
    return complete ? on_complete(unit) : ZS_OK;
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
    zs_comm *comm = engine->ranks.all;
    bool told = comm->heard || engine->next_post == engine->n;
    comm->heard = false;
    return told ? ZS_OK : comm->ops->give_up(comm);
}

static zs_status post_rest(zs_engine *engine)
{
    if (engine->gave_up && !engine->ranks.all->ops->mapped) return tell_gave_up(engine);
    for (size_t i = 0; i < engine->n; i++) {
        zs_unit *unit = in_post_order(engine, i);
        if (unit->bucket != NULL || !unit->posted) ZS_TRY(post_unit(unit)); /* no-op for those that stay local */
    }
    return ZS_OK;
}

/* Gradients that are packed and not posted never will be. */
static void drop_packed(zs_unit *unit)
{
    unit->packed = false;
    zs_through_end(unit);
    zs_bucket_drop(unit);
}

/* What a failed pass leaves is put in order without the peers; they learn of it by their own waits. */
static void forget_backward(zs_engine *engine)
{
    for (size_t i = 0; i < engine->n; i++) {
        engine->spoiled |= zs_grads_undo(engine->units[i]);
        drop_packed(engine->units[i]);
        (void)zs_grads_end(engine->units[i]);
        zs_in_backward_forget(engine->units[i]);
    }
    zs_rounds_forget_all(engine->buckets);
}

/* The rounds that all ranks have posted can be ended in order, though their sums are of no use. */
static void end_rounds(zs_engine *engine)
{
    bool before = engine->gave_up;
    engine->gave_up = true;
    (void)zs_rounds_drain_all(engine->buckets);
    engine->gave_up = before;
}

/* What is stepped in backward and was not yet: now that no peer reads. Not where something has failed, of which `status` tells. */
static zs_status step_rest(zs_engine *engine, zs_status status)
{
    bool any = false;
    for (size_t i = 0; i < engine->n; i++)
        any |= engine->units[i]->stepping != NULL;
    if (any && status == ZS_OK) status = zs_session_write_begin(engine);
    for (size_t i = 0; i < engine->n; i++) {
        if (status == ZS_OK)
            status = zs_in_backward_finish(engine->units[i], !engine->gave_up);
        else
            zs_in_backward_forget(engine->units[i]);
    }
    if (any && status == ZS_OK) zs_session_write_end(engine);
    return status;
}

/* Gives all units' parameters their gradients; users' hooks that fail are told after that. */
static zs_status deliver(zs_engine *engine)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; i < engine->n; i++) {
        ZS_ALSO(status, zs_grads_end(engine->units[i]));
    }
    return status;
}

static zs_status close_backward(zs_engine *engine)
{
    zs_status resharded = ZS_OK;
    for (size_t i = 0; i < engine->n; i++) {
        ZS_ALSO(resharded, zs_in_backward_graph_done(engine->units[i]));
    }
    zs_status status = post_rest(engine);
    zs_prefetch_end(engine, ZS_PHASE_BACKWARD);
    ZS_ALSO(resharded, zs_session_reshard_all(engine, true));
    ZS_THEN(status, zs_rounds_drain_all(engine->buckets));
    ZS_THEN(status, zs_device_join(engine->ranks.all->device, engine->ranks.all->ops->lane));
    ZS_ALSO(status, resharded);
    engine->phase = IDLE;
    if (status == ZS_ERR_DIVERGED) end_rounds(engine);
    if (status != ZS_OK) forget_backward(engine);
    zs_status delivered = status == ZS_OK ? deliver(engine) : ZS_OK;
    for (size_t i = 0; i < engine->n; i++)
        zs_through_end(engine->units[i]);
    ZS_ALSO(status, zs_session_end_reading(engine, ZS_PHASE_BACKWARD));
    ZS_THEN(status, zs_rounds_settle_all(engine->buckets));
    zs_history_reduced(engine, status == ZS_OK && !engine->gave_up);
    ZS_ALSO(status, delivered);
    return step_rest(engine, status);
}

/* Has a backward given all the gradients that it has to give? Then nothing is missing if it raises after that. */
static bool all_arrived(const zs_engine *engine)
{
    bool any = false;
    for (size_t i = 0; i < engine->n; i++) {
        const zs_unit *unit = engine->units[i];
        if (unit->cunit == NULL) continue;
        bool packed = unit->bucket != NULL && unit->n_arrived == unit->n_expected;
        if (!unit->syncs || !(packed || (unit->posted && unit->bucket == NULL))) return false;
        any = true;
    }
    return any;
}

/* What a backward has raised, and when, for the peers. */
static void tell_failure(zs_engine *engine, const char *when)
{
    const char *what = zs_backward_failure();
    char text[ZS_MISHAP];
    snprintf(text, sizeof text, "raised %s %s", *what != 0 ? what : "an exception", when);
    zs_engine_tell_mishap(engine, text);
}

/* A backward has raised. What needs no peer is done at once, so that a zero_grad() that follows means what it says; the
 * peers are told by zs_engine_settle, before this rank does anything else with its parameters. */
static void abandon_backward(zs_engine *engine)
{
    if (all_arrived(engine)) {
        /* The peers miss nothing: it is over as if it had not raised, and they need not wait for this rank's next move. */
        (void)close_backward(engine);
        tell_failure(engine, "after its gradients had been reduced");
        return;
    }
    tell_failure(engine, "in backward");
    engine->phase = FAILED;
    (void)zs_session_reshard_all(engine, true);
    zs_prefetch_end(engine, ZS_PHASE_BACKWARD);
    for (size_t i = 0; i < engine->n; i++) {
        engine->spoiled |= zs_grads_undo(engine->units[i]);
        drop_packed(engine->units[i]);
        (void)zs_grads_hand_out(engine->units[i]);
        zs_in_backward_abandon(engine->units[i]);
    }
}

static zs_status backward_end_hook(void *pointer, int64_t arg)
{
    if (arg != ZS_BACKWARD_ABANDONED) return close_backward(pointer);
    abandon_backward(pointer);
    return ZS_OK;
}

zs_status zs_engine_settle(zs_engine *engine)
{
    if (engine->phase != FAILED) return ZS_OK;
    engine->gave_up = true;
    for (size_t i = 0; i < engine->n; i++)
        drop_packed(engine->units[i]);
    zs_status status = close_backward(engine);
    engine->gave_up = false;
    return status;
}
