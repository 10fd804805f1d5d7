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

/* --- events ------------------------------------------------------------------------------------------------------- */

void zs_engine_note_step(zs_engine *engine, uint64_t settings, uint64_t counts)
{
    zs_history *history = &engine->history;
    history->steps++;
    history->in_pass = engine->reading;
    history->counts = counts;
    history->settings += zs_fold(settings, history->window);
}

static uint64_t n_params(const zs_engine *engine)
{
    uint64_t n = 0;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        n += (uint64_t)zs_engine_unit(engine, i)->n_params;
    return n;
}

/* Earlier changes to parameters no longer count. */
static void complete_load(zs_history *history)
{
    history->full_load = zs_fold(1, history->loads);
    history->loads = history->n_loaded = 0;
    history->load_number++;
    history->steps = history->settings = history->writes = history->told_writes = 0;
    history->draws = history->told_draws = 0;
    history->grads = history->told_grads = 0; /* the gradients of replaced parameters */
}

static bool is_replicated(const zs_engine *engine)
{
    bool all = true;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        all &= zs_engine_unit(engine, i)->record.is.replicated;
    return all;
}

/* If every rank has the full model, a script may load on one rank and broadcast, as under DDP: then a load matters only
 * as the repair of a divergence. */
void zs_unit_note_load(zs_unit *unit, int64_t i, uint64_t content)
{
    zs_engine *engine = zs_engine_of(unit);
    zs_history *history = &engine->history;
    if (unit->record.is.replicated && is_replicated(engine) && !engine->context.ranks.all->apart) return;
    zs_param *param = &unit->params[i];
    bool again = param->loaded_in == history->load_number;
    uint64_t now = zs_fold(fold_text(param->name), content);
    history->loads ^= (again ? param->loaded : 0) ^ now;
    history->n_loaded += !again;
    param->loaded = now;
    param->loaded_in = history->load_number;
    if (history->n_loaded == n_params(engine)) complete_load(history);
}

void zs_engine_note_frozen(zs_engine *engine)
{
    uint64_t digest = 0;
    for (size_t u = 0; u < zs_engine_n_units(engine); u++) {
        const zs_unit *unit = zs_engine_unit(engine, u);
        for (int64_t i = 0; i < unit->n_params; i++) {
            const zs_param *param = &unit->params[i];
            bool trains = !param->removed && zs_tensor_alive(param->tensor) && zs_tensor_requires_grad(param->tensor);
            if (!trains) digest += zs_fold(u + 1, (uint64_t)i);
        }
    }
    engine->history.agreed.frozen = digest;
}

static uint64_t bit_of(const char *operation)
{
    return UINT64_C(1) << (fold_text(operation) % 64);
}

static bool is_gradient(const zs_flat *flat, const zs_tensor *tensor)
{
    return flat->grads != NULL && zs_tensor_on_storage(tensor, flat->grads);
}

bool zs_unit_is_slice(const zs_unit *unit, int64_t i, const zs_tensor *tensor)
{
    const zs_flat *flat = &unit->flats[unit->params[i].flat];
    return !is_gradient(flat, tensor) && zs_tensor_on_storage(tensor, flat->shard != NULL ? flat->shard : flat->full);
}

void zs_unit_note_write(zs_unit *unit, int64_t i, const zs_tensor *written, const char *operation)
{
    zs_history *history = &zs_engine_of(unit)->history;
    const zs_param *param = &unit->params[i];
    const zs_flat *flat = &unit->flats[param->flat];
    if (is_gradient(flat, written)) {
        history->grads |= bit_of(operation);
        snprintf(history->written, sizeof history->written, "%.40s on the gradient of '%s'", operation, param->name);
    } else if (zs_unit_is_slice(unit, i, written)) {
        history->writes |= bit_of(operation);
        snprintf(history->written, sizeof history->written, "%.40s on '%s'", operation, param->name);
    } else {
        return; /* it is a copy */
    }
}

void zs_unit_note_draw(zs_unit *unit, int64_t i, uint64_t drawn)
{
    zs_engine_of(unit)->history.draws += zs_fold(fold_text(unit->params[i].name), drawn);
}

/* --- what comes of them --------------------------------------------------------------------------------------------
 */

static zs_fingerprint fingerprint_of(const zs_engine *engine)
{
    const zs_history *history = &engine->history;
    zs_fingerprint fingerprint = history->agreed;
    fingerprint.steps += history->steps;
    if (history->steps > 0) {
        fingerprint.settings = history->settings;
        fingerprint.counts = history->counts;
    }
    if (history->full_load != 0 || history->n_loaded > 0)
        fingerprint.loads = zs_fold(zs_fold(fingerprint.loads, history->full_load), history->loads);
    if (history->writes != 0) fingerprint.writes = zs_fold(fingerprint.writes, history->writes);
    if (history->draws != 0) fingerprint.draws = zs_fold(fingerprint.draws, history->draws);
    if (history->grads != 0) fingerprint.grads = zs_fold(fingerprint.grads, history->grads);
    return fingerprint;
}

