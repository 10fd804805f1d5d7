/* shown_loops.c - the CPU's loops of device.h for ctypes: the extension's objects hide their functions. */
#include "device/device.h"

#define SHOW(result, name, parameters, arguments) \
    result shown_##name parameters;               \
    result shown_##name parameters                \
    {                                             \
        return zs_cpu_##name arguments;           \
    }

SHOW(void, sum, (const zs_sum *sum), (sum))
SHOW(void, cast, (const zs_cast *cast), (cast))
SHOW(void, scale, (const zs_numbers *x, double factor), (x, factor))
SHOW(double, norm, (const zs_numbers *x, double p), (x, p))
