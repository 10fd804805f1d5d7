/* cuda_memory.c - memory of a GPU, and pinned memory of its host: the functions of device.h.
 *
 * It is torch's, so torch's statistics include it, and tensors can use freed memory. Memory goes back in the order of
 * the compute stream: other streams' work on it comes first. A failure at that is ignored, as the process may be
 * ending, and an earlier failure that is being returned stays on record. See device_cuda.h. */
#include "device/device_cuda.h"

#include "device/cuda_driver.h"
#include "shim/torch_cuda.h"

#include <pthread.h>
#include <stdlib.h>

static bool is_on_host(const zs_device *device)
{
    return device->where.type == ZS_ON_CPU;
}

static void free_torch(zs_mem *mem)
{
    mem->device->ops->join_busy(mem->device);
    zs_torch_cuda_free(mem->owner);
}

static void free_driver(zs_mem *mem)
{
    mem->device->ops->join_busy(mem->device);
    ZS_CU_FREE(cuMemFree, (zs_cu_ptr)(uintptr_t)mem->ptr); /* waits for the GPU */
}

/* Makes a block for memory that has just been taken. */
static zs_status wrap(zs_mem taken, zs_mem **out)
{
    zs_status status = zs_mem_wrap(taken.ptr, taken.bytes, taken.destroy, taken.owner, out);
    if (status == ZS_OK)
        (*out)->device = taken.device;
    else
        taken.destroy(&taken);
    return status;
}

/* The same; zeroes it. */
static zs_status wrap_zeroed(zs_mem taken, zs_mem **out)
{
    zs_mem *mem = NULL;
    zs_mem_count_mapping();
    ZS_TRY(wrap(taken, &mem));
    zs_status status = zs_device_zero(taken.device, ZS_STREAM_COMPUTE, mem->ptr, mem->bytes);
    if (status == ZS_OK)
        *out = mem;
    else
        zs_mem_release(mem);
    return status;
}

static zs_status take_of_driver(zs_mem *taken)
{
    zs_cu_ptr ptr = 0;
    ZS_TRY(taken->device->ops->enter(taken->device));
    ZS_TRY(ZS_CU(cuMemAlloc, &ptr, taken->bytes));
    taken->ptr = (void *)(uintptr_t)ptr; /* NOLINT: an address of the device */
    return ZS_OK;
}

static zs_status take(const zs_device *device, size_t bytes, zs_mem *taken)
{
    *taken = (zs_mem){.bytes = bytes > 0 ? bytes : 1, .destroy = free_driver, .device = device};
    if (is_on_host(device)) return take_of_driver(taken);
    taken->destroy = free_torch;
    return zs_torch_cuda_alloc(device->where.index, taken->bytes, &taken->ptr, &taken->owner);
}

zs_status zs_cuda_mem_new(const zs_device *device, size_t bytes, zs_mem **out)
{
    zs_mem taken;
    ZS_TRY(take(device, bytes, &taken));
    return wrap_zeroed(taken, out);
}

typedef struct kept_block {
    zs_mem was;
    struct kept_block *next;
} kept_block;

static kept_block *all_kept;
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;

/* (On the host) Keeps the memory for the next block of its size, as torch's allocator does. */
static void keep(zs_mem *mem)
{
    kept_block *kept = malloc(sizeof *kept);
    if (kept == NULL) {
        free_driver(mem);
        return;
    }
    mem->device->ops->join_busy(mem->device);
    pthread_mutex_lock(&kept_lock);
    *kept = (kept_block){*mem, all_kept};
    all_kept = kept;
    pthread_mutex_unlock(&kept_lock);
}

static void *take_kept(const zs_device *device, size_t bytes)
{
    pthread_mutex_lock(&kept_lock);
    kept_block **at = &all_kept;
    while (*at != NULL && ((*at)->was.bytes != bytes || (*at)->was.device != device))
        at = &(*at)->next;
    kept_block *found = *at;
    if (found != NULL) *at = found->next;
    pthread_mutex_unlock(&kept_lock);
    void *ptr = found != NULL ? found->was.ptr : NULL;
    free(found);
    return ptr;
}

zs_status zs_cuda_mem_lend(const zs_device *device, size_t bytes, zs_mem **out)
{
    zs_mem taken = {.bytes = bytes > 0 ? bytes : 1, .device = device};
    if (is_on_host(device)) taken.ptr = take_kept(device, taken.bytes);
    if (taken.ptr == NULL) ZS_TRY(take(device, bytes, &taken));
    if (is_on_host(device)) taken.destroy = keep;
    return wrap(taken, out);
}

static void free_host(zs_mem *mem)
{
    mem->device->ops->join_busy(mem->device);
    bool failed = zs_last_status() != ZS_OK;
    (void)zs_device_wait(mem->device); /* pinned memory is not freed in the order of a stream */
    if (!failed) zs_clear_error();
    ZS_CU_FREE(cuMemFreeHost, mem->ptr);
}

zs_status zs_cuda_mem_new_host(const zs_device *device, size_t bytes, zs_mem **out)
{
    zs_mem taken = {.bytes = bytes > 0 ? bytes : 1, .destroy = free_host, .device = device};
    ZS_TRY(device->ops->enter(device));
    ZS_TRY(ZS_CU(cuMemHostAlloc, &taken.ptr, taken.bytes, ZS_CU_MEMHOSTALLOC_PORTABLE));
    ZS_TRY(wrap_zeroed(taken, out));
    (*out)->on_host = true;
    return ZS_OK;
}
