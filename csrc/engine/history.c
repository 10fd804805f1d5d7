/* history.c - see history.h. */
#include "engine/history.h"

#include "base/fold.h"
#include "engine/engine_inside.h"

static uint64_t fold_text(const char *text)
{
    uint64_t folded = 0;
    for (; *text != 0; text++)
        folded = zs_fold(folded, (unsigned char)*text);
    return folded;
}

void zs_engine_note_step(zs_engine *engine)
{
    zs_history *history = &engine->history;
    if (history->stepped == history->reductions) return;
    history->stepped = history->reductions;
    history->steps = zs_fold(history->steps, history->reductions + 1);
}

void zs_unit_note_load(zs_unit *unit, int64_t i, uint64_t content)
{
    zs_history *history = &zs_engine_of(unit)->history;
    zs_param *param = &unit->params[i];
    bool again = param->loaded_in == history->window;
    uint64_t now = zs_fold(fold_text(param->name), content);
    history->loads ^= (again ? param->loaded : 0) ^ now;
    history->n_loaded += !again;
    param->loaded = now;
    param->loaded_in = history->window;
}

void zs_engine_note_thaw(zs_engine *engine, const zs_unit *unit)
{
    engine->history.agreed = zs_fold(engine->history.agreed, fold_text(unit->name));
}

static uint64_t n_params(const zs_engine *engine)
{
    uint64_t n = 0;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        n += (uint64_t)zs_engine_unit(engine, i)->n_params;
    return n;
}

static uint64_t history_of(const zs_engine *engine)
{
    const zs_history *history = &engine->history;
    if (history->n_loaded == 0 && history->steps == 0) return history->agreed;
    bool all = history->n_loaded == n_params(engine);
    return zs_fold(zs_fold(history->agreed, all ? 0 : history->steps), history->loads);
}

void zs_history_tell(zs_engine *engine)
{
    uint64_t now = history_of(engine);
    if (engine->history.told == now) return;
    zs_comm *each[ZS_RANKS];
    size_t n = zs_ranks_list(&engine->home.ranks, each);
    for (size_t i = 0; i < n; i++) {
        zs_reader *reader = each[i] == engine->home.ranks.shard_group ? engine->reader : NULL;
        zs_comm_tell_history(each[i], reader, engine->history.told, now);
    }
    engine->history.told = now;
}

void zs_engine_tell_mishap(zs_engine *engine, const char *what)
{
    if (*what == 0 && !engine->mishap) return;
    engine->mishap = *what != 0;
    zs_comm *each[ZS_RANKS];
    size_t n = zs_ranks_list(&engine->home.ranks, each);
    for (size_t i = 0; i < n; i++)
        zs_comm_tell_mishap(each[i], what);
}

void zs_history_reduced(zs_engine *engine, bool good)
{
    zs_history *history = &engine->history;
    history->reductions++;
    if (!good) return;
    history->agreed = history->told;
    history->steps = history->loads = history->n_loaded = 0;
    history->window++;
    zs_engine_tell_mishap(engine, "");
}
