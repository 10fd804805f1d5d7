/* plan.c - see plan.h. */
#include "engine/plan.h"

#include <stdlib.h>

enum { MOST_ROUNDS = 32 }; /* until the memory no longer grows; three are usual */

/* One of the calls of the plan. */
typedef struct planned_call {
    zs_dry_unit *it; /* borrowed */
    /* the stamp of the forward that ends here, for its backward's hook; negative: none */
    int64_t stamp;
} planned_call;

typedef struct planner {
    zs_dry dry;
    const zs_plan_spec *spec;
    planned_call *calls; /* [spec->n_calls] owned */
    int64_t nodes;       /* that autograd's graph would have had before this step: one for each call */
} planner;

/* NULL: it is another model's. */
static zs_dry_unit *dry_unit(planner *p, const zs_unit *unit)
{
    const size_t at = unit->planned_at;
    return at < p->dry.schedule.n && p->dry.units[at].unit == unit ? &p->dry.units[at] : NULL;
}

/* Does the unit's parameter `i` get a gradient? */
static bool wants(const zs_unit *unit, int64_t i)
{
    return unit->flats[unit->params[i].flat].trainable;
}

/* Reserves the buffer that wrapping used, in which values came from rank 0, one parameter after the other. */
static zs_status share_values(planner *p)
{
    zs_dry *dry = &p->dry;
    size_t largest = dry->own.talk;
    for (size_t i = 0; i < dry->schedule.n; i++) {
        const zs_unit *unit = dry->units[i].unit;
        for (int64_t k = 0; k < unit->n_params; k++) {
            size_t bytes = (size_t)unit->params[k].numel * unit->flats[unit->params[k].flat].layout.itemsize;
            if (bytes > dry->own.piece) bytes = dry->own.piece;
            if (bytes > largest) largest = bytes;
        }
    }
    zs_mem *area = NULL;
    if (largest == 0) return ZS_OK;
    ZS_TRY(zs_arena_take(dry->areas, largest, &area));
    zs_arena_give(dry->areas, area);
    return ZS_OK;
}

/* --- passes ------------------------------------------------------------------------------------------------------- */

static zs_status go_forward(planner *p, bool training)
{
    zs_schedule *schedule = &p->dry.schedule;
    bool live = false; /* what runs has a gradient history */
    for (size_t c = 0; c < p->spec->n_calls; c++) {
        const zs_call *call = &p->spec->calls[c];
        planned_call *planned = &p->calls[c];
        zs_dry_unit *it = planned->it;
        int64_t now = p->nodes + (int64_t)c;
        planned->stamp = -1;
        ZS_TRY(zs_dry_note(&p->dry, ZS_DRY_FORWARD, c));
        if (call->what == ZS_CALL_ENTER) {
            zs_entry entry = {.training = training, .recording = training, .now = now};
            ZS_TRY(zs_schedule_enter(schedule, &it->record, &entry));
        } else if (call->what == ZS_CALL_EXIT) {
            if (training && live) planned->stamp = zs_schedule_stamp(it->record.span.begun, now);
            ZS_TRY(zs_schedule_leave(schedule, &it->record, training && live));
        } else if (call->what == ZS_CALL_READ) {
            zs_record_set_operation(&it->record, c + 1);
            ZS_TRY(zs_schedule_read(schedule, &it->record, now));
            if (training) planned->stamp = zs_schedule_stamp(now, now + 1);
        } else {
            live |= wants(call->unit, call->what);
        }
    }
    p->nodes += (int64_t)p->spec->n_calls;
    return ZS_OK;
}

static zs_status go_backward(planner *p)
{
    zs_schedule *schedule = &p->dry.schedule;
    ZS_TRY(zs_schedule_begin_backward(schedule));
    for (size_t c = p->spec->n_calls; c-- > 0;) {
        const zs_call *call = &p->spec->calls[c];
        const planned_call *planned = &p->calls[c];
        zs_dry_unit *it = planned->it;
        ZS_TRY(zs_dry_note(&p->dry, ZS_DRY_BACKWARD, c));
        if (call->what == ZS_CALL_ENTER) continue;
        if (call->what >= 0) {
            if (wants(call->unit, call->what) && it->record.is.reduces)
                ZS_TRY(zs_schedule_gradient(schedule, &it->record, call->what));
        } else if (planned->stamp >= 0) {
            ZS_TRY(zs_schedule_backward(schedule, &it->record, planned->stamp));
        }
    }
    return zs_schedule_end(schedule);
}