static void publish(const zs_engine *engine, zs_topic topic, const char *text)
{
    zs_comm *each[ZS_RANKS];
    size_t n = zs_ranks_list(&engine->context.ranks, each);
    for (size_t i = 0; i < n; i++)
        if (*text != 0 || *zs_diagnostics_on(&each[i]->texts, topic) != 0) zs_comm_publish(each[i], topic, text);
}

void zs_history_publish(zs_engine *engine)
{
    zs_history *history = &engine->history;
    zs_fingerprint now = fingerprint_of(engine), *published = &engine->context.fingerprint;
    publish(engine, ZS_ON_WRITE, history->written); /* the last text may be another model's */
    history->told_writes = history->writes;
    history->told_grads = history->grads;
    history->told_draws = history->draws;
    if (memcmp(published, &now, sizeof now) == 0) return;
    zs_comm *each[ZS_RANKS];
    size_t n = zs_ranks_list(&engine->context.ranks, each);
    for (size_t i = 0; i < n; i++) {
        zs_reader *reader = each[i] == engine->context.ranks.shard_group ? engine->reader : NULL;
        zs_comm_publish_fingerprint(each[i], reader, published, &now);
    }
    *published = now;
}

void zs_engine_publish_failure(zs_engine *engine, const char *what)
{
    publish(engine, ZS_ON_FAILURE, what);
}

void zs_engine_publish_settings(zs_engine *engine, const char *lines)
{
    publish(engine, ZS_ON_SETTINGS, lines);
}

/* Drops the history that all ranks had in this backward's rounds, and keeps later events, of users' hooks. */
static void agree(zs_engine *engine)
{
    zs_history *history = &engine->history;
    const zs_fingerprint *met = &engine->context.met_fingerprint;
    uint64_t steps = met->steps - history->agreed.steps;
    history->steps -= steps;
    history->settings -= steps > 0 ? met->settings : 0;
    history->full_load = history->loads = history->n_loaded = 0;
    history->load_number++;
    history->writes &= ~history->told_writes; /* writes since the last publication are new to the peers */
    history->grads &= ~history->told_grads;
    history->draws -= history->told_draws;
    history->told_writes = history->told_grads = history->told_draws = 0;
    history->agreed = *met;
    history->window++;
}

void zs_history_reduced(zs_engine *engine, bool good)
{
    engine->history.in_pass = false;
    if (!good || !engine->context.met) return; /* no communication in no_sync() */
    engine->context.met = false;
    agree(engine);
    *engine->history.written = 0;
    publish(engine, ZS_ON_WRITE, "");
    zs_engine_publish_failure(engine, ""); /* of any model: all ranks have met since */
}

zs_status zs_engine_compare(zs_engine *engine)
{
    zs_comm *comm = engine->context.ranks.all;
    zs_history_publish(engine);
    zs_fingerprint *all = calloc((size_t)comm->world, sizeof *all);
    if (all == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' steps");
    zs_status status = zs_comm_exchange(comm, &engine->context.fingerprint, sizeof *all, all);
    ZS_THEN(status, zs_comm_compare_fingerprints(comm, all));
    free(all);
    return status;
}

/* --- samples of the shards ---------------------------------------------------------------------------------------- */

/* Have the shards changed otherwise than by a write that zshard knows? A few elements of each flat show it: swapping in
 * the weights of a moving average changes nearly all. The answer is used only once ranks have diverged: a change that
 * all ranks make is legitimate. */
enum { SAMPLES = 4 }; /* of each flat */

static uint64_t of_flat(const zs_flat *flat, uint64_t so_far)
{
    const char *shard = zs_flat_home(flat);
    uint64_t value = 0;
    size_t bytes = (size_t)flat->layout.shard_numel * flat->layout.itemsize;
    if (shard == NULL || bytes < sizeof value) return so_far;
    for (size_t k = 0; k < SAMPLES; k++) {
        memcpy(&value, shard + (bytes - sizeof value) * k / (SAMPLES - 1), sizeof value);
        so_far = zs_fold(so_far, value);
    }
    return so_far;
}

static uint64_t of_engine(const zs_engine *engine)
{
    uint64_t sample = 0;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        const zs_unit *unit = zs_engine_unit(engine, i);
        for (int f = 0; f < unit->n_flats && !unit->record.is.replicated && !unit->offloads.params; f++)
            sample = of_flat(&unit->flats[f], sample);
    }
    return sample;
}

static bool can_look(const zs_engine *engine)
{
    const zs_comm *shard_group = engine->context.ranks.shard_group;
    return engine->context.ranks.all->world > 1 && !zs_comm_is_dry(shard_group) &&
           zs_context_device(&engine->context)->where.type == ZS_ON_CPU;
}

void zs_sample_written(zs_engine *engine)
{
    engine->sampled = can_look(engine);
    if (engine->sampled) engine->sample = of_engine(engine);
}

void zs_sample_take(zs_engine *engine, zs_reading *reading)
{
    if (!can_look(engine)) return;
    uint64_t sample = of_engine(engine);
    if (!engine->sampled) engine->sample = sample; /* nothing has been written yet */
    engine->sampled = true;
    reading->changed = sample != engine->sample;
}

void zs_sample_forget(zs_engine *engine)
{
    engine->sampled = false;
}
