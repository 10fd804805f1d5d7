/* pending.c - see pending.h. */
#include "device/pending.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>

#include "device/device.h"

static atomic_int blocks; /* with a factor */

static int halvings_of(float factor)
{
    int exponent;
    return frexpf(factor, &exponent) == 0.5F && exponent <= 1 ? 1 - exponent : -1;
}

int zs_pending_halvings(const zs_mem *mem)
{
    return halvings_of(zs_pending_of(mem));
}

/* Does one multiplication by a * b give what multiplying by `a` and then by `b` gives? */
static bool are_one(float a, float b)
{
    bool exact = halvings_of(a) >= 0 || halvings_of(b) >= 0;
    return exact && fabsf(a) <= 1 && fabsf(b) <= 1 && fabsf(a * b) >= FLT_MIN;
}

void zs_pending_set(zs_mem *mem, float factor)
{
    const float before = zs_pending_of(mem);
    if (are_one(before, factor))
        factor *= before;
    else
        zs_pending_settle(mem);
    zs_pending_drop(mem);
    mem->pending = factor;
    atomic_fetch_add(&blocks, 1);
}

void zs_pending_drop(zs_mem *mem)
{
    if (mem == NULL || mem->pending == 0) return;
    mem->pending = 0;
    atomic_fetch_sub(&blocks, 1);
}

void zs_pending_settle(zs_mem *mem)
{
    if (mem == NULL || mem->pending == 0) return;
    const zs_numbers all = {mem->ptr, (int64_t)(mem->bytes / sizeof(float)), ZS_F32};
    zs_cpu_scale(&all, mem->pending);
    zs_pending_drop(mem);
}

bool zs_pending_any(void)
{
    return atomic_load(&blocks) != 0;
}
