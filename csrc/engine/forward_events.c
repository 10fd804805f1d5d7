/* forward_events.c - the events of users' forwards, and of unshard() and reshard(). See engine.h.
 */
#include "engine/engine.h"
#include "engine/engine_inside.h"
#include "engine/history.h"
#include "engine/recording.h"
#include "reduce/in_backward.h"

static zs_schedule *schedule_of(const zs_unit *unit)
{
    return &unit->context->schedule;
}

/* A backward within a forward leaves the forward open. */
static bool runs(const zs_schedule *schedule)
{
    return schedule->stage != ZS_IDLE || schedule->n_open > 0;
}

zs_status zs_engine_adopt(zs_engine *engine, zs_unit *unit)
{
    zs_engine *old = zs_engine_of(unit);
    if (old == engine) return ZS_OK;
    ZS_TRY(zs_engine_settle(old));
    if (runs(&old->context.schedule) || runs(&engine->context.schedule))
        return ZS_FAIL(ZS_ERR_STATE,
                       "FSDP(...) was called during a forward or backward of unit '%s'; call it between steps",
                       zs_unit_label(unit->name));
    return zs_engine_take_over(engine, unit);
}

/* --- sessions opened by hand -------------------------------------------------------------------------------------- */

static zs_entry entry_now(void)
{
    return (zs_entry){.recording = zs_grad_mode(), .now = zs_next_node()};
}

zs_status zs_engine_open(zs_engine *engine)
{
    if (zs_backward_runs(&engine->context.schedule))
        return ZS_FAIL(ZS_ERR_STATE,
                       "full parameters cannot be accessed during a backward; access them before or after it");
    zs_entry entry = entry_now();
    entry.by_hand = true;
    ZS_TRY(zs_context_follow(&engine->context));
    ZS_TRY(zs_schedule_enter(&engine->context.schedule, NULL, &entry));
    engine->held++;
    return ZS_OK;
}

zs_status zs_engine_close(zs_engine *engine)
{
    engine->held--;
    zs_status status = zs_context_follow(&engine->context);
    ZS_ALSO(status, zs_schedule_leave_by_hand(&engine->context.schedule));
    return status;
}

size_t zs_engine_n_open(const zs_engine *engine)
{
    return engine->context.schedule.n_open;
}

zs_status zs_engine_unwind(zs_engine *engine, size_t n_open)
{
    zs_status status = zs_schedule_unwind(&engine->context.schedule, n_open);
    if (engine->context.schedule.n_open == 0 && !zs_backward_runs(&engine->context.schedule))
        zs_recording_unwind(engine);
    return status;
}

zs_status zs_engine_unshard(zs_unit *unit, bool exact)
{
    if (unit->record.is.fixed) return ZS_OK;
    if (unit->record.pinned) return zs_pin(unit, exact);
    ZS_TRY(zs_engine_open(zs_engine_of(unit)));
    zs_status status = zs_pin(unit, exact);
    ZS_ALSO(status, zs_engine_close(zs_engine_of(unit)));
    return status;
}

zs_status zs_engine_reshard(zs_unit *unit)
{
    bool running = zs_backward_runs(schedule_of(unit));
    if (unit->record.inside > 0 || running)
        return ZS_FAIL(
            ZS_ERR_STATE,
            "reshard() of unit '%s' was called during %s, which needs the full parameters; call it afterwards",
            zs_unit_label(unit->name), running ? "a backward" : "its own forward");
    ZS_TRY(zs_context_follow(unit->context));
    return zs_schedule_reshard(schedule_of(unit), &unit->record);
}

zs_status zs_prefetch_set(zs_unit *unit, zs_phase phase, zs_unit *const *units, size_t n)
{
    zs_record *records[n + 1];
    for (size_t i = 0; i < n; i++) {
        if (units[i]->context != unit->context)
            return ZS_FAIL(ZS_ERR_VALUE,
                           "cannot prefetch across models: units '%s' and '%s' belong to different models; set the "
                           "units to prefetch after wrapping the outermost module",
                           zs_unit_label(unit->name), zs_unit_label(units[i]->name));
        records[i] = &units[i]->record;
    }
    ZS_TRY(zs_schedule_follow(&unit->record, phase, records, n));
    zs_context_replan(unit->context);
    return ZS_OK;
}

/* --- forwards ----------------------------------------------------------------------------------------------------- */

/* Refuses a checkpoint around the full model, whose backward runs within another: each would end, and step, alone.
 */
static zs_status check_outside(const zs_unit *unit)
{
    if (unit->stepping == NULL || !zs_in_backward()) return ZS_OK;
    return ZS_FAIL(
        ZS_ERR_UNSUPPORTED,
        "unit '%s' runs its forward inside another backward, most likely that of a reentrant checkpoint around the "
        "whole model, which optimizer_in_backward() does not support: pass use_reentrant=False to checkpoint()",
        zs_unit_label(unit->name));
}

