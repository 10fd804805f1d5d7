/* keep_gathered.c - see keep_gathered.h. */
#include "engine/keep_gathered.h"

#include "engine/engine_inside.h"

/* The unit that stays in any case, as the schedule has it (forward.c): it takes no more memory than a forward does. */
static const zs_unit *stays_anyway(const zs_engine *engine)
{
    if (engine->keep_gathered.most == SIZE_MAX) return NULL; /* nothing is counted */
    const zs_unit *outermost = engine->n_calls > 0 ? engine->calls[0].unit : NULL;
    if (outermost == NULL || !outermost->record.is.empty) return outermost;
    for (size_t c = engine->n_calls; c-- > 0;)
        if (!engine->calls[c].unit->record.is.empty) return engine->calls[c].unit;
    return NULL;
}

static bool may_stay(const zs_unit *unit)
{
    const zs_traits *is = &unit->record.is;
    return !is->replicated && !is->empty && !is->stays && !unit->reshard_by_hand;
}

void zs_keep_gathered_choose(zs_engine *engine)
{
    zs_keep_gathered *keep_gathered = &engine->keep_gathered;
    const zs_unit *anyway = stays_anyway(engine);
    size_t before = keep_gathered->bytes;
    keep_gathered->bytes = 0;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        zs_record_set_kept(&zs_engine_unit(engine, i)->record, false);
    for (size_t c = engine->n_calls; c-- > 0 && engine->context.schedule.gathers_cost;) {
        zs_unit *unit = engine->calls[c].unit;
        size_t bytes = zs_unit_full_bytes(unit);
        if (unit == anyway || !may_stay(unit) || unit->record.is.kept ||
            bytes > keep_gathered->most - keep_gathered->bytes)
            continue;
        zs_record_set_kept(&unit->record, true);
        keep_gathered->bytes += bytes;
    }
    if (before > 0 || keep_gathered->bytes > 0) zs_context_replan(&engine->context);
}

void zs_keep_gathered_set(zs_engine *engine, size_t most)
{
    engine->keep_gathered.most = most;
    zs_keep_gathered_choose(engine);
}

zs_keep_gathered zs_keep_gathered_of(const zs_engine *engine)
{
    return engine->keep_gathered;
}
