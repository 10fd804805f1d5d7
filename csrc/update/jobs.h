/* jobs.h - what an optimizer's loops are given, on the CPU and on GPUs.
 *
 * A loop knows adjacent elements and constants, and nothing of parameters.
 */
#ifndef ZS_JOBS_H
#define ZS_JOBS_H

#include "shim/tensor.h"
#include "update/update.h"

typedef struct zs_device zs_device;

/* Which update rule; Adam is AdamW too. */
typedef enum zs_rule { ZS_RULE_ADAM, ZS_RULE_SGD } zs_rule;

/* Most state tensors an element has. Adam: exp_avg, exp_avg_sq, max_exp_avg_sq. SGD: momentum_buffer. */
enum { ZS_OPTIM_STATES = 3 };

/* What a step reads on the device when it runs there, so that a CUDA graph can repeat it: capturable steps only. */
typedef struct zs_live {
    const void *lr;           /* not NULL: the learning rate, of `lr_dtype`, instead of zs_hyper's */
    zs_dtype lr_dtype;        /* ZS_F32 or ZS_F64 */
    const float *grad_factor; /* not NULL: gradients are multiplied by it first */
    const float *found_inf;   /* not NULL, and it does not hold 0: the step is left out, and not counted */
    char *room;               /* of the device, ZS_CONSTANTS_BYTES for each member; written anew by each step */
} zs_live;

/* What the constants of a step take on a device. */
enum { ZS_CONSTANTS_BYTES = 128 };

/* What is the same for all elements of a run. */
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
    void *state[ZS_OPTIM_STATES];
    const zs_constants *constants;
    int64_t numel;
    uint64_t number; /* of the first element, as in zs_member */
    zs_dtype dtype;
    bool dithered; /* rounded stochastically: bfloat16 only */
    const zs_device *device;
} zs_run;

/* A run to update; on a device that queues: in the compute stream. */
typedef struct zs_update_job {
    zs_rule rule;
    bool full; /* as below */
    const zs_run *run;
    const zs_live *live; /* NULL, or the step is capturable */
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
