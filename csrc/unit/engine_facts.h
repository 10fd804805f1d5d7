/* engine_facts.h - what an engine has, for the files that units are made of.
 *
 * The one idea: they need to know whom to ask and where memory comes from, and nothing of passes.
 */
#ifndef ZS_ENGINE_FACTS_H
#define ZS_ENGINE_FACTS_H

#include "comm/comm.h"
#include "device/arena.h"

typedef struct zs_unit zs_unit;
typedef struct zs_engine zs_engine;
typedef struct zs_bucket_pool zs_bucket_pool;
struct zs_offload;

/* Who takes part in what. */
typedef struct zs_ranks {
    zs_comm *all;    /* they reduce */
    zs_comm *shards; /* those of them that one copy of the model is cut over, each group of them another copy (hybrid);
                      * `all` if there is one */
    /* Those that gather from each other: `shards`, or where a copy is kept (kept.h) those that share it. */
    zs_comm *near;
    zs_comm *far; /* those that have the same part of that copy; NULL if none is kept */
} zs_ranks;

enum { ZS_RANKS = 4 }; /* of them, at most */

/* Who takes part: borrowed. */
const zs_ranks *zs_engine_ranks(const zs_engine *engine);
zs_comm *zs_engine_comm(const zs_engine *engine); /* all ranks */

/* Its transports, each once; returns how many. */
size_t zs_ranks_list(const zs_ranks *ranks, zs_comm *each[ZS_RANKS]);

/* Where its units' memory lies. */
const zs_device *zs_engine_device(const zs_engine *engine);

/* How many slices one copy of the model is cut into, which of them this rank has, and which each rank has [all->world]. */
int zs_engine_n_parts(const zs_engine *engine);
int zs_engine_part(const zs_engine *engine);
const int *zs_engine_part_of(const zs_engine *engine);

/* Memory: borrowed. */
zs_arena *zs_engine_arena(const zs_engine *engine);
zs_pool *zs_engine_grads(const zs_engine *engine);
zs_bucket_pool *zs_engine_buckets(const zs_engine *engine);

/* What of its units goes to a disk. Set it before they are made. */
struct zs_offload *zs_engine_offload(zs_engine *engine);

/* Did this rank abandon the backward that is being closed? */
bool zs_engine_gave_up(const zs_engine *engine);

/* The units, or what decides about their memory, have changed: what is reserved is no longer right. */
void zs_engine_replan(zs_engine *engine);

/* Sets the gradient hook on the unit's parameter `i`; cheap if it is there. */
zs_status zs_engine_hook_param(zs_unit *unit, int64_t i);

#endif
