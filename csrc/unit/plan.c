/* plan.c - see plan.h: the passes, as schedule.c, backward.c and prefetch.c go through them. */
#include "unit/planner.h"

#include "unit/in_backward.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 32 }; /* until the memory no longer grows; three are usual */

/* Does the unit's parameter `i` get a gradient? */
static bool wants(const zs_unit *unit, int64_t i)
{
    return unit->flats[unit->params[i].flat].trainable;
}

/* --- units that are whole ------------------------------------------------------------------------------------------------ */

/* Does a full buffer lie in a slot? Where peers' shards are mapped, that mapping is the full buffer. */
static bool takes_slots(const planner *p, const plan_unit *unit)
{
    return !unit->unit->fixed && (unit->unit->replicated || !p->near->mapped);
}

static zs_status begin_gather(planner *p, plan_unit *unit)
{
    if (unit->state != ZS_SHARDED && unit->state != ZS_REDUCING) return ZS_OK;
    unit->state = ZS_GATHERING;
    for (int f = 0; f < unit->unit->n_flats && takes_slots(p, unit); f++) {
        ZS_TRY(zs_arena_take(p->plan->slots, zs_flat_full_bytes(unit->unit, &unit->unit->flats[f]), &unit->slots[f]));
        if (!unit->unit->replicated && p->engine->ranks.near == p->engine->ranks.all) ZS_TRY(zs_plan_talk(p));
    }
    return ZS_OK;
}

static void give_back(planner *p, plan_unit *unit, zs_unit_state next)
{
    for (int f = 0; f < unit->unit->n_flats; f++) {
        if (unit->slots[f] != NULL) zs_arena_give(p->plan->slots, unit->slots[f]);
        unit->slots[f] = NULL;
    }
    unit->state = next;
}

static void reshard(planner *p, plan_unit *unit, zs_unit_state next)
{
    if (unit->unit->fixed || unit->state == ZS_FULL) give_back(p, unit, next);
    if (unit->unit->fixed && next == ZS_SHARDED) unit->state = ZS_FULL;
}

static int under_way(const planner *p)
{
    int n = 0;
    for (size_t i = 0; i < p->engine->n; i++)
        n += p->units[i].state == ZS_GATHERING;
    return n;
}

static zs_status begin_listed(planner *p, const zs_follow *list)
{
    for (size_t i = 0; i < list->n; i++) {
        plan_unit *next = &p->units[list->units[i]->place];
        if (next->state == ZS_SHARDED) ZS_TRY(begin_gather(p, next));
    }
    return ZS_OK;
}

static zs_status prefetch_next(planner *p, plan_unit *unit, zs_phase phase)
{
    if (unit->unit->by_hand[phase].n > 0) return begin_listed(p, &unit->unit->by_hand[phase]);
    int ahead = p->engine->prefetch.ahead[phase], room = ahead - under_way(p);
    plan_unit *next = unit->next[phase];
    for (int i = 0; i < ahead && room > 0 && next != NULL; i++, next = next->next[phase]) {
        if (next->state != ZS_SHARDED) continue;
        ZS_TRY(begin_gather(p, next));
        room--;
    }
    return ZS_OK;
}

static zs_status make_whole(planner *p, plan_unit *unit, zs_phase phase)
{
    ZS_TRY(begin_gather(p, unit));
    unit->state = ZS_FULL;
    if (p->near->mapped) return ZS_OK;
    if (!unit->unit->fixed && unit->unit->n_params > 0) {
        if (p->latest != NULL && p->latest != unit) p->latest->next[phase] = unit;
        p->latest = unit;
    }
    return prefetch_next(p, unit, phase);
}

/* The pass is over: what was begun and not wanted is dropped. */
static void end_prefetch(planner *p, zs_phase phase)
{
    for (size_t i = 0; i < p->engine->n; i++)
        if (p->units[i].state == ZS_GATHERING) give_back(p, &p->units[i], ZS_SHARDED);
    if (phase == ZS_PHASE_FORWARD && p->latest != NULL) p->last = p->latest;
}

/* --- forward ---------------------------------------------------------------------------------------------------------------- */

typedef struct forward {
    int depth;
    bool outermost_gathers;
    bool training; /* a backward follows */
} forward;

static bool stays_full(const planner *p, const plan_unit *unit, const forward *pass)
{
    if (!pass->training || !p->live) return false;
    if (unit->unit->strategy == ZS_SHARD_GRAD_OP) return true;
    if (p->near->mapped) return false;
    return pass->depth == 1 || (!pass->outermost_gathers && p->last == unit && p->latest == unit);
}