static zs_status train_and_evaluate(planner *p)
{
    zs_schedule_forget_order(&p->dry.schedule);
    for (int step = 0; step < 4; step++) {
        bool training = step != 2;
        ZS_TRY(go_forward(p, training));
        if (training) ZS_TRY(go_backward(p));
    }
    return ZS_OK;
}

/* Each step may borrow the slots of the last one differently: repeats until no step needs more. */
static zs_status settle(planner *p)
{
    for (int round = 0; round < MOST_ROUNDS; round++) {
        size_t before = zs_dry_bytes(&p->dry);
        ZS_TRY(train_and_evaluate(p));
        if (round > 0 && zs_dry_bytes(&p->dry) == before) break;
    }
    return ZS_OK;
}

/* Keeps the events of one more training step. */
static zs_status keep_events(planner *p)
{
    p->dry.events = p->spec->events;
    if (p->dry.events == NULL) return ZS_OK;
    ZS_TRY(go_forward(p, true));
    return go_backward(p);
}

/* --- a plan ------------------------------------------------------------------------------------------------------- */

/* Who follows whom by hand. */
static zs_status copy_follows(planner *p, const zs_unit *unit, zs_dry_unit *it)
{
    for (int phase = 0; phase < 2; phase++) {
        const zs_follow *list = &unit->record.by_hand[phase];
        zs_record *records[list->n + 1];
        size_t n = 0;
        for (size_t k = 0; k < list->n; k++) {
            zs_dry_unit *next = dry_unit(p, zs_unit_of(list->records[k]));
            if (next != NULL) records[n++] = &next->record;
        }
        ZS_TRY(zs_schedule_follow(&it->record, (zs_phase)phase, records, n));
    }
    return ZS_OK;
}

static zs_status begin(planner *p, const zs_context *context)
{
    const zs_plan_spec *spec = p->spec;
    ZS_TRY(zs_dry_begin(&p->dry, context, spec->units, spec->n_units));
    zs_schedule_set_ahead(&p->dry.schedule, spec->ahead);
    for (size_t i = 0; i < spec->n_units; i++) {
        if (spec->stepped || spec->units[i]->borrows) zs_dry_step_early(&p->dry, i);
        ZS_TRY(copy_follows(p, spec->units[i], &p->dry.units[i]));
    }
    p->nodes = 1; /* a unit that has not run is older */
    p->calls = calloc(spec->n_calls + 1, sizeof *p->calls);
    if (p->calls == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a plan");
    for (size_t c = 0; c < spec->n_calls; c++)
        if ((p->calls[c].it = dry_unit(p, spec->calls[c].unit)) == NULL)
            return ZS_FAIL(ZS_ERR_VALUE, "unit '%s' belongs to another engine",
                           zs_unit_label(spec->calls[c].unit->name));
    return share_values(p);
}

static zs_status hand_out(planner *p, zs_plan *plan)
{
    const zs_schedule *schedule = &p->dry.schedule;
    plan->buckets = calloc(schedule->n_leases + 1, sizeof *plan->buckets);
    if (plan->buckets == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a plan");
    for (size_t i = 0; i < schedule->n_leases; i++)
        plan->buckets[i] = schedule->leases[i]->asked;
    plan->n_buckets = schedule->n_leases;
    plan->slots = p->dry.slots;
    plan->areas = p->dry.areas;
    p->dry.slots = p->dry.areas = NULL;
    return ZS_OK;
}

zs_status zs_plan_make(const zs_context *context, const zs_plan_spec *spec, zs_plan *plan)
{
    *plan = (zs_plan){0};
    planner p = {.spec = spec};
    zs_status status = begin(&p, context);
    ZS_THEN(status, settle(&p));
    ZS_THEN(status, keep_events(&p));
    ZS_THEN(status, hand_out(&p, plan));
    zs_dry_free(&p.dry);
    free(p.calls);
    return status;
}

void zs_plan_free(zs_plan *plan)
{
    zs_arena_free(plan->slots);
    zs_arena_free(plan->areas);
    free(plan->buckets);
    *plan = (zs_plan){0};
}
