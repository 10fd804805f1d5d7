/* device.h - arithmetic over flat memory: sum of all ranks' parts, casts, norms, scaling.
 *
 * The one idea: every sum over ranks is taken here, in fp32 (fp64 for fp64), in rank order, whatever the wire dtype, so
 * that all transports and all runs give the same bits.
 */
#ifndef ZS_DEVICE_H
#define ZS_DEVICE_H

#include "status.h"
#include "tensor.h"

/* Sums `world` sources elementwise in rank order: dst[i] = sum_r (src[r][i] + prev) * scale, with prev = dst[i] if
 * `accumulate` else 0; a NULL source counts as zeros. Sources are of `dtype`, dst of `to`, computed in fp32 (fp64 if either
 * is). dst may be one of the sources (same index, same dtype). Uses torch's threads. */
typedef struct zs_sum {
    const void *const *src; /* [world] */
    int world;
    void *dst;
    int64_t numel;
    zs_dtype dtype, to;
    double scale;
    bool accumulate;
} zs_sum;

/* Runs the sum described above. */
void zs_device_sum(const zs_sum *sum);

/* Copies `numel` numbers from `src` to `dst`, each rounded to the nearest of its dtype. Not for ZS_BYTES. */
void zs_device_cast(void *dst, zs_dtype to, const void *src, zs_dtype from, int64_t numel);

/* Sum of |x|^p in double (p = 1, 2), or max |x| for p = infinity; NaN and inf come through. */
double zs_device_norm(const void *x, int64_t numel, zs_dtype dtype, double p);

/* x *= factor, in place. */
void zs_device_scale(void *x, int64_t numel, zs_dtype dtype, double factor);

/* Size of one element in bytes (1 for ZS_BYTES). */
size_t zs_dtype_size(zs_dtype dtype);

#endif
