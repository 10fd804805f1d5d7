/* peer_memory.c - see peer_memory.h. */
#include "comm/peer/peer_memory.h"

#include "device/cuda_driver.h"
#include "device/device_cuda.h"

#include <pthread.h>
#include <stdlib.h>

enum {
    GRAIN = 2 << 20, /* what is smaller the driver cuts from a larger block, which a peer would then map as a whole */
    ALIGN = 512,
};

struct zs_peer_alloc {
    zs_peer_alloc *next;
    zs_mem *mem; /* owned */
    uint64_t number;
    size_t used; /* bytes that have been cut off; none is cut a second time */
    long blocks; /* that are alive */
    long refs;   /* blocks, readers of the list, transports */
    bool open;   /* more may be cut */
    bool has_handle;
    zs_cu_ipc_mem handle;
};

static struct {
    pthread_mutex_t lock; /* of all allocations */
    zs_peer_alloc *first;
    uint64_t numbers;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Gives references back, with the lock held; what is then to be freed, without. */
static zs_mem *drop(zs_peer_alloc *alloc, long refs)
{
    alloc->refs -= refs;
    if (alloc->refs > 0) return NULL;
    zs_peer_alloc **at = &all.first;
    while (*at != alloc)
        at = &(*at)->next;
    *at = alloc->next;
    zs_mem *mem = alloc->mem;
    free(alloc);
    return mem;
}

void zs_peer_alloc_release(zs_peer_alloc *alloc)
{
    if (alloc == NULL) return;
    pthread_mutex_lock(&all.lock);
    zs_mem *mem = drop(alloc, 1);
    pthread_mutex_unlock(&all.lock);
    zs_mem_release(mem);
}

static void release_block(zs_mem *block)
{
    zs_peer_alloc *alloc = block->owner;
    pthread_mutex_lock(&all.lock);
    alloc->blocks--;
    pthread_mutex_unlock(&all.lock);
    zs_peer_alloc_release(alloc);
}

/* One that has so much left; with the lock held. */
static zs_peer_alloc *find_room(const zs_device *device, size_t bytes)
{
    zs_peer_alloc *alloc = all.first;
    while (alloc != NULL && !(alloc->open && alloc->mem->device == device && alloc->mem->bytes - alloc->used >= bytes))
        alloc = alloc->next;
    return alloc;
}

static zs_status add_alloc(const zs_device *device, size_t bytes)
{
    zs_peer_alloc *alloc = calloc(1, sizeof *alloc);
    if (alloc == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the descriptor of a GPU allocation");
    zs_status status = zs_device_cuda_mem_new_apart(device, zs_round_up(bytes, GRAIN), &alloc->mem);
    if (status != ZS_OK) {
        free(alloc);
        return status;
    }
    alloc->open = true;
    pthread_mutex_lock(&all.lock);
    alloc->number = ++all.numbers;
    alloc->next = all.first;
    all.first = alloc;
    pthread_mutex_unlock(&all.lock);
    return ZS_OK;
}

/* Cuts a block off; NULL: there is no room. */
static zs_peer_alloc *cut(const zs_device *device, size_t bytes, void **ptr)
{
    pthread_mutex_lock(&all.lock);
    zs_peer_alloc *alloc = find_room(device, bytes);
    if (alloc != NULL) {
        *ptr = (char *)alloc->mem->ptr + alloc->used;
        alloc->used += bytes;
        alloc->blocks++;
        alloc->refs++;
        alloc->open = alloc->used < alloc->mem->bytes;
    }
    pthread_mutex_unlock(&all.lock);
    return alloc;
}

zs_status zs_peer_mem_new(const zs_device *device, size_t bytes, zs_mem **out)
{
    void *ptr = NULL;
    size_t room = zs_round_up(bytes > 0 ? bytes : 1, ALIGN);
    zs_peer_alloc *alloc;
    while ((alloc = cut(device, room, &ptr)) == NULL) /* another thread may have been quicker */
        ZS_TRY(add_alloc(device, room));
    zs_mem taken = {.owner = alloc}, *mem = NULL;
    zs_status status = zs_mem_wrap(ptr, bytes > 0 ? bytes : 1, release_block, alloc, &mem);
    if (status != ZS_OK) {
        release_block(&taken);
        return status;
    }
    mem->device = device;
    /* It was zeroed as part of the allocation, but perhaps behind another stream's work. */
    status = zs_device_zero(device, ZS_STREAM_COMPUTE, mem->ptr, mem->bytes);
    if (status == ZS_OK)
        *out = mem;
    else
        zs_mem_release(mem);
    return status;
}

zs_peer_alloc *zs_peer_alloc_at(const void *ptr)
{
    const char *at = ptr;
    pthread_mutex_lock(&all.lock);
    zs_peer_alloc *alloc = all.first;
    while (alloc != NULL && !(at >= (char *)alloc->mem->ptr && at < (char *)alloc->mem->ptr + alloc->mem->bytes))
        alloc = alloc->next;
    if (alloc != NULL) alloc->refs++;
    pthread_mutex_unlock(&all.lock);
    return alloc;
}

bool zs_peer_alloc_idle(zs_peer_alloc *alloc)
{
    pthread_mutex_lock(&all.lock);
    bool idle = alloc->blocks == 0;
    if (idle) alloc->open = false;
    pthread_mutex_unlock(&all.lock);
    return idle;
}

uint64_t zs_peer_alloc_number(const zs_peer_alloc *alloc)
{
    return alloc->number;
}

zs_status zs_peer_alloc_address(zs_peer_alloc *alloc, const void *ptr, zs_peer_address *out)
{
    if (!alloc->has_handle) {
        ZS_TRY(zs_cuda_load());
        ZS_TRY(ZS_CU(cuIpcGetMemHandle, &alloc->handle, (zs_cu_ptr)(uintptr_t)alloc->mem->ptr));
        alloc->has_handle = true;
    }
    *out = (zs_peer_address){.number = alloc->number, .handle = alloc->handle};
    out->offset = (uint64_t)((const char *)ptr - (const char *)alloc->mem->ptr);
    return ZS_OK;
}
