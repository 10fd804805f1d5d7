/* spare.c - see spare.h. */
#include "engine/spare.h"

#include "engine/engine_inside.h"

/* The unit that stays in any case, as the schedule has it (forward.c): it takes no more memory than a forward does. */
static const zs_unit *stays_anyway(const zs_engine *engine)
{
    if (engine->spare.most == SIZE_MAX) return NULL; /* nothing is counted */
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

void zs_spare_choose(zs_engine *engine)
{
    zs_spare *spare = &engine->spare;
    const zs_unit *anyway = stays_anyway(engine);
    size_t before = spare->bytes;
    spare->bytes = 0;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        zs_record_set_kept(&zs_engine_unit(engine, i)->record, false);
    for (size_t c = engine->n_calls; c-- > 0 && engine->home.schedule.gathers_cost;) {
        zs_unit *unit = engine->calls[c].unit;
        size_t bytes = zs_unit_full_bytes(unit);
        if (unit == anyway || !may_stay(unit) || unit->record.is.kept || bytes > spare->most - spare->bytes) continue;
        zs_record_set_kept(&unit->record, true);
        spare->bytes += bytes;
    }
    if (before > 0 || spare->bytes > 0) zs_home_replan(&engine->home);
}

void zs_spare_set(zs_engine *engine, size_t most, bool measured)
{
    engine->spare.most = measured ? 0 : most;
    engine->spare.measured = measured;
    engine->spare.decided = false;
    engine->home.offer = engine->home.least_offer = ZS_NO_OFFER;
    zs_spare_choose(engine);
}

zs_spare zs_spare_of(const zs_engine *engine)
{
    return engine->spare;
}

void zs_spare_offer(zs_engine *engine, size_t bytes)
{
    const zs_spare *spare = &engine->spare;
    if (!spare->measured) return;
    engine->home.offer = spare->decided && bytes > spare->most ? spare->most : bytes;
}

static void decide(zs_engine *engine, size_t most)
{
    engine->spare.most = most;
    engine->spare.decided = true;
    zs_spare_choose(engine);
}

bool zs_spare_give_up(zs_engine *engine)
{
    if (!engine->spare.measured || engine->spare.bytes == 0) return false;
    decide(engine, 0);
    engine->home.offer = 0;
    return true;
}

void zs_spare_settle(zs_engine *engine, bool met)
{
    const zs_spare *spare = &engine->spare;
    uint64_t least = engine->home.least_offer;
    engine->home.least_offer = ZS_NO_OFFER;
    if (!met || !spare->measured || least == ZS_NO_OFFER) return;
    engine->home.offer = ZS_NO_OFFER;
    if (!spare->decided || least < spare->most) decide(engine, (size_t)least);
}
