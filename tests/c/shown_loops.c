/* shown_loops.c - the CPU's loops of device.h for ctypes: the extension's objects hide their functions. */
#include "device/device.h"

void shown_sum(const zs_sum *sum);
void shown_cast(const zs_cast *cast);
void shown_scale(const zs_numbers *x, double factor);
double shown_norm(const zs_numbers *x, double p);

void shown_sum(const zs_sum *sum)
{
    zs_cpu_sum(sum);
}

void shown_cast(const zs_cast *cast)
{
    zs_cpu_cast(cast);
}

void shown_scale(const zs_numbers *x, double factor)
{
    zs_cpu_scale(x, factor);
}

double shown_norm(const zs_numbers *x, double p)
{
    return zs_cpu_norm(x, p);
}
