/* cuda_kernels.h - device.h's work and that of jobs.h on a GPU: each function queues kernels on a stream and returns.
 *
 * The same structs and the same bits as on the CPU, except that NaNs may have another payload, and that norms are
 * summed in another (fixed) order. Nothing here allocates, waits or reads a result; all memory is the caller's and must
 * stay until the stream has come past.
 *
 * For all: `stream` is a CUstream (NULL: the legacy default stream) of the context that is current on this thread
 * (zs_cuda_enter); pointers are device memory or host memory that the device can reach. Any thread. ZS_ERR_CUDA where
 * the driver refuses; where one call is several launches, the first may be under way then. With ZSHARD_SYNC=1 in the
 * environment each waits for its kernel, so that a failure on the device is reported where it was queued.
 */
#ifndef ZS_CUDA_KERNELS_H
#define ZS_CUDA_KERNELS_H

#include "base/wire.h"
#include "device/device.h"
#include "update/jobs.h"

/* Loads the kernels and makes all of them resident on this thread's device, once per process; else the first launch
 * does. Call it before any stream waits for a peer: loading may wait for the device. ZS_ERR_CUDA where this build
 * has no kernels, or none for this GPU or driver; the message names which. */
zs_status zs_cuda_kernels_load(void);

/* zs_device_sum. Up to 128 sources lie anywhere; more, up to 8192, must lie at equal distances (ZS_ERR_UNSUPPORTED).
 * NULL counts as zeros. Sources may be mappings of other processes' and devices' memory. */
zs_status zs_cuda_sum(const zs_sum *sum, void *stream);

/* zs_device_cast; with `add`, dst += src as torch adds: in the wider of the two precisions, rounded once. dst and
 * src are the same range or do not overlap. */
zs_status zs_cuda_cast(const zs_cast *cast, bool add, void *stream);

/* zs_device_scale. If `device_factor` is not NULL, the factor is its value when the kernel runs. */
zs_status zs_cuda_scale(const zs_numbers *x, double factor, const float *device_factor, void *stream);

/* zs_wire_encode (base/wire.h) for `numel` numbers. */
zs_status zs_cuda_encode(const float *values, float *lost, int64_t numel, void *codes, void *stream);

/* Doubles that a norm needs for its partial sums. */
enum { ZS_CUDA_NORM_SCRATCH = ZS_NORM_ROOM };

/* A norm to take. */
typedef struct zs_cuda_norm_job {
    zs_numbers x;
    double p;        /* 1, 2 or infinity */
    double *result;  /* gets the sum of |x|^p, or the maximum of |x| */
    double *scratch; /* ZS_CUDA_NORM_SCRATCH doubles; may be used again by the next job on the stream */
} zs_cuda_norm_job;

/* zs_device_norm: the sum of |x|^p in double, with no root taken. Its bits depend on x alone, not on the GPU.
 * ZS_ERR_VALUE for another p. */
zs_status zs_cuda_norm(const zs_cuda_norm_job *job, void *stream);

/* *result = values[0] + values[1] + ..., or for p = infinity their maximum: what joins the norms of several arrays. */
zs_status zs_cuda_norm_join(const double *values, int64_t n, double p, double *result, void *stream);

/* Sets *flag to 1 where the ranges differ, and leaves it alone where they do not. */
zs_status zs_cuda_differs(const void *a, const void *b, size_t bytes, uint32_t *flag, void *stream);

/* One optimizer step over runs, in any order; they do not overlap. */
typedef struct zs_cuda_update_job {
    zs_rule rule;
    bool full; /* Adam with amsgrad, SGD with momentum */
    const zs_run *runs;
    int64_t n_runs;
    const float *grad_factor; /* not NULL: gradients are multiplied by it first, in the precision of the update */
    const float *found_inf;   /* not NULL: nothing is done if it does not hold 0 */
    bool live; /* runs' constants are at their `live`, made by zs_cuda_constants_make; not for dithered runs */
} zs_cuda_update_job;

/* Updates the runs with the bits of zs_run_loop_for's loops on a machine that has FMA. One launch takes 46 runs of
 * equal kind and constants. */
zs_status zs_cuda_update(const zs_cuda_update_job *job, void *stream);

/* Makes the constants of a step where they can be read by updates that follow on the stream, with the host's bits,
 * and counts the step. */
zs_status zs_cuda_constants_make(const zs_constants_job *job, void *stream);

#endif
