/* plan_rounds.c - see plan.h: the rounds of gradients of a backward, as bucket.c, reduce.c and the transport go through them.
 */
#include "unit/planner.h"

#include "unit/bucket.h"
#include "unit/in_backward.h"

#include <stdlib.h>

/* --- memory that is borrowed --------------------------------------------------------------------------------------------- */

static zs_status borrow_area(planner *p, size_t bytes, zs_mem **area)
{
    return bytes > 0 ? zs_arena_take(p->plan->areas, bytes, area) : ZS_OK;
}

static void return_area(planner *p, zs_mem **area)
{
    if (*area != NULL) zs_arena_give(p->plan->areas, *area);
    *area = NULL;
}

zs_status zs_plan_talk(planner *p)
{
    zs_mem *area = NULL;
    ZS_TRY(borrow_area(p, p->own.talk, &area));
    return_area(p, &area);
    return ZS_OK;
}

static zs_status lend_grads(planner *p, plan_unit *unit)
{
    for (int f = 0; f < unit->unit->n_flats && unit->stepped; f++) {
        const zs_flat *flat = &unit->unit->flats[f];
        if (!flat->trainable || unit->grads[f] != NULL) continue;
        ZS_TRY(zs_arena_take(p->plan->slots, zs_flat_own_bytes(unit->unit, flat), &unit->grads[f]));
    }
    return ZS_OK;
}

void zs_plan_return_grads(planner *p, plan_unit *unit)
{
    for (int f = 0; f < unit->unit->n_flats; f++) {
        if (unit->grads[f] != NULL) zs_arena_give(p->plan->slots, unit->grads[f]);
        unit->grads[f] = NULL;
    }
}

/* --- the queue of rounds that are out ---------------------------------------------------------------------------------------- */

static void enqueue(planner *p, plan_unit *unit)
{
    unit->outstanding = true;
    unit->next_out = NULL;
    if (p->first_out == NULL)
        p->first_out = unit;
    else
        p->last_out->next_out = unit;
    p->last_out = unit;
}

/* Collects, sums and releases the oldest round. */
static zs_status drain_first(planner *p)
{
    plan_unit *unit = p->first_out;
    return_area(p, &unit->sent);
    if (unit->unit->replicated && !p->all->mapped) ZS_TRY(zs_plan_talk(p));
    ZS_TRY(lend_grads(p, unit));
    p->first_out = unit->next_out;
    if (p->first_out == NULL) p->last_out = NULL;
    unit->outstanding = false;
    return_area(p, &unit->received);
    if (unit->state == ZS_REDUCING) unit->state = unit->unit->fixed ? ZS_FULL : ZS_SHARDED;
    if (unit->over) zs_plan_return_grads(p, unit);
    return ZS_OK;
}

static zs_status drain(planner *p, const plan_unit *unit)
{
    while (unit->outstanding)
        ZS_TRY(drain_first(p));
    return ZS_OK;
}

static zs_status drain_queue(planner *p)
{
    while (p->first_out != NULL)
        ZS_TRY(drain_first(p));
    return ZS_OK;
}

/* --- buckets ------------------------------------------------------------------------------------------------------------ */

static zs_status reclaim(planner *p, int index)
{
    plan_unit *user = p->buckets[index].user;
    if (user == NULL) return ZS_OK;
    ZS_TRY(drain(p, user));
    user->out = NONE;
    p->buckets[index].user = NULL;
    p->buckets[index].posted = false;
    return ZS_OK;
}

typedef struct pool_view {
    int idle, oldest, fitting;
} pool_view;

static pool_view look(const planner *p, size_t bytes)
{
    pool_view view = {NONE, NONE, 0};
    for (int i = 0; i < p->n_buckets; i++) {
        const plan_bucket *each = &p->buckets[i];
        if (each->bytes < bytes) continue;
        view.fitting++;
        if (each->user == NULL && (view.idle == NONE || each->bytes < p->buckets[view.idle].bytes)) view.idle = i;
        if (each->posted && (view.oldest == NONE || each->posted_at < p->buckets[view.oldest].posted_at))
            view.oldest = i;
    }
    return view;
}

