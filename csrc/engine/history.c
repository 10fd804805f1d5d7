/* history.c - see history.h. */
#include "engine/history.h"

#include "base/fold.h"
#include "engine/engine_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t fold_text(const char *text)
{
    uint64_t folded = 0;
    for (; *text != 0; text++)
        folded = zs_fold(folded, (unsigned char)*text);
    return folded;
}

/* --- events ----------------------------------------------------------------------------------------------------------------- */

void zs_engine_note_step(zs_engine *engine, const uint64_t settings[2])
{
    zs_history *history = &engine->history;
    history->steps++;
    for (int i = 0; i < 2; i++)
        history->settings[i] += zs_fold(settings[i], history->window);
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
    engine->history.agreed.thaws = zs_fold(engine->history.agreed.thaws, fold_text(unit->name));
}

/* Of a flat's parameters or their gradients, and no copy? */
static bool is_part_of(const zs_flat *flat, const zs_tensor *tensor)
{
    const zs_storage *each[] = {flat->shard, flat->full, flat->grads};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++)
        if (each[i] != NULL && zs_tensor_on_storage(tensor, each[i])) return true;
    return false;
}

void zs_unit_note_write(zs_unit *unit, int64_t i, const zs_tensor *written, const char *operation)
{
    zs_history *history = &zs_engine_of(unit)->history;
    const zs_param *param = &unit->params[i];
    if (!is_part_of(&unit->flats[param->flat], written)) return;
    history->writes |= UINT64_C(1) << (fold_text(operation) % 64);
    snprintf(history->written, sizeof history->written, "%.40s() on '%s'", operation, param->name);
}

/* --- what comes of them ------------------------------------------------------------------------------------------------------ */

static uint64_t n_params(const zs_engine *engine)
{
    uint64_t n = 0;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        n += (uint64_t)zs_engine_unit(engine, i)->n_params;
    return n;
}

static zs_past past_of(const zs_engine *engine)
{
    const zs_history *history = &engine->history;
    zs_past past = history->agreed;
    if (history->n_loaded > 0) past.loads = zs_fold(past.loads, history->loads);
    if (history->n_loaded > 0 && history->n_loaded == n_params(engine)) return past;
    past.steps += history->steps;
    if (history->steps > 0) memcpy(past.settings, history->settings, sizeof past.settings);
    if (history->writes != 0) past.writes = zs_fold(past.writes, history->writes);
    return past;
}

static void tell(const zs_engine *engine, zs_topic topic, const char *text)
{
    zs_comm *each[ZS_RANKS];
    size_t n = zs_ranks_list(&engine->home.ranks, each);
    for (size_t i = 0; i < n; i++)
        zs_comm_tell(each[i], topic, text);
}

void zs_history_tell(zs_engine *engine)
{
    zs_history *history = &engine->history;
    zs_past now = past_of(engine), *told = &engine->home.past;
    if (history->told_writes != history->writes) tell(engine, ZS_ON_WRITE, history->written);
    history->told_writes = history->writes;
    if (memcmp(told, &now, sizeof now) == 0) return;
    zs_comm *each[ZS_RANKS];
    size_t n = zs_ranks_list(&engine->home.ranks, each);
    for (size_t i = 0; i < n; i++) {
        zs_reader *reader = each[i] == engine->home.ranks.shard_group ? engine->reader : NULL;
        zs_comm_tell_past(each[i], reader, told, &now);
    }
    *told = now;
}

void zs_engine_tell_mishap(zs_engine *engine, const char *what)
{
    if (*what == 0 && !engine->mishap) return;
    engine->mishap = *what != 0;
    tell(engine, ZS_ON_MISHAP, what);
}

void zs_engine_tell_settings(zs_engine *engine, const char *lines)
{
    tell(engine, ZS_ON_SETTINGS, lines);
}

void zs_history_reduced(zs_engine *engine, bool good)
{
    zs_history *history = &engine->history;
    if (!good || engine->home.ranks.all->apart) return; /* a round may have said so in the middle */
    history->agreed = engine->home.past;
    history->steps = history->loads = history->n_loaded = 0;
    history->settings[0] = history->settings[1] = 0;
    history->writes &= ~history->told_writes; /* what was written since the peers were told is new to them */
    history->told_writes = 0;
    history->window++;
    zs_engine_tell_mishap(engine, "");
    if (*history->written != 0) tell(engine, ZS_ON_WRITE, "");
    *history->written = 0;
}

zs_status zs_engine_compare(zs_engine *engine)
{
    zs_comm *comm = engine->home.ranks.all;
    zs_history_tell(engine);
    zs_past *all = calloc((size_t)comm->world, sizeof *all);
    if (all == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' steps");
    zs_status status = zs_comm_exchange(comm, &engine->home.past, sizeof *all, all);
    for (int r = 1; r < comm->world; r++)
        ZS_THEN(status, zs_comm_check_pasts(comm, &(zs_pasts){&all[0], &all[r], r}));
    free(all);
    return status;
}
