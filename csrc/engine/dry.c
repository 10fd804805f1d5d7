/* dry.c - see dry.h. */
#include "engine/dry.h"

#include <stdlib.h>

static zs_dry *dry_of(zs_schedule *schedule)
{
    return (zs_dry *)schedule;
}

static zs_dry_unit *dry_unit_of(zs_record *record)
{
    return (zs_dry_unit *)record;
}

zs_status zs_dry_note(zs_dry *dry, zs_dry_act act, size_t at)
{
    zs_dry_events *events = dry->events;
    if (events == NULL) return ZS_OK;
    if (events->n == events->room) {
        size_t room = 2 * events->room + 64;
        zs_dry_event *list = realloc(events->list, room * sizeof *list);
        if (list == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a plan");
        events->list = list;
        events->room = room;
    }
    events->list[events->n++] = (zs_dry_event){act, at};
    return ZS_OK;
}

static zs_status note(const zs_dry_unit *it, zs_dry_act act)
{
    return zs_dry_note(it->dry, act, (size_t)(it - it->dry->units));
}

static const zs_comm *all_of(const zs_dry *dry)
{
    return dry->context->ranks.all;
}

/* --- memory that is borrowed -------------------------------------------------------------------------------------- */

static zs_status borrow_area(zs_dry *dry, size_t bytes, zs_mem **area)
{
    return bytes > 0 ? zs_arena_take(dry->areas, bytes, area) : ZS_OK;
}

static void give(zs_arena *arena, zs_mem **mem)
{
    if (*mem != NULL) zs_arena_give(arena, *mem);
    *mem = NULL;
}

/* The message before a collective. */
static zs_status talk(zs_dry *dry)
{
    zs_mem *area = NULL;
    ZS_TRY(borrow_area(dry, dry->own.talk, &area));
    give(dry->areas, &area);
    return ZS_OK;
}

static zs_status lend_grads(zs_dry_unit *it)
{
    for (int f = 0; f < it->unit->n_flats && it->lends; f++) {
        const zs_flat *flat = &it->unit->flats[f];
        if (!flat->trainable || it->grads[f] != NULL) continue;
        ZS_TRY(zs_arena_take_own(it->dry->slots, zs_flat_own_bytes(it->unit, flat), &it->grads[f]));
    }
    return ZS_OK;
}

static void return_grads(zs_dry_unit *it)
{
    for (int f = 0; f < it->unit->n_flats; f++)
        give(it->dry->slots, &it->grads[f]);
}

/* --- parameters --------------------------------------------------------------------------------------------------- */

/* Borrows a flat's full buffer. */
static zs_status borrow_slot(zs_dry_unit *it, int f)
{
    zs_dry *dry = it->dry;
    size_t bytes = zs_flat_full_bytes_as(&it->unit->flats[f], false);
    if (it->record.is.replicated) return zs_arena_take_own(dry->slots, bytes, &it->slots[f]);
    /* If peers' shards are mapped, the mapping is the full buffer. */
    return dry->schedule.gathers_cost ? zs_arena_take(dry->slots, bytes, &it->slots[f]) : ZS_OK;
}

/* Borrows memory for a flat's codes until it is bound. */
static zs_status borrow_codes(zs_dry_unit *it, int f)
{
    const zs_flat *flat = &it->unit->flats[f];
    if (flat->code == ZS_WIRE_EXACT) return ZS_OK;
    const zs_comm *all = all_of(it->dry);
    size_t bytes = zs_comm_code_room(all, flat->code, flat->compute, zs_flat_low_bytes(flat));
    if (!all->ops->codes_apart) return borrow_area(it->dry, bytes, &it->codes[f]);
    return zs_arena_take_apart(it->dry->areas, bytes, &it->codes[f]);
}

static zs_status gather(zs_record *record)
{
    zs_dry_unit *it = dry_unit_of(record);
    zs_dry *dry = it->dry;
    const zs_ranks *ranks = &dry->context->ranks;
    for (int f = 0; f < it->unit->n_flats; f++) {
        ZS_TRY(borrow_slot(it, f));
        if (it->slots[f] == NULL) continue;
        if (!record->is.replicated && ranks->shard_group == ranks->all) ZS_TRY(talk(dry));
        ZS_TRY(borrow_codes(it, f));
    }
    return note(it, ZS_DRY_GATHER);
}

static zs_status bind(zs_record *record)
{
    zs_dry_unit *it = dry_unit_of(record);
    const zs_dry *dry = it->dry;
    for (int f = 0; f < it->unit->n_flats; f++) {
        zs_mem *gathered = it->slots[f];
        give(dry->areas, &it->codes[f]);
        if (!it->unit->flats[f].reordered) continue;
        ZS_TRY(zs_arena_take_own(dry->slots, zs_flat_full_bytes_as(&it->unit->flats[f], false), &it->slots[f]));
        give(dry->slots, &gathered);
    }
    return note(it, ZS_DRY_BIND);
}

static zs_status reshard(zs_record *record)
{
    zs_dry_unit *it = dry_unit_of(record);
    for (int f = 0; f < it->unit->n_flats; f++)
        give(it->dry->slots, &it->slots[f]);
    return ZS_OK;
}

static zs_status cancel(zs_record *record)
{
    zs_dry_unit *it = dry_unit_of(record);
    for (int f = 0; f < it->unit->n_flats; f++)
        give(it->dry->areas, &it->codes[f]);
    return reshard(record);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static zs_status prepare(zs_record *record, int64_t arriving, zs_expected *out)
{
    zs_dry_unit *it = dry_unit_of(record);
    (void)arriving;
    *out = (zs_expected){it->prepared, it->n_wanted, it->has_frozen};
    it->prepared = true;
    return ZS_OK;
}

static zs_status bucket_new(zs_schedule *schedule, size_t bytes, zs_lease **out)
{
    zs_lease *made = calloc(1, sizeof *made);
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a plan");
    made->bytes = zs_comm_bucket_room(all_of(dry_of(schedule)), bytes);
    zs_status status = zs_schedule_add_lease(schedule, made);
    if (status != ZS_OK) {
        free(made);
        return status;
    }
    *out = made;
    return ZS_OK;
}

static zs_status pack(zs_record *record, int64_t i, bool anew, bool *first)
{
    (void)record, (void)i, (void)anew;
    *first = true;
    return ZS_OK;
}

static zs_status post(zs_record *record)
{
    zs_dry_unit *it = dry_unit_of(record);
    zs_dry *dry = it->dry;
    ZS_TRY(note(it, ZS_DRY_POST));
    ZS_TRY(borrow_area(dry, it->room.received, &it->received)); /* before ranks agree */
    ZS_TRY(borrow_area(dry, it->room.sent, &it->sent));
    if (dry->schedule.in_order) ZS_TRY(talk(dry));
    if (dry->schedule.in_order) return ZS_OK;
    ZS_TRY(lend_grads(it)); /* the sum may be made any time from now on */
    if (record->early.over) return_grads(it);
    return ZS_OK;
}

/* Peers are slow, unless there are none. */
static bool is_there(const zs_dry *dry, zs_wait wait)
{
    return wait != ZS_WAIT_NOT || dry->schedule.alone;
}

static zs_status sum(zs_record *record, zs_wait wait, bool *done, bool *over)
{
    zs_dry_unit *it = dry_unit_of(record);
    zs_dry *dry = it->dry;
    *done = is_there(dry, wait);
    if (!*done) return ZS_OK;
    give(dry->areas, &it->sent);
    if (record->is.replicated && dry->schedule.in_order) ZS_TRY(talk(dry));
    ZS_TRY(lend_grads(it));
    give(dry->areas, &it->received);
    *over = record->early.over;
    return note(it, ZS_DRY_SUM);
}

static zs_status reusable(zs_record *record, zs_wait wait, bool *ready)
{
    const zs_dry_unit *it = dry_unit_of(record);
    *ready = is_there(it->dry, wait);
    return *ready ? note(it, ZS_DRY_REUSE) : ZS_OK;
}

static zs_status step(zs_record *record)
{
    zs_dry_unit *it = dry_unit_of(record);
    return_grads(it);
    return note(it, ZS_DRY_STEP);
}

static zs_status end(zs_schedule *schedule, zs_status reduced, zs_status delivered)
{
    zs_dry *dry = dry_of(schedule);
    for (size_t i = 0; i < schedule->n; i++) {
        return_grads(&dry->units[i]);
        dry->units[i].prepared = false;
    }
    return reduced != ZS_OK ? reduced : delivered;
}

static const zs_actions dry_actions = {
    .gather = gather,
    .bind = bind,
    .cancel = cancel,
    .reshard = reshard,
    .prepare = prepare,
    .bucket_new = bucket_new,
    .pack = pack,
    .post = post,
    .sum = sum,
    .reusable = reusable,
    .step = step,
    .end = end,
};

/* --- a run -------------------------------------------------------------------------------------------------------- */

static zs_status begin_unit(zs_dry *dry, const zs_unit *unit, zs_dry_unit *it)
{
    const zs_comm *all = all_of(dry);
    it->dry = dry;
    it->unit = unit;
    zs_record_init(&it->record, unit->record.is);
    if (unit->record.is.reduces) {
        zs_cunit_spec round = zs_unit_round_spec(unit);
        it->room = zs_comm_room(all, &round);
    }
    for (int64_t i = 0; i < unit->n_params; i++) {
        bool wanted = unit->flats[unit->params[i].flat].trainable;
        it->n_wanted += wanted;
        it->has_frozen |= !wanted;
    }
    return zs_schedule_add(&dry->schedule, &it->record);
}

zs_status zs_dry_begin(zs_dry *dry, const zs_context *context, zs_unit *const *units, size_t n)
{
    *dry = (zs_dry){.context = context};
    zs_schedule_init(&dry->schedule, &dry_actions);
    zs_schedule_set_transports(&dry->schedule, context->schedule.gathers_cost, context->schedule.in_order,
                               context->schedule.alone);
    dry->own = zs_comm_room(all_of(dry), NULL);
    dry->units = calloc(n + 1, sizeof *dry->units);
    if (dry->units == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a plan");
    ZS_TRY(zs_arena_new_dry(&dry->slots));
    ZS_TRY(zs_arena_new_dry(&dry->areas));
    zs_arena_made_like(dry->slots, context->arena);
    for (size_t i = 0; i < n; i++) {
        units[i]->planned_at = i;
        ZS_TRY(begin_unit(dry, units[i], &dry->units[i]));
    }
    return ZS_OK;
}

void zs_dry_step_early(zs_dry *dry, size_t i)
{
    zs_dry_unit *it = &dry->units[i];
    it->lends = it->record.is.reduces;
    zs_record_set_early(&it->record, it->lends);
}

size_t zs_dry_bytes(const zs_dry *dry)
{
    size_t bytes = zs_arena_bytes(dry->slots) + zs_arena_bytes(dry->areas);
    for (size_t i = 0; i < dry->schedule.n_leases; i++)
        bytes += dry->schedule.leases[i]->bytes;
    return bytes;
}

void zs_dry_free(zs_dry *dry)
{
    for (size_t i = 0; i < dry->schedule.n_leases; i++)
        free(dry->schedule.leases[i]);
    for (size_t i = 0; i < dry->schedule.n; i++)
        zs_record_free(&dry->units[i].record);
    zs_schedule_free(&dry->schedule);
    zs_arena_free(dry->slots);
    zs_arena_free(dry->areas);
    free(dry->units);
}
