/* cuda_args.h - arguments of kernels: one struct by value each, read by C (cuda_kernels.c), nvcc and the tests' host
 * build.
 *
 * An argument block is a plain struct with a fixed layout that both sides assert, so a launch is one pointer and a
 * mismatch between host and device is an error of the build. Only fixed-width types: a bool or an enum may differ.
 */
#ifndef ZS_CUDA_ARGS_H
#define ZS_CUDA_ARGS_H

#include <assert.h>
#include <stdint.h>

#include "update/update.h"

enum {
    ZS_CUDA_BLOCK = 256,                   /* threads of a block, of all kernels */
    ZS_CUDA_LANES = 32,                    /* threads of a warp */
    ZS_CUDA_QUAD = 16,                     /* bytes of the widest access; of a pack in the widest array */
    ZS_CUDA_NORM_PACK = 8,                 /* elements that a thread of a norm takes at a time, of any dtype */
    ZS_CUDA_SOURCES = 128,                 /* addresses that a sum can be given one by one */
    ZS_CUDA_SPACED = 64 * ZS_CUDA_SOURCES, /* sources that it can be given at equal distances */
    ZS_CUDA_STATES = 6,                    /* state tensors, as ZS_STATE_FIRST to ZS_STATE_LOW */
    ZS_CUDA_PIECES = 46,                   /* pieces of runs that an update can be given: the most that fit */
    ZS_CUDA_STEPS = 256,                   /* step counters that a kernel can be given */
};

/* Division of `numel` elements: `head` of them one by one, then `packs` packs that are aligned in every array, then the
 * rest one by one. */
typedef struct zs_cuda_cut {
    int64_t numel, head, packs;
} zs_cuda_cut;

/* dst[i] = sum_r (src_r[i] + prev) * scale, as zs_sum of device.h. */
typedef struct zs_cuda_sum_args {
    zs_cuda_cut cut;
    void *dst;
    const void *base; /* not NULL: source r lies at base + r * stride */
    int64_t stride;   /* bytes */
    double scale;
    int32_t world;
    uint32_t accumulate;
    union {
        const void *src[ZS_CUDA_SOURCES]; /* base NULL: where the sources lie; NULL counts as zeros */
        uint64_t absent[ZS_CUDA_SOURCES]; /* otherwise: a bit for each source that counts as zeros */
    };
} zs_cuda_sum_args;

/* dst[i] = src[i], or dst[i] + src[i]. */
typedef struct zs_cuda_cast_args {
    zs_cuda_cut cut;
    void *dst;
    const void *src;
    uint32_t add;
    uint32_t unused;
} zs_cuda_cast_args;

/* x[i] *= factor. */
typedef struct zs_cuda_scale_args {
    zs_cuda_cut cut;
    void *x;
    const float *device_factor; /* not NULL: the factor is there */
    double factor;
} zs_cuda_scale_args;

/* A norm's function of |x|, and its reduction. */
enum { ZS_CUDA_ABS, ZS_CUDA_SQUARE, ZS_CUDA_MAX };

/* partial[t] = what thread t found, for every thread of the grid. */
typedef struct zs_cuda_norm_args {
    const void *x;
    double *partial;
    int64_t numel;
    uint32_t kind;
    uint32_t aligned; /* x lies on a multiple of ZS_CUDA_QUAD */
} zs_cuda_norm_args;

/* out[t] = in[t] + in[t + n_out] + in[t + 2 * n_out] ... (or their maximum), t < n_out. */
typedef struct zs_cuda_fold_args {
    const double *in;
    double *out;
    int64_t n_in, n_out;
    uint32_t kind;
    uint32_t unused;
} zs_cuda_fold_args;

/* *flag = 1 if a[i] != b[i] for any byte; otherwise it is left alone. Here a pack is ZS_CUDA_QUAD bytes. */
typedef struct zs_cuda_differs_args {
    zs_cuda_cut cut;
    const void *a, *b;
    uint32_t *flag;
} zs_cuda_differs_args;

/* codes[i] = zs_wire_encode(values[i], &lost[i]) */
typedef struct zs_cuda_encode_args {
    zs_cuda_cut cut;
    const float *values;
    float *lost;
    void *codes;
} zs_cuda_encode_args;

