/* no_loops.c - device_cpu.c for programs that move bytes and compute nothing: its loops take seconds to compile. */
#include "device/device.h"

#include <stdlib.h>

void zs_cpu_sum(const zs_sum *sum)
{
    (void)sum;
    abort();
}

void zs_cpu_sum_squared(const zs_sum *sum)
{
    (void)sum;
    abort();
}

void zs_cpu_cast(const zs_cast *cast)
{
    (void)cast;
    abort();
}

void zs_cpu_scale(const zs_numbers *x, double factor)
{
    (void)x;
    (void)factor;
    abort();
}

double zs_cpu_norm(const zs_numbers *x, double p)
{
    (void)x;
    (void)p;
    abort();
}