static zs_status enter(planner *p, plan_unit *unit, size_t at, forward *pass)
{
    if (unit->inside++ == 0) {
        unit->begun = at;
        unit->calls += pass->training;
    }
    if (++pass->depth == 1) pass->outermost_gathers = unit->unit->n_params > 0;
    return make_whole(p, unit, ZS_PHASE_FORWARD);
}

static void leave(planner *p, plan_unit *unit, forward *pass)
{
    if (pass->training && p->live) {
        if (unit->past || unit->begun < unit->oldest) unit->oldest = unit->begun;
        unit->past = false;
    }
    if (--unit->inside == 0 && !stays_full(p, unit, pass)) reshard(p, unit, ZS_SHARDED);
    pass->depth--;
}

static zs_status go_forward(planner *p, bool training)
{
    forward pass = {.training = training};
    p->latest = NULL;
    p->live = false;
    for (size_t i = 0; i < p->engine->n; i++)
        reshard(p, &p->units[i], ZS_SHARDED);
    for (size_t c = 0; c < p->engine->n_calls; c++) {
        const zs_call *call = &p->engine->calls[c];
        plan_unit *unit = &p->units[call->unit->place];
        if (call->what == ZS_CALL_ENTER)
            ZS_TRY(enter(p, unit, c, &pass));
        else if (call->what == ZS_CALL_EXIT)
            leave(p, unit, &pass);
        else
            p->live |= wants(call->unit, call->what);
    }
    end_prefetch(p, ZS_PHASE_FORWARD);
    return ZS_OK;
}

/* --- backward --------------------------------------------------------------------------------------------------------------- */

static zs_status retire(planner *p, size_t at)
{
    if (p->all->mapped) return ZS_OK;
    for (size_t i = 0; i < p->engine->n; i++) {
        plan_unit *unit = zs_plan_in_post_order(p, i);
        if (unit->retired || unit->past || unit->oldest < at) continue;
        unit->retired = true;
        if (unit->posted) continue;
        reshard(p, unit, unit->round.n_slices > 0 ? ZS_REDUCING : ZS_SHARDED);
        unit->packed = true;
    }
    return zs_plan_post_due(p);
}

/* The gradient of a forward of the unit's module, or of a part of it, begins. */
static zs_status come_back(planner *p, plan_unit *unit, size_t at)
{
    if (unit->past || unit->over) return ZS_OK; /* no gradient goes through it */
    ZS_TRY(retire(p, at));
    return make_whole(p, unit, ZS_PHASE_BACKWARD);
}

static zs_status arrive(planner *p, plan_unit *unit)
{
    if (unit->round.n_slices == 0) return ZS_OK;
    ZS_TRY(zs_plan_pack(p, unit));
    if (unit->n_arrived < unit->n_expected) return ZS_OK;
    if (!unit->unit->replicated && !p->near->mapped) return ZS_OK; /* ranks meet elsewhere */
    bool step_early = unit->stepped;
    if ((unit->unit->replicated || step_early) && !unit->has_frozen) reshard(p, unit, ZS_REDUCING);
    if (p->all->mapped) return zs_plan_post(p, unit);
    unit->packed = true;
    return zs_plan_post_due(p);
}

static zs_status close_backward(planner *p)
{
    for (size_t i = 0; i < p->engine->n; i++)
        if (p->units[i].stepped) reshard(p, &p->units[i], ZS_SHARDED);
    for (size_t i = 0; i < p->engine->n; i++) {
        plan_unit *unit = zs_plan_in_post_order(p, i);
        unit->calls = unit->stepped ? 0 : unit->calls;
        if (unit->bucket != NONE || !unit->posted) ZS_TRY(zs_plan_post(p, unit));
    }
    end_prefetch(p, ZS_PHASE_BACKWARD);
    for (size_t i = 0; i < p->engine->n; i++)
        reshard(p, &p->units[i], ZS_SHARDED);
    ZS_TRY(zs_plan_drain_all(p));
    for (size_t i = 0; i < p->engine->n; i++) {
        plan_unit *unit = &p->units[i];
        zs_plan_return_grads(p, unit);
        unit->past = true;
        unit->retired = unit->posted = unit->over = false;
        unit->n_arrived = unit->calls = 0;
    }
    return ZS_OK;
}

static zs_status go_backward(planner *p)
{
    p->latest = NULL;
    p->next_post = 0;
    for (size_t c = p->engine->n_calls; c-- > 0;) {
        const zs_call *call = &p->engine->calls[c];
        plan_unit *unit = &p->units[call->unit->place];
        if (call->what == ZS_CALL_EXIT)
            ZS_TRY(come_back(p, unit, c));
        else if (call->what != ZS_CALL_ENTER && wants(call->unit, call->what))
            ZS_TRY(arrive(p, unit));
    }
    return close_backward(p);
}