static zs_status add_bucket(planner *p, size_t bytes, int *index)
{
    plan_bucket *grown = realloc(p->buckets, (size_t)(p->n_buckets + 1) * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a plan");
    p->buckets = grown;
    *index = p->n_buckets++;
    grown[*index] = (plan_bucket){.asked = bytes, .bytes = p->all->bucket_room(bytes)};
    return ZS_OK;
}

static zs_status take_bucket(planner *p, plan_unit *unit)
{
    size_t bytes = zs_unit_bucket_bytes(unit->unit);
    ZS_TRY(drain(p, unit));
    if (unit->out != NONE) ZS_TRY(reclaim(p, unit->out));
    bool alone = p->engine->ranks.all->world == 1; /* nobody is waited for */
    for (int i = 0; i < p->n_buckets && alone; i++)
        if (p->buckets[i].posted) ZS_TRY(reclaim(p, i));
    pool_view view = look(p, bytes);
    if (view.idle == NONE && view.fitting >= ZS_BUCKETS_OUT && view.oldest != NONE) {
        ZS_TRY(reclaim(p, view.oldest));
        view = look(p, bytes);
    }
    if (view.idle == NONE) ZS_TRY(add_bucket(p, bytes, &view.idle));
    unit->bucket = view.idle;
    p->buckets[view.idle].user = unit;
    return ZS_OK;
}

/* --- rounds -------------------------------------------------------------------------------------------------------------- */

zs_status zs_plan_pack(planner *p, plan_unit *unit)
{
    unit->n_arrived++;
    return unit->bucket == NONE ? take_bucket(p, unit) : ZS_OK;
}

zs_status zs_plan_post(planner *p, plan_unit *unit)
{
    unit->packed = false;
    if (unit->round.n_slices == 0) return ZS_OK;
    if (unit->bucket == NONE && unit->unit->replicated) ZS_TRY(take_bucket(p, unit));
    if (unit->bucket == NONE) ZS_TRY(drain(p, unit));
    unit->over = unit->stepped && unit->calls <= 1 && (unit->unit->fixed || unit->state != ZS_FULL);
    if (!p->all->mapped) ZS_TRY(zs_plan_talk(p));
    ZS_TRY(borrow_area(p, unit->room.received, &unit->received));
    ZS_TRY(borrow_area(p, unit->room.sent, &unit->sent));
    unit->posted = true;
    enqueue(p, unit);
    if (unit->bucket != NONE) {
        p->buckets[unit->bucket].posted = true;
        p->buckets[unit->bucket].posted_at = p->posts++;
        unit->out = unit->bucket;
        unit->bucket = NONE;
    }
    if (p->all->mapped) { /* the sum may be made any time from now on */
        ZS_TRY(lend_grads(p, unit));
        if (unit->over) zs_plan_return_grads(p, unit);
    }
    return unit->unit->replicated && !p->all->mapped ? drain_queue(p) : ZS_OK;
}

plan_unit *zs_plan_in_post_order(const planner *p, size_t i)
{
    return &p->units[p->engine->n - 1 - i];
}

zs_status zs_plan_post_due(planner *p)
{
    for (; p->next_post < p->engine->n; p->next_post++) {
        plan_unit *next = zs_plan_in_post_order(p, p->next_post);
        if (next->round.n_slices > 0 && !next->packed) return ZS_OK;
        ZS_TRY(zs_plan_post(p, next));
    }
    return ZS_OK;
}

zs_status zs_plan_drain_all(planner *p)
{
    ZS_TRY(drain_queue(p));
    for (int i = 0; i < p->n_buckets; i++)
        if (p->buckets[i].posted) ZS_TRY(reclaim(p, i));
    return ZS_OK;
}
