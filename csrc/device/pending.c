/* pending.c - see pending.h. */
#include "device/pending.h"

#include <stdatomic.h>

#include "device/device.h"

static atomic_int blocks; /* with a factor */

void zs_pending_set(zs_mem *mem, float factor)
{
    zs_pending_settle(mem);
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
