/* usage.h - an engine's memory: now, and at its peak. */
#ifndef ZS_USAGE_H
#define ZS_USAGE_H

#include "unit/context.h"

typedef struct zs_engine zs_engine;

/* Memory of one model on this rank, in bytes. */
typedef struct zs_engine_bytes {
    size_t shards, kept, grads, slots, buckets;
    size_t transport; /* the transport's own, for all models that use it */
    /* Bytes offloaded, to files or a GPU's host, including the optimizers' state there. */
    size_t offloaded;
    size_t total; /* of all that is not offloaded */
} zs_engine_bytes;

/* Memory now; the peak of each kind since the engine was created. */
zs_engine_bytes zs_engine_memory(const zs_engine *engine);
zs_engine_bytes zs_engine_peak(zs_engine *engine);

/* Updates the peak; call after memory may have grown. */
void zs_engine_note_peak(zs_engine *engine);

/* The last values in a trace: slots and buckets in use, and the bytes of idle ones. */
typedef struct zs_engine_shown {
    size_t in_trace; /* the number of the trace; 0: none */
    zs_engine_bytes parts;
    size_t idle, pinned; /* of the slots: those of units that were unsharded by hand */
} zs_engine_shown;

/* Writes the current memory to the running trace, if any; this asks each unit. */
void zs_engine_trace_memory(zs_engine *engine);

/* The same after this unit was gathered, resharded or reduced, which asks this one. */
void zs_engine_trace_use(zs_unit *unit);

/* Sets `total` from the other fields. */
void zs_usage_add_up(zs_engine_bytes *bytes);

/* The sum of one number over the transports, each counted once. */
size_t zs_usage_of_transports(const zs_ranks *ranks, size_t (*of)(const zs_comm *));

#endif
