/* plan.h - plans the shared memory of a step of a model: slots, buckets, and the transport's areas.
 *
 * The schedule decides which unit borrows what, and until when. So a plan runs the schedule on sizes instead of memory
 * (dry.h), through forwards and backwards of the modules in their order, until they need no more. A run in another
 * order borrows beyond the plan.
 *
 * A plan assumes that ranks are in step and that peers are slow: a bucket becomes idle when it is waited for, not
 * before.
 */
#ifndef ZS_PLAN_H
#define ZS_PLAN_H

#include "device/arena.h"
#include "engine/dry.h"

/* One event of a forward of the modules in their order. */
enum { ZS_CALL_ENTER = -1, ZS_CALL_EXIT = -2, ZS_CALL_READ = -3 };

typedef struct zs_call {
    zs_unit *unit; /* borrowed */
    /* Its module, or another one that unshards it, is entered or left; it is read in the forward that is running;
     * else which of its parameters is used here for the first time. */
    int64_t what;
} zs_call;

/* The input of a plan. */
typedef struct zs_plan_spec {
    zs_unit *const *units; /* [n_units] in the model's order */
    size_t n_units;
    const zs_call *calls; /* [n_calls] */
    size_t n_calls;
    int ahead[2];          /* see zs_schedule */
    bool stepped;          /* as if all units were stepped in backward */
    zs_dry_events *events; /* borrowed; gets the acts of one training step, after earlier ones; NULL: not kept */
} zs_plan_spec;

/* Memory that a step reserves; sizes only. */
typedef struct zs_plan {
    zs_arena *slots; /* owned */
    zs_arena *areas; /* owned: memory that the transport of all ranks uses at a time */
    size_t *buckets; /* [n_buckets] bytes asked for; owned */
    size_t n_buckets;
} zs_plan;

/* Fills `plan` for units of `context`. Free with zs_plan_free, also after a failure. */
zs_status zs_plan_make(const zs_context *context, const zs_plan_spec *spec, zs_plan *plan);

/* Frees a plan; a zeroed one is allowed. */
void zs_plan_free(zs_plan *plan);

#endif
