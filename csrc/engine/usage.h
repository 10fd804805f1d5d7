/* usage.h - an engine's memory: what is held now, and the most that there has been. */
#ifndef ZS_USAGE_H
#define ZS_USAGE_H

#include "unit/context.h"

typedef struct zs_engine zs_engine;

/* Memory of one model on this rank, in bytes. */
typedef struct zs_engine_bytes {
    size_t shards, kept, grads, slots, buckets;
    size_t transport; /* the transport's own, for all models that use it */
    /* What of all these lies elsewhere, with the optimizers' state there: in files, in a GPU's host. */
    size_t offloaded;
    size_t total; /* of all but that */
} zs_engine_bytes;

/* Held now; the most that there has been of each since the engine was made. */
zs_engine_bytes zs_engine_memory(const zs_engine *engine);
zs_engine_bytes zs_engine_peak(zs_engine *engine);

/* More memory may be held than before: counts it for the peak. */
void zs_engine_note_peak(zs_engine *engine);

/* Sets the total of the others. */
void zs_usage_add_up(zs_engine_bytes *bytes);

/* Adds up one number of each transport, each transport once. */
size_t zs_usage_of_transports(const zs_ranks *ranks, size_t (*of)(const zs_comm *));

#endif
