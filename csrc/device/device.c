/* device.c - the CPU's table: see device.h. */
#include "device/device.h"

#include <string.h>

static zs_status cpu_mem_new(const zs_device *device, size_t bytes, zs_mem **out)
{
    (void)device;
    return zs_mem_new_private(bytes, out);
}

/* From this size on malloc maps each block separately, in small pages; huge ones take a tenth of the time to fault. */
enum { MAPPED_ANYWAY = 32 << 20 };

static zs_status cpu_mem_lend(const zs_device *device, size_t bytes, zs_mem **out)
{
    (void)device;
    bool mapped = bytes >= MAPPED_ANYWAY || zs_mem_is_diverted();
    return mapped ? zs_mem_new_private(bytes, out) : zs_mem_new_on_heap(bytes, out);
}

static zs_status cpu_copy(const zs_device *device, zs_stream stream, void *dst, const void *src, size_t bytes)
{
    (void)device;
    (void)stream;
    memmove(dst, src, bytes);
    return ZS_OK;
}

static zs_status cpu_zero(const zs_device *device, zs_stream stream, void *dst, size_t bytes)
{
    (void)device;
    (void)stream;
    memset(dst, 0, bytes);
    return ZS_OK;
}

static zs_status cpu_sum(const zs_device *device, zs_stream stream, const zs_sum *sum)
{
    (void)device;
    (void)stream;
    (sum->squares != NULL ? zs_cpu_sum_squared : zs_cpu_sum)(sum);
    return ZS_OK;
}

static zs_status cpu_cast(const zs_device *device, zs_stream stream, const zs_cast *cast)
{
    (void)device;
    (void)stream;
    zs_cpu_cast(cast);
    return ZS_OK;
}

static zs_status cpu_scale(const zs_device *device, zs_stream stream, const zs_numbers *x, double factor)
{
    (void)device;
    (void)stream;
    zs_cpu_scale(x, factor);
    return ZS_OK;
}

static zs_status cpu_norm(const zs_device *device, const zs_numbers *x, size_t n, double p, double *out)
{
    (void)device;
    *out = 0;
    for (size_t i = 0; i < n; i++)
        *out = zs_norm_join(*out, zs_cpu_norm(&x[i], p), p);
    return ZS_OK;
}

static zs_status cpu_same(const zs_device *device, const void *a, const void *b, size_t bytes, bool *out)
{
    (void)device;
    *out = memcmp(a, b, bytes) == 0;
    return ZS_OK;
}

static const zs_device_ops cpu_ops = {
    .name = "cpu",
    .queues = false,
    .mem_new = cpu_mem_new,
    .mem_lend = cpu_mem_lend,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .sum = cpu_sum,
    .cast = cpu_cast,
    .scale = cpu_scale,
    .norm = cpu_norm,
    .same = cpu_same,
};

const zs_device *zs_device_cpu(void)
{
    static const zs_device cpu = {&cpu_ops, {ZS_ON_CPU, 0}};
    return &cpu;
}
