/* prefetch.c - see prefetch.h. */
#include "unit/prefetch.h"

#include "unit/engine.h"

#include <stdlib.h>
#include <string.h>

static bool gathers_take_time(const zs_engine *engine)
{
    return !engine->ranks.near->ops->mapped;
}

static int under_way(const zs_engine *engine)
{
    int n = 0;
    for (size_t i = 0; i < engine->n; i++)
        n += engine->units[i]->state == ZS_GATHERING;
    return n;
}

void zs_prefetch_begin(zs_engine *engine)
{
    engine->latest = NULL;
}

void zs_prefetch_note(zs_unit *unit, zs_phase phase)
{
    zs_engine *engine = unit->engine;
    if (!gathers_take_time(engine) || unit->fixed || unit->n_params == 0) return;
    if (engine->latest != NULL && engine->latest != unit) engine->latest->next[phase] = unit;
    engine->latest = unit;
}

static zs_status begin_listed(const zs_follow *list)
{
    for (size_t i = 0; i < list->n; i++)
        if (list->units[i]->state == ZS_SHARDED) ZS_TRY(zs_unit_begin(list->units[i]));
    return ZS_OK;
}

zs_status zs_prefetch_next(zs_unit *unit, zs_phase phase)
{
    zs_engine *engine = unit->engine;
    if (!gathers_take_time(engine)) return ZS_OK;
    if (unit->by_hand[phase].n > 0) return begin_listed(&unit->by_hand[phase]);
    int room = engine->prefetch.ahead[phase];
    if (room > 0) room -= under_way(engine);
    zs_unit *next = unit->next[phase];
    for (int i = 0; i < engine->prefetch.ahead[phase] && room > 0 && next != NULL; i++) {
        if (next->state == ZS_SHARDED) {
            ZS_TRY(zs_unit_begin(next));
            room--;
        }
        next = next->next[phase];
    }
    return ZS_OK;
}

void zs_prefetch_end(zs_engine *engine, zs_phase phase)
{
    for (size_t i = 0; i < engine->n; i++)
        zs_unit_cancel(engine->units[i]);
    if (phase == ZS_PHASE_FORWARD && engine->latest != NULL) engine->last = engine->latest;
}

bool zs_prefetch_is_last(const zs_unit *unit)
{
    return unit->engine->last == unit && unit->engine->latest == unit;
}

zs_status zs_prefetch_set(zs_unit *unit, zs_phase phase, zs_unit *const *units, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (units[i]->engine != unit->engine)
            return ZS_FAIL(ZS_ERR_VALUE,
                           "cannot prefetch across models: units '%s' and '%s' belong to different models; set the "
                           "units to prefetch after wrapping the outermost module",
                           zs_unit_label(unit->name), zs_unit_label(units[i]->name));
    zs_follow *list = &unit->by_hand[phase];
    zs_unit **copy = NULL;
    if (n > 0) {
        copy = malloc(n * sizeof(zs_unit *));
        if (copy == NULL)
            return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the prefetch list of unit '%s'",
                           zs_unit_label(unit->name));
        memcpy(copy, units, n * sizeof(zs_unit *));
    }
    free(list->units);
    *list = (zs_follow){copy, n};
    zs_engine_replan(unit->engine);
    return ZS_OK;
}

static void forget_in(zs_follow *list, const zs_unit *unit)
{
    size_t kept = 0;
    for (size_t i = 0; i < list->n; i++)
        if (list->units[i] != unit) list->units[kept++] = list->units[i];
    list->n = kept;
}

void zs_prefetch_forget(zs_engine *engine, const zs_unit *unit)
{
    if (engine->latest == unit) engine->latest = NULL;
    if (engine->last == unit) engine->last = NULL;
    for (size_t i = 0; i < engine->n; i++) {
        zs_unit *other = engine->units[i];
        for (int phase = 0; phase < 2; phase++) {
            if (other->next[phase] == unit) other->next[phase] = NULL;
            forget_in(&other->by_hand[phase], unit);
        }
    }
}