/* Buckets and shards of gradients have the parameters' dtype. */
static zs_status check_grad_dtypes(const zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        if (!zs_tensor_alive(param->tensor) || !zs_tensor_requires_grad(param->tensor)) continue;
        if (zs_tensor_has_own_grad_dtype(param->tensor)) continue;
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "parameter '%s' has a grad_dtype other than its own dtype, which zshard does not "
                       "support: omit it; for gradients in float32, use float32 parameters with "
                       "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)",
                       param->name);
    }
    return ZS_OK;
}

/* Gradual unfreezing: scripts set requires_grad between steps, without a call to zshard. */
zs_status zs_engine_thaw(zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        zs_unit *unit = zs_engine_unit(engine, i);
        ZS_TRY(check_grad_dtypes(unit));
        if (!zs_unit_is_thawing(unit)) continue;
        ZS_TRY(zs_engine_settle(engine)); /* a backward that raised here may have rounds under way */
        ZS_TRY(zs_unit_thaw(unit));
    }
    zs_engine_note_frozen(engine);
    return ZS_OK;
}

static zs_status enter(zs_unit *unit, const zs_entry *entry)
{
    if (zs_backward_runs(schedule_of(unit))) {
        ZS_TRY(zs_in_backward_check(unit));
        ZS_TRY(zs_pin_check(unit));
        return zs_schedule_recompute(schedule_of(unit), &unit->record, entry->now);
    }
    ZS_TRY(check_outside(unit));
    ZS_TRY(zs_pin_check(unit));
    return zs_schedule_enter(schedule_of(unit), &unit->record, entry);
}

/* Units removed from the model take part in no later pass, the same on all ranks. */
static void forget_gone(zs_engine *engine)
{
    for (size_t i = zs_engine_n_units(engine); i-- > 0;)
        if (zs_engine_unit(engine, i)->gone) zs_engine_forget(engine, zs_engine_unit(engine, i));
}

zs_status zs_engine_pre_forward(zs_unit *unit, bool training)
{
    zs_engine *engine = zs_engine_of(unit);
    zs_entry entry = entry_now();
    entry.training = training;
    const zs_schedule *schedule = schedule_of(unit);
    bool between = schedule->n_open == 0 && (schedule->stage == ZS_IDLE || schedule->stage == ZS_FAILED);
    if (between) zs_recording_unwind(engine);
    if (between) forget_gone(engine);
    if (entry.recording && between) ZS_TRY(zs_engine_thaw(engine));
    ZS_TRY(zs_context_follow(unit->context));
    ZS_TRY(enter(unit, &entry));
    zs_status status = zs_recording_forward(unit);
    zs_unit_show_full(unit, zs_unit_is_full(unit));
    if (status != ZS_OK) (void)zs_schedule_leave(schedule_of(unit), &unit->record, false);
    return status;
}

/* From here on the guard is asked about the parameters, even where they stay unsharded: an operation reads them. */
static void leave_to_guard(zs_unit *unit)
{
    if (unit->record.inside == 0 && !unit->record.pinned && !zs_backward_runs(schedule_of(unit)))
        zs_unit_show_full(unit, false);
}

zs_status zs_engine_post_forward(zs_unit *unit)
{
    bool made = zs_recording_forward_end(unit);
    zs_status status = zs_context_follow(unit->context);
    ZS_ALSO(status, zs_schedule_leave(schedule_of(unit), &unit->record, made && zs_grad_mode()));
    leave_to_guard(unit);
    return status;
}

/* --- reads -------------------------------------------------------------------------------------------------------- */

static zs_status unshard_for_read(zs_unit *unit)
{
    zs_schedule *schedule = schedule_of(unit);
    ZS_TRY(zs_context_follow(unit->context));
    ZS_TRY(zs_pin_check(unit));
    if (zs_backward_runs(schedule)) {
        ZS_TRY(zs_in_backward_check(unit));
        return zs_schedule_recompute(schedule, &unit->record, zs_grad_mode() ? zs_next_node() : -1);
    }
    return zs_schedule_read(schedule, &unit->record, zs_next_node());
}

zs_status zs_engine_read(zs_unit *unit, uint64_t operation)
{
    zs_record_set_operation(&unit->record, operation);
    if (!zs_engine_in_forward(zs_engine_of(unit))) return ZS_OK;
    bool counts = zs_recording_runs(zs_engine_of(unit)) == NULL || zs_recording_counts(unit);
    if (zs_unit_is_full(unit) && counts) return ZS_OK;
    ZS_TRY(unshard_for_read(unit));
    zs_unit_show_full(unit, false); /* the guard is also asked about the next one */
    return counts ? ZS_OK : zs_recording_read(unit);
}

zs_status zs_engine_unread(zs_unit *unit)
{
    if (!zs_engine_in_forward(zs_engine_of(unit)) || zs_backward_runs(schedule_of(unit))) return ZS_OK;
    ZS_TRY(zs_context_follow(unit->context));
    return zs_schedule_unread(schedule_of(unit), &unit->record);
}
