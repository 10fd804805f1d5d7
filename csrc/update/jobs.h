/* jobs.h - input of an optimizer's loops, on the CPU and on GPUs.
 *
 * A loop knows adjacent elements and constants, and nothing of parameters.
 */
#ifndef ZS_JOBS_H
#define ZS_JOBS_H

#include "shim/tensor.h"
#include "update/compact.h"
#include "update/update.h"

typedef struct zs_device zs_device;

/* The update rule; Adam is also AdamW. */
typedef enum zs_rule { ZS_RULE_ADAM, ZS_RULE_SGD } zs_rule;

/* State tensors. Adam's moments, SGD's momentum_buffer (the first); for 8-bit codes their groups' exponents (codes.h);
 * the lower 8 of a bfloat16 parameter's 24 bits. */
enum {
    ZS_STATE_FIRST,
    ZS_STATE_SECOND,
    ZS_STATE_MAX, /* amsgrad */
    ZS_STATE_FIRST_SCALE,
    ZS_STATE_SECOND_SCALE,
    ZS_STATE_LOW,
    ZS_OPTIM_STATES
};

/* Storage of a run's moments. */
typedef enum zs_form {
    ZS_FORM_PLAIN, /* in the parameter's dtype */
    ZS_FORM_WIDE,  /* in float32, for any dtype of the parameter */
    ZS_FORM_CODED, /* in 8 bits */
} zs_form;

/* Values that a step reads on the device, so that a CUDA graph can repeat it: capturable steps only. */
typedef struct zs_live {
    const void *lr;           /* not NULL: the learning rate, of `lr_dtype`, instead of zs_hyper's */
    zs_dtype lr_dtype;        /* ZS_F32 or ZS_F64 */
    const float *grad_factor; /* not NULL: gradients are multiplied by it first */
    const float *found_inf;   /* not NULL, and it does not hold 0: the step is left out, and not counted */
    char *room;               /* of the device, ZS_CONSTANTS_BYTES for each member; each step overwrites it */
} zs_live;

/* Size of a step's constants on a device. */
enum { ZS_CONSTANTS_BYTES = 128 };

/* Constants of all elements of a run. */
typedef struct zs_constants {
    double step;          /* Adam: number of this step, from 1 on */
    bool first;           /* SGD: as in zs_member */
    uint64_t seed, round; /* as in zs_hyper */
    void *live;           /* capturable: where they are on the device, instead of those that follow */
    zs_adam_f32 adam_f32;
    zs_adam_f64 adam_f64;
    zs_sgd_f32 sgd_f32;
    zs_sgd_f64 sgd_f64;
} zs_constants;

/* Adjacent elements with equal constants; the pointers are borrowed for one step. */
typedef struct zs_run {
    void *param;
    const void *grad;
    float factor;                 /* (the host's memory) of gradients, see device/pending.h; else 1 */
    void *state[ZS_OPTIM_STATES]; /* NULL: has none */
    zs_form form;
    const zs_constants *constants;
    int64_t numel;
    uint64_t number; /* of the first element, as in zs_member */
    zs_dtype dtype;
    bool dithered; /* rounded stochastically: bfloat16 only */
    const zs_device *device;
} zs_run;

/* Size of a run's state tensor `state` for `numel` elements of the parameter that begin a group: numbers, bytes of a
 * number, and bytes of all; 0 if the run has no such tensor. */
static inline int64_t zs_run_state_numel(int state, int64_t numel)
{
    bool groups = state == ZS_STATE_FIRST_SCALE || state == ZS_STATE_SECOND_SCALE;
    return groups ? (numel + ZS_GROUP - 1) / ZS_GROUP : numel;
}
static inline size_t zs_run_state_itemsize(const zs_run *run, int state)
{
    if (state >= ZS_STATE_FIRST_SCALE || run->form == ZS_FORM_CODED) return 1;
    return run->form == ZS_FORM_WIDE ? sizeof(float) : zs_dtype_size(run->dtype);
}
static inline size_t zs_run_state_bytes(const zs_run *run, int state, int64_t numel)
{
    if (run->state[state] == NULL) return 0;
    return (size_t)zs_run_state_numel(state, numel) * zs_run_state_itemsize(run, state);
}

/* compact.h's name for the width of a run's parameter. */
static inline int zs_compact_kind(const zs_run *run)
{
    if (run->dtype == ZS_F32) return ZS_IN_F32;
    return run->state[ZS_STATE_LOW] != NULL ? ZS_IN_BF16_LOW : ZS_IN_BF16;
}

/* The first group of such a run. */
static inline zs_group zs_run_group(const zs_run *run)
{
    zs_group group = {.param = run->param, .grad = run->grad, .low = run->state[ZS_STATE_LOW]};
    group.first = run->state[ZS_STATE_FIRST];
    group.second = run->state[ZS_STATE_SECOND];
    group.scales[0] = run->state[ZS_STATE_FIRST_SCALE];
    group.scales[1] = run->state[ZS_STATE_SECOND_SCALE];
    group.number = run->number;
    group.round = run->constants->round;
    group.factor = run->factor;
    return group;
}

/* A run to update; on a device that queues, several of them, in the compute stream. */
typedef struct zs_update_job {
    zs_rule rule;
    bool full; /* as below */
    const zs_run *run;
    const zs_live *live; /* NULL, or the step is capturable */
    int64_t n_runs;      /* from `run` on, on a device that queues */
} zs_update_job;

/* Constants to make on a device, and counters of steps that hold the same number, to increment. */
typedef struct zs_constants_job {
    zs_rule rule;
    bool first; /* SGD: as in zs_member */
    const zs_hyper *hyper;
    const zs_live *live;
    void *out;          /* ZS_CONSTANTS_BYTES of the device */
    void *const *steps; /* [n_steps] on the device, of `step_dtype`: ZS_F32 or ZS_F64 */
    int64_t n_steps;
    zs_dtype step_dtype;
} zs_constants_job;

#endif
