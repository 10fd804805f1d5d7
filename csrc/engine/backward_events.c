/* backward_events.c - the events of autograd's hooks, and of writes to parameters between passes. See engine.h.
 *
 * A hook checks what autograd passes to it, and sends an event. None runs Python or needs the GIL.
 */
#include "engine/engine.h"
#include "engine/engine_inside.h"
#include "engine/history.h"
#include "engine/recording.h"
#include "engine/usage.h"
#include "engine/writing.h"
#include "reduce/in_backward.h"
#include "reduce/leaves.h"

#include <stdio.h>
#include <string.h>

static zs_schedule *schedule_of(const zs_unit *unit)
{
    return &unit->context->schedule;
}

/* --- before the backward of a unit's forward ---------------------------------------------------------------------- */

static zs_status before_backward_hook(void *pointer, int64_t stamp)
{
    zs_unit *unit = pointer;
    if (zs_grad_mode()) ZS_TRY(zs_recording_backward(unit, stamp));
    ZS_TRY(zs_context_follow(unit->context));
    ZS_TRY(zs_schedule_begin_backward(schedule_of(unit)));
    zs_pace_backward(unit);
    if (!unit->record.early.over) ZS_TRY(zs_pin_check(unit));
    return zs_schedule_backward(schedule_of(unit), &unit->record, stamp);
}

zs_hook zs_engine_backward_hook(zs_unit *unit, int64_t stamp)
{
    return (zs_hook){before_backward_hook, zs_unit_retain, zs_unit_release, unit, stamp};
}

/* --- a gradient is ready ------------------------------------------------------------------------------------------ */

static zs_status used_outside(const zs_unit *unit, int64_t i, const char *of_what)
{
    return ZS_FAIL(
        ZS_ERR_STATE,
        "got a gradient for %sparameter '%s' of unit '%s', which is sharded: the parameter was used outside of a "
        "forward of its model (a penalty over model.parameters()), or the backward was not begun by Python; "
        "compute such a term in a forward, or call module.unshard() before",
        of_what, unit->params[i].name, zs_unit_label(unit->name));
}

/* A graph built from the shard gives the shard's gradient, even if the parameter is unsharded by now. */
static zs_status check_whole(const zs_unit *unit, int64_t i, const zs_grad_info *grad)
{
    if (grad->numel == unit->params[i].numel) return ZS_OK;
    ZS_TRY(zs_grad_set(unit->params[i].tensor, NULL));
    return used_outside(unit, i, "the shard of ");
}

/* The reduced gradient is not the one that autograd has recorded. */
static zs_status refuse_recorded(const zs_unit *unit, int64_t i)
{
    if (!zs_grad_mode() || unit->record.is.fixed) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE,
                   "backward(create_graph=True) reached parameter '%s' of unit '%s', which is sharded: the .grad of a "
                   "shard has no history; use torch.autograd.grad(loss, inputs, create_graph=True), whose results have "
                   "one, or strategy='no_shard'",
                   unit->params[i].name, zs_unit_label(unit->name));
}

static zs_status grad_ready_hook(void *pointer, int64_t i)
{
    zs_unit *unit = pointer;
    ZS_TRY(refuse_recorded(unit, i));
    ZS_TRY(zs_in_backward_check(unit));
    zs_grad_info grad;
    ZS_TRY(zs_grad_describe(unit->params[i].tensor, &grad));
    if (!grad.defined) return ZS_OK; /* a custom function returned None for the parameter */
    if (!zs_unit_is_full(unit)) return used_outside(unit, i, "");
    ZS_TRY(check_whole(unit, i, &grad));
    ZS_TRY(zs_context_follow(unit->context));
    return zs_schedule_gradient(schedule_of(unit), &unit->record, i);
}

static zs_status hook_param(zs_unit *unit, int64_t i)
{
    bool stepped = zs_in_backward_alone(unit) && zs_tensor_requires_grad(unit->params[i].tensor);
    if (unit->params[i].grad == NULL && !stepped) return ZS_OK;
    zs_hook hook = {grad_ready_hook, zs_unit_retain, zs_unit_release, unit, i};
    return zs_hook_grad_ready(unit->params[i].tensor, &hook);
}

/* --- the end ------------------------------------------------------------------------------------------------------ */

/* Publishes the error of a backward, and when it was raised; but not a divergence, which the peers find as well. */
static void tell_failure(zs_engine *engine, const char *when)
{
    static const char known[] = "DivergenceError";
    const char *what = zs_backward_failure();
    char text[256];
    if (strncmp(what, known, strlen(known)) == 0) return;
    snprintf(text, sizeof text, "raised %s %s", *what != 0 ? what : "an exception", when);
    zs_engine_publish_failure(engine, text);
}

