/* pending.c - see pending.h. */
#include "device/pending.h"

#include <stdatomic.h>

#include "device/device.h"

static atomic_int blocks; /* with factors */

bool zs_pending_add(zs_mem *mem, float factor)
{
    if (mem->pending.n == ZS_FACTORS) return false;
    if (mem->pending.n == 0) atomic_fetch_add(&blocks, 1);
    mem->pending.by[mem->pending.n++] = factor;
    return true;
}

zs_factors zs_pending_of(const zs_mem *mem)
{
    return mem != NULL ? mem->pending : (zs_factors){0};
}

void zs_pending_drop(zs_mem *mem)
{
    if (mem == NULL || mem->pending.n == 0) return;
    mem->pending.n = 0;
    atomic_fetch_sub(&blocks, 1);
}

void zs_pending_settle(zs_mem *mem)
{
    if (mem == NULL || mem->pending.n == 0) return;
    const zs_numbers all = {mem->ptr, (int64_t)(mem->bytes / sizeof(float)), ZS_F32};
    for (int i = 0; i < mem->pending.n; i++)
        zs_cpu_scale(&all, mem->pending.by[i]);
    zs_pending_drop(mem);
}

bool zs_pending_any(void)
{
    return atomic_load(&blocks) != 0;
}