/* The constants of a step in device memory, for each precision: what `rule` of zs_cuda_update_args is on the host. */
typedef struct zs_cuda_constants {
    union {
        zs_adam_f64 adam;
        zs_sgd_f64 sgd;
    } f64;
    union {
        zs_adam_f32 adam;
        zs_sgd_f32 sgd;
    } f32;
    uint64_t unused;
} zs_cuda_constants;

/* Makes the constants of a step from numbers that lie on the device, and counts the step. */
typedef struct zs_cuda_constants_args {
    zs_cuda_constants *out; /* NULL: only counts */
    const void *lr;         /* not NULL: the learning rate, instead of hyper's */
    const float *found_inf; /* not NULL, and it holds anything but 0: there is no step to count */
    double hyper[7];        /* lr, weight_decay, beta1, beta2, eps, momentum, dampening */
    uint32_t decoupled, amsgrad, nesterov, maximize;
    uint32_t sgd;       /* the rule: SGD, not Adam */
    uint32_t first;     /* SGD: as in zs_sgd_of */
    uint32_t lr_wide;   /* float64, not float32 */
    uint32_t step_wide; /* float64, not float32 */
    int32_t n_steps;
    uint32_t unused;
    void *step[ZS_CUDA_STEPS]; /* steps done, the same number in each; all are counted up */
} zs_cuda_constants_args;

/* Adjacent elements to update. */
typedef struct zs_cuda_piece {
    void *param;
    const void *grad;
    void *state[ZS_CUDA_STATES]; /* as of zs_run */
    uint32_t numel, head, packs; /* as in zs_cuda_cut; by groups, they are the packs */
    uint32_t number;             /* lower half of the first element's number; the upper one is the same for all */
} zs_cuda_piece;

/* One step of an update rule over pieces of equal kind, with equal constants. */
typedef struct zs_cuda_update_args {
    const float *grad_factor;      /* NULL: 1; else gradients are multiplied by it first */
    const float *found_inf;        /* NULL: 0; if it holds anything else, nothing is done */
    const zs_cuda_constants *live; /* not NULL: the constants are there, and not in `rule` (zs_live_... kernels) */
    uint64_t round;                /* by groups: of zs_hyper */
    zs_dither dither;
    uint32_t kind;  /* by groups: ZS_IN_F32, ... */
    uint32_t coded; /* by groups */
    uint32_t n_pieces;
    union {
        zs_adam_f32 adam_f32; /* by groups: from zs_adam_folded_f32 */
        zs_adam_f64 adam_f64;
        zs_sgd_f32 sgd_f32;
        zs_sgd_f64 sgd_f64;
    } rule;
    uint32_t begin[ZS_CUDA_PIECES]; /* the first block of each piece */
    zs_cuda_piece piece[ZS_CUDA_PIECES];
} zs_cuda_update_args;

/* No compiler may see another layout. */
static_assert(sizeof(zs_cuda_cut) == 24, "layout");
static_assert(sizeof(zs_cuda_sum_args) == 64 + 8 * ZS_CUDA_SOURCES, "layout");
static_assert(sizeof(zs_cuda_cast_args) == 48, "layout");
static_assert(sizeof(zs_cuda_scale_args) == 48, "layout");
static_assert(sizeof(zs_cuda_norm_args) == 32, "layout");
static_assert(sizeof(zs_cuda_fold_args) == 40, "layout");
static_assert(sizeof(zs_cuda_differs_args) == 48, "layout");
static_assert(sizeof(zs_cuda_encode_args) == 48, "layout");
static_assert(sizeof(zs_adam_f64) == 80 && sizeof(zs_sgd_f64) == 56, "layout");
static_assert(sizeof(zs_cuda_piece) == 80 && sizeof(zs_cuda_update_args) == 136 + 84 * ZS_CUDA_PIECES, "layout");
static_assert(sizeof(zs_cuda_update_args) <= 4096, "what a kernel may be given");
static_assert(sizeof(zs_cuda_constants) == 128 && sizeof(zs_adam_f32) == 40, "layout");
static_assert(sizeof(zs_cuda_constants_args) == 120 + 8 * ZS_CUDA_STEPS, "layout");

#endif
