/* update.h - the update rules of AdamW, Adam and SGD for one element, compiled by gcc and by nvcc.
 *
 * Every rounding is written down. Where torch multiplies and adds in one rounding (its loops are compiled
 * for machines with FMA), so does MADD here; everywhere else a product is rounded before it is used, and the build
 * forbids the compiler to fuse on its own (-ffp-contract=off, nvcc -fmad=false). So the CPU's tests test the GPU's
 * arithmetic, and SGD and the moments of Adam come out with torch.optim's bits.
 *
 * The rules are in update_rules.h, once for float and once for double.
 */
#ifndef ZS_UPDATE_H
#define ZS_UPDATE_H

#include <math.h>
#include <stdbool.h>

#include "base/dither.h"

/* The hyper-parameters of one step, as the user gave them. */
typedef struct zs_hyper {
    double lr;
    double weight_decay;
    double beta1, beta2, eps;   /* Adam */
    double momentum, dampening; /* SGD */
    bool decoupled;             /* AdamW: decay the parameter, not the gradient */
    bool amsgrad;
    bool nesterov;
    bool maximize;
    bool dithered;        /* bfloat16 is rounded stochastically (dither.h) */
    uint64_t seed, round; /* the seed for that, and the number of this step */
} zs_hyper;

/* A product and what its rounding lost. */
typedef struct zs_pair {
    double high, low;
} zs_pair;

/* a * b, to some 100 bits. */
ZS_HD zs_pair zs_pair_times(zs_pair a, zs_pair b)
{
    zs_pair product;
    double high = a.high * b.high;
    double cross = fma(a.high, b.low, a.low * b.high);
    double low = fma(a.high, b.high, -high) + cross;
    product.high = high + low;
    product.low = low - (product.high - high);
    return product;
}

/* base to the power of a count of steps, 0 <= base < 1, rounded once: the last bits of pow() differ between libraries,
 * but this has the same bits on every machine. A part of a step is dropped. */
ZS_HD double zs_power(double base, double steps)
{
    zs_pair result = {1, 0}, square = {base, 0};
    for (uint64_t left = steps >= 1 ? (uint64_t)fmin(steps, 9e18) : 0; left != 0; left >>= 1) {
        if (left & 1) result = zs_pair_times(result, square);
        square = zs_pair_times(square, square);
    }
    return result.high;
}

#define ZS_REAL float
#define ZS_NAME(name) name##_f32
#define ZS_FMA(a, b, c) fmaf(a, b, c)
#define ZS_SQRT(x) sqrtf(x)
#include "update/update_rules.h"
#undef ZS_REAL
#undef ZS_NAME
#undef ZS_FMA
#undef ZS_SQRT

#define ZS_REAL double
#define ZS_NAME(name) name##_f64
#define ZS_FMA(a, b, c) fma(a, b, c)
#define ZS_SQRT(x) sqrt(x)
#include "update/update_rules.h"
#undef ZS_REAL
#undef ZS_NAME
#undef ZS_FMA
#undef ZS_SQRT

#endif