/* --- a plan ------------------------------------------------------------------------------------------------------------------- */

static void begin_unit(planner *p, zs_unit *unit, bool stepped)
{
    plan_unit *made = &p->units[unit->place];
    made->unit = unit;
    made->state = unit->fixed ? ZS_FULL : ZS_SHARDED;
    made->past = true;
    made->bucket = made->out = NONE;
    if (zs_unit_reduces(unit)) made->round = zs_unit_round_spec(unit);
    if (made->round.n_slices > 0) made->room = p->all->room(&made->round, p->engine->ranks.all->world);
    made->stepped = made->round.n_slices > 0 && (stepped || unit->borrows);
    for (int64_t i = 0; i < unit->n_params; i++) {
        made->n_expected += wants(unit, i);
        made->has_frozen |= !wants(unit, i);
    }
}

/* What wrapping has left: the room in which values came from rank 0, one parameter after the other. */
static zs_status share_values(planner *p)
{
    size_t largest = p->own.talk;
    for (size_t i = 0; i < p->engine->n; i++) {
        const zs_unit *unit = p->units[i].unit;
        for (int64_t k = 0; k < unit->n_params; k++) {
            size_t bytes = (size_t)unit->params[k].numel * unit->flats[unit->params[k].flat].layout.itemsize;
            if (bytes > p->own.piece) bytes = p->own.piece;
            if (bytes > largest) largest = bytes;
        }
    }
    zs_mem *area = NULL;
    if (largest == 0) return ZS_OK;
    ZS_TRY(zs_arena_take(p->plan->areas, largest, &area));
    zs_arena_give(p->plan->areas, area);
    return ZS_OK;
}

static zs_status begin(planner *p, bool stepped)
{
    zs_engine *engine = p->engine;
    p->all = engine->ranks.all->ops;
    p->near = engine->ranks.near->ops;
    p->own = p->all->room(NULL, engine->ranks.all->world);
    p->units = calloc(engine->n + 1, sizeof *p->units);
    if (p->units == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a plan");
    for (size_t i = 0; i < engine->n; i++)
        engine->units[i]->place = i;
    for (size_t i = 0; i < engine->n; i++)
        begin_unit(p, engine->units[i], stepped);
    ZS_TRY(zs_arena_new_outline(&p->plan->slots));
    ZS_TRY(zs_arena_new_outline(&p->plan->areas));
    return share_values(p);
}

/* What has been seen of the order is forgotten, as where a model is new. */
static void forget_order(planner *p)
{
    p->last = NULL;
    for (size_t i = 0; i < p->engine->n; i++)
        p->units[i].next[0] = p->units[i].next[1] = NULL;
}

static zs_status train_and_evaluate(planner *p)
{
    forget_order(p);
    for (int step = 0; step < 4; step++) {
        bool training = step != 2;
        ZS_TRY(go_forward(p, training));
        if (training) ZS_TRY(go_backward(p));
    }
    return ZS_OK;
}

static size_t total(const planner *p)
{
    size_t bytes = zs_arena_bytes(p->plan->slots) + zs_arena_bytes(p->plan->areas);
    for (int i = 0; i < p->n_buckets; i++)
        bytes += p->buckets[i].bytes;
    return bytes;
}

/* Slots that a step before has left are lent differently in the next: goes on until that makes no more of them. */
static zs_status settle(planner *p)
{
    for (int round = 0; round < MOST_ROUNDS; round++) {
        size_t before = total(p);
        ZS_TRY(train_and_evaluate(p));
        if (round > 0 && total(p) == before) break;
    }
    return ZS_OK;
}

static zs_status hand_out(const planner *p)
{
    p->plan->buckets = calloc((size_t)p->n_buckets + 1, sizeof *p->plan->buckets);
    if (p->plan->buckets == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a plan");
    for (int i = 0; i < p->n_buckets; i++)
        p->plan->buckets[i] = p->buckets[i].asked;
    p->plan->n_buckets = (size_t)p->n_buckets;
    return ZS_OK;
}

zs_status zs_plan_make(zs_engine *engine, bool stepped, zs_plan *plan)
{
    *plan = (zs_plan){0};
    planner p = {.engine = engine, .plan = plan};
    zs_status status = begin(&p, stepped);
    ZS_THEN(status, settle(&p));
    ZS_THEN(status, hand_out(&p));
    free(p.units);
    free(p.buckets);
    return status;
}

void zs_plan_free(zs_plan *plan)
{
    zs_arena_free(plan->slots);
    zs_arena_free(plan->areas);
    free(plan->buckets);
    *plan = (zs_plan){0};
}
