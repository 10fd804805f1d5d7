/* optim_plan.h - the inside of a plan: optim.c, and optim_live.c for capturable steps.
 *
 * A plan keeps its findings next to its input, so that a step decides nothing.
 */
#ifndef ZS_OPTIM_PLAN_H
#define ZS_OPTIM_PLAN_H

#include "base/status.h"
#include "optim/optim.h"

typedef struct zs_counters zs_counters; /* which counters on a device are equal: counters.c */

/* A member's state at this step. */
typedef struct zs_view {
    zs_run run;          /* constants not set yet */
    double step;         /* number of this step */
    void *step_data;     /* the step tensor's element, NULL without one */
    zs_dtype step_dtype; /* ZS_F32 or ZS_F64 */
    zs_verdict verdict;
    uint32_t grad_version; /* torch's, which counts changes in place */
} zs_view;

struct zs_optim {
    zs_rule rule;
    bool compact;
    int64_t capacity; /* members there is room for */
    int64_t n_members;
    zs_member *members;      /* [capacity] owned, with their handles */
    zs_view *views;          /* [capacity] owned */
    zs_run *runs;            /* [capacity] owned: of host memory */
    zs_run *queued;          /* [capacity] owned: of devices that queue */
    int64_t *ends;           /* [capacity] owned: elements in runs[0..i] */
    zs_constants *constants; /* [capacity] owned; runs point into it */
    int64_t n_runs, n_queued;
    int64_t n_constants;
    zs_counters *shared_counts; /* which counters on a device are equal; owned; NULL: not known yet */
    bool *taken;                /* [capacity] owned: which members take part in this step */
    void **counters;            /* [capacity] owned: their step_data, of some of them */
    int64_t *slots;      /* [capacity + 1] owned: which constants kin (SGD: old and new momentum) have now; -1: none */
    zs_hyper hyper;      /* of this step, if it is capturable */
    const zs_live *live; /* of this step, borrowed; NULL: it is not capturable */
    const zs_device *live_device; /* where that step is; NULL: no member takes part */
    bool full;                    /* amsgrad or momentum at this step */
    bool dithered;                /* bfloat16 is rounded stochastically at this step */
};

/* --- capturable steps (optim_live.c) ------------------------------------------------------------------------------ */

/* Refuses members that the host would have to read or update, and finds equal counters. */
zs_status zs_live_check(zs_optim *plan);

/* The constants for this member and those that have counted the same steps: made on the device, before it is
 * updated. */
const zs_constants *zs_live_constants(zs_optim *plan, int64_t member);

/* Makes the constants that the runs will read, and counts their steps, on the device. */
zs_status zs_live_queue_constants(const zs_optim *plan);

/* A step that is not capturable: refuses to be captured, where a graph would repeat its number. */
zs_status zs_live_refuse_capture(const zs_optim *plan);

/* --- counters.c --------------------------------------------------------------------------------------------------- */

/* New: `n` members, which are related if their `key` is equal. */
zs_status zs_counters_new(int64_t n, const double *key, zs_counters **out);

/* Frees it; NULL allowed. */
void zs_counters_free(zs_counters *counters);

/* Before a step of the members in `taken` [n]: separates those that are related to others. */
void zs_counters_part(zs_counters *counters, const bool *taken);

/* The number of a member's set of equal counters, below n. */
int64_t zs_counters_of(const zs_counters *counters, int64_t member);

#endif
