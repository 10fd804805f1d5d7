/* context.h - what the units of one model share: whom to ask, and where memory comes from.
 *
 * A unit needs to know this much of its model's engine (engine/), which begins with it, and nothing of passes.
 * Threads: as for units (unit.h).
 */
#ifndef ZS_HOME_H
#define ZS_HOME_H

#include "comm/comm.h"
#include "device/arena.h"
#include "schedule/schedule.h"
#include "unit/offload.h"

/* Who takes part in what. */
typedef struct zs_ranks {
    zs_comm *all; /* they reduce */
    /* Those of them that one copy of the model is cut over, each group of them another copy (hybrid); `all` if there is
     * one. */
    zs_comm *shards;
    /* Those that gather from each other: `shards`, or where a copy is kept (secondary.h) those that share it. */
    zs_comm *shard_group;
    zs_comm *replica_group; /* those that have the same part of that copy; NULL if none is kept */
} zs_ranks;

enum { ZS_RANKS = 4 }; /* of them, at most */

/* Its transports, each once; returns how many. */
size_t zs_ranks_list(const zs_ranks *ranks, zs_comm *each[ZS_RANKS]);

/* What units ask of the engine that they belong to. */
typedef struct zs_context_calls {
    /* Sets the gradient hook on the unit's parameter `i`; cheap if it is there. */
    zs_status (*hook_param)(zs_unit *, int64_t i);
    /* Python is about to run within a backward: shows it the parameters as what they are. */
    void (*show)(zs_context *);
    /* More memory may be held than before: counts it for the peak. */
    void (*note_peak)(zs_context *);
} zs_context_calls;

/* A rank has not measured yet. */
#define ZS_NO_OFFER UINT64_MAX

struct zs_context {
    zs_schedule schedule;
    const zs_context_calls *calls;
    zs_ranks ranks;     /* counted references */
    zs_trail trail;     /* of its passes in the compute stream */
    zs_model model;     /* what messages call it */
    int n_shards;       /* that a copy of the model is cut into */
    int shard;          /* this rank's */
    int *shard_of;      /* [ranks.all->world] each rank's; owned */
    zs_arena *arena;    /* slots for full buffers; owned */
    zs_pool *grads;     /* memory of the units' gradients; owned */
    zs_offload offload; /* what of the units goes to a disk, with a counted reference; set before they are made */
    zs_fingerprint fingerprint; /* what the peers are told of the engine's history */
    /* (if met) What they were told in the last round of gradients, in which all were alike. */
    zs_fingerprint met_fingerprint;
    bool met;
    /* Bytes that this rank can spare for parameters that stay gathered, as the peers are told in rounds of
     * gradients; the least that all ranks have offered in a round of this backward. ZS_NO_OFFER: nothing. See
     * engine/keep_gathered.h. */
    uint64_t offer, least_offer;
    /* How gradients and parameters of units that are made from now on cross hosts. */
    zs_wire grads_code, params_code;
    double divided_by;   /* what sums of gradients are divided by, where units say nothing; 0: all ranks */
    int n_stale_classes; /* units whose parameters Python does not see as what they are */
    bool keeps_grads;    /* a script has kept gradients: their pages are not given back */
    bool reserved;       /* arena and buckets are as the units, calls and settings of now want them */
};

/* Where the units' memory lies. */
static inline const zs_device *zs_context_device(const zs_context *context)
{
    return context->ranks.all->device;
}

/* A hook begins: what it queues comes after what earlier ones did. */
static inline zs_status zs_context_follow(zs_context *context)
{
    return zs_device_follow(zs_context_device(context), &context->trail);
}

/* The units, or what decides about their memory, have changed: what is reserved is no longer right. */
static inline void zs_context_replan(zs_context *context)
{
    context->reserved = false;
}

#endif
