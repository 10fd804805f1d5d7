/* sample.c - have the shards changed otherwise than by a write that zshard knows?
 *
 * Other ranks' scripts may make the same write, or undo it later. A few elements of each flat show a change: swapping
 * in the weights of a moving average changes nearly all of them. The answer is used only once ranks have diverged: a
 * change that all ranks make is legitimate.
 See engine_inside.h. */

#include "base/fold.h"
#include "engine/engine_inside.h"

#include <string.h>

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
