/* engine_facts.c - see engine_facts.h. */
#include "unit/engine_facts.h"

#include "unit/engine.h"

const zs_device *zs_engine_device(const zs_engine *engine)
{
    return engine->ranks.all->device;
}

zs_comm *zs_engine_comm(const zs_engine *engine)
{
    return engine->ranks.all;
}

const zs_ranks *zs_engine_ranks(const zs_engine *engine)
{
    return &engine->ranks;
}

size_t zs_ranks_list(const zs_ranks *ranks, zs_comm *each[ZS_RANKS])
{
    zs_comm *all[ZS_RANKS] = {ranks->all, ranks->near, ranks->shards, ranks->far};
    size_t n = 0;
    for (size_t i = 0; i < ZS_RANKS; i++) {
        bool known = all[i] == NULL;
        for (size_t k = 0; k < n; k++)
            known |= each[k] == all[i];
        if (!known) each[n++] = all[i];
    }
    return n;
}

int zs_engine_n_parts(const zs_engine *engine)
{
    return engine->n_parts;
}

int zs_engine_part(const zs_engine *engine)
{
    return engine->part;
}

const int *zs_engine_part_of(const zs_engine *engine)
{
    return engine->part_of;
}

zs_arena *zs_engine_arena(const zs_engine *engine)
{
    return engine->arena;
}

zs_pool *zs_engine_grads(const zs_engine *engine)
{
    return engine->grads;
}

zs_offload *zs_engine_offload(zs_engine *engine)
{
    return &engine->offload;
}

zs_bucket_pool *zs_engine_buckets(const zs_engine *engine)
{
    return engine->buckets;
}

bool zs_engine_gave_up(const zs_engine *engine)
{
    return engine->gave_up;
}

void zs_engine_replan(zs_engine *engine)
{
    engine->reserved = false;
}

zs_status zs_engine_hook_param(zs_unit *unit, int64_t i)
{
    return unit->engine->hook_param(unit, i);
}
