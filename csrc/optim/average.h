/* average.h - moving averages of parameters, all of a model's in one pass.
 *
 * A parameter may have several averages, of one decay each. A run is read once for all of them. The average of a
 * float64 parameter is float64, all others are float32.
 */
#ifndef ZS_AVERAGE_H
#define ZS_AVERAGE_H

#include "shim/tensor.h"

enum { ZS_AVERAGES = 8 }; /* of a parameter, at most */

/* A parameter's elements and those of its averages, adjacent in memory; all borrowed. */
typedef struct zs_averaged {
    const void *param;
    void *average[ZS_AVERAGES];
    int64_t numel;
    zs_dtype dtype; /* the parameter's: not ZS_BYTES */
} zs_averaged;

/* The input of a pass. */
typedef struct zs_averaging {
    zs_averaged *runs; /* [n_runs] borrowed */
    int64_t n_runs;
    int count;                   /* averages of each parameter */
    double weights[ZS_AVERAGES]; /* 1 - decay, from 0 to 1 */
} zs_averaging;

/* Adds a run, to the last one where it continues that; there is room for it. */
void zs_average_add(zs_averaging *pass, const zs_averaged *next);

/* average += weight * (param - average), for all elements and averages, with torch.lerp's bits, on torch's threads.
 * Needs no GIL. ZS_ERR_SYSTEM where memory lies on a disk that fails, and then half-way. */
zs_status zs_average_run(const zs_averaging *pass);

#endif