/* A backward has raised. Cleans up at once what needs no peer, so that a zero_grad() that follows works;
 * zs_engine_settle reports it to the peers, before any other use of this rank's parameters. */
static void abandon_backward(zs_engine *engine)
{
    zs_schedule *schedule = &engine->context.schedule;
    if (zs_schedule_all_arrived(schedule)) {
        /* The peers miss nothing: it is over as if it had not raised, and they need not wait for this rank's next
         * move. */
        (void)zs_schedule_end(schedule);
        tell_failure(engine, "after its gradients had been reduced");
        return;
    }
    tell_failure(engine, "in backward");
    zs_schedule_fail(schedule);
}

static void (*show_units)(zs_engine *engine);

void zs_engine_on_stale_classes(void (*show)(zs_engine *engine))
{
    show_units = show;
}

static void show(zs_context *context)
{
    if (context->n_stale_classes > 0) show_units((zs_engine *)context);
}

static zs_status backward_end_hook(void *pointer, int64_t arg)
{
    zs_engine *engine = pointer;
    zs_status status = zs_context_follow(&engine->context);
    zs_recording_backward_end(engine);
    if (arg != ZS_BACKWARD_ABANDONED)
        ZS_ALSO(status, zs_schedule_end(&engine->context.schedule));
    else
        abandon_backward(engine);
    zs_pace_backward_end(engine);
    show(&engine->context);
    return status;
}

static void retain_engine(void *engine)
{
    zs_engine_retain(engine);
}

static zs_status hook_backward_end(zs_engine *engine)
{
    zs_hook hook = {backward_end_hook, retain_engine, zs_engine_release, engine, 0};
    return zs_hook_backward_end(&hook);
}

/* --- an engine with these hooks ----------------------------------------------------------------------------------- */

static void note_peak(zs_context *context)
{
    zs_engine_note_peak((zs_engine *)context);
}

zs_status zs_engine_new(const zs_ranks *ranks, const char *name, zs_engine **out)
{
    static const zs_engine_hooks hooks = {{hook_param, show, note_peak}, hook_backward_end};
    return zs_engine_make(ranks, name, &hooks, &zs_engine_actions, out);
}

/* --- between passes ----------------------------------------------------------------------------------------------- */

zs_status zs_engine_settle(zs_engine *engine)
{
    return zs_schedule_settle(&engine->context.schedule);
}

/* Within a forward (greedy training steps one layer there, then trains the next), all ranks end their reads before any
 * of them writes. */
static zs_status begin_to_write(zs_engine *engine)
{
    zs_schedule *schedule = &engine->context.schedule;
    if (schedule->n_open == 0 || engine->held > 0 || schedule->stage != ZS_IN_FORWARD) return zs_writing_begin(engine);
    ZS_TRY(zs_context_follow(&engine->context));
    ZS_TRY(zs_schedule_pause(schedule));
    engine->interrupted = true;
    return zs_writing_begin(engine);
}

zs_status zs_engine_write_begin(zs_engine *engine)
{
    ZS_TRY(zs_writing_check(engine));
    ZS_TRY(zs_engine_settle(engine)); /* peers may still read, for a backward that raised here */
    return begin_to_write(engine);
}

zs_status zs_engine_write_end(zs_engine *engine)
{
    if (!engine->writing) return ZS_OK; /* a closure's forward has ended it */
    zs_writing_end(engine);
    zs_pace_stepped(engine);
    return zs_schedule_resume(&engine->context.schedule);
}

/* The optimizer updates shards. Units that a forward has kept for its backward are gathered again there. */
static zs_status reshard_kept(zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        zs_unit *unit = zs_engine_unit(engine, i);
        if (unit->record.pinned || unit->record.inside > 0) continue;
        ZS_TRY(zs_schedule_reshard(&engine->context.schedule, &unit->record));
    }
    return ZS_OK;
}

zs_status zs_engine_before_step(zs_engine *engine, bool in_closure)
{
    ZS_TRY(zs_engine_settle(engine));
    if (!zs_backward_runs(&engine->context.schedule)) ZS_TRY(reshard_kept(engine));
    ZS_TRY(zs_leaves_check_step(&engine->context));
    ZS_TRY(zs_engine_check_spoiled(engine));
    zs_pace_step(engine);
    ZS_TRY(begin_to_write(engine));
    if (!in_closure) zs_writing_steps(engine); /* a closure may be called again, with forwards of any kind */
    return ZS_OK;
}
