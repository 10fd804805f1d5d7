/* context.h - state shared by the units of one model: transports, memory, settings.
 *
 * This is all that a unit needs of its model's engine (engine/), which begins with it; a unit knows nothing of passes.
 * Threads: as for units (unit.h).
 */
#ifndef ZS_CONTEXT_H
#define ZS_CONTEXT_H

#include "comm/comm.h"
#include "device/arena.h"
#include "schedule/schedule.h"
#include "unit/offload.h"

/* The transports of a model's groups of ranks. */
typedef struct zs_ranks {
    zs_comm *all; /* all ranks: these reduce gradients */
    /* The ranks over which one copy of the model is sharded; hybrid strategies have several copies. `all` if there is
     * one. */
    zs_comm *shards;
    /* The ranks that gather from each other: `shards`, or with secondary shards (secondary.c) the ranks of one such
     * copy. */
    zs_comm *shard_group;
    zs_comm *replica_group; /* the ranks with the same secondary shard; NULL without them */
} zs_ranks;

enum { ZS_RANKS = 4 }; /* of them, at most */

/* The transports, each once; returns their number. */
size_t zs_ranks_list(const zs_ranks *ranks, zs_comm *each[ZS_RANKS]);

/* The engine's functions that its units call. */
typedef struct zs_context_calls {
    /* Sets the gradient hook on the unit's parameter `i`; cheap if it is there. */
    zs_status (*hook_param)(zs_unit *, int64_t i);
    /* Python is about to run within a backward: updates the parameters' classes. */
    void (*show)(zs_context *);
    /* Updates the memory peak; call after memory may have grown. */
    void (*note_peak)(zs_context *);
} zs_context_calls;

/* A micro-batch is begun by the script, and is done when its one backward has ended; a failed one is NONE. */
typedef enum zs_leaf_state { ZS_LEAF_NONE, ZS_LEAF_BEGUN, ZS_LEAF_DONE } zs_leaf_state;

struct zs_context {
    zs_schedule schedule;
    const zs_context_calls *calls;
    zs_ranks ranks;             /* counted references */
    zs_trail trail;             /* of its passes in the compute stream */
    zs_model model;             /* its name in messages */
    int n_shards;               /* that a copy of the model is cut into */
    int shard;                  /* this rank's shard */
    int *shard_of;              /* [ranks.all->world] each rank's shard; owned */
    zs_arena *arena;            /* slots for full buffers; owned */
    zs_offload offload;         /* what units offload, with a counted reference; set before units are created */
    zs_fingerprint fingerprint; /* of the engine's history, as published to the peers */
    /* (if met) The fingerprint in the last round of gradients, in which all ranks' were equal. */
    zs_fingerprint met_fingerprint;
    bool met;
    /* Codes between hosts for gradients and parameters of units created from now on. */
    zs_wire grads_code, params_code;
    struct zs_tree *tree; /* the order of adding gradients; owned; NULL: by rank */
    int pass;             /* (with a tree) backwards of this step so far */
    zs_leaf_state leaf;   /* (with a tree) of the current micro-batch */
    double divided_by;    /* the default divisor of sums of gradients; 0: the number of ranks */
    int n_stale_classes;  /* units whose parameters have the wrong Python class */
    bool captured;        /* see zs_context_captured */
    bool stepping;        /* in a backward: an optimizer steps a unit's shards */
    bool reserved;        /* arena and buckets fit the current units, calls and settings */
};

/* The device of the units' memory. */
static inline const zs_device *zs_context_device(const zs_context *context)
{
    return context->ranks.all->device;
}

/* Is a pass of the model in a CUDA graph, or being captured? Its memory must stay in place: the graph has the
 * addresses. */
bool zs_context_captured(zs_context *context);

/* A hook begins: orders its work after earlier hooks'. */
static inline zs_status zs_context_follow(zs_context *context)
{
    return zs_device_follow(zs_context_device(context), &context->trail);
}

/* Invalidates the reservation, after a change of units or settings. */
static inline void zs_context_replan(zs_context *context)
{
    context->reserved = false;
}

#endif
