/* no_loops.c - device_cpu.c for programs that move bytes and compute nothing: its loops take seconds to compile. */
#include "device/device.h"

#include <stdlib.h>

#define ABSENT(result, name, parameters)             \
    __attribute__((noreturn)) result name parameters \
    {                                                \
        abort();                                     \
    }

#pragma GCC diagnostic ignored "-Wunused-parameter"

ABSENT(void, zs_cpu_sum, (const zs_sum *sum))
ABSENT(void, zs_cpu_sum_squared, (const zs_sum *sum))
ABSENT(void, zs_cpu_cast, (const zs_cast *cast))
ABSENT(void, zs_cpu_scale, (const zs_numbers *x, double factor))
ABSENT(double, zs_cpu_norm, (const zs_numbers *x, double p))
