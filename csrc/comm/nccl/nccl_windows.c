/* nccl_windows.c - see nccl_windows.h. */
#include "comm/nccl/nccl_windows.h"

#include "device/device_cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    PAGE = 2 << 20,      /* bytes: windows are multiples of it */
    PLACE = 4096,        /* bytes: blocks begin at multiples of it */
    EXCHANGED = 4096,    /* bytes that ranks say to each other at most */
    MOST = 8 * EXCHANGED /* windows: one bit for each in that */
};

typedef struct window {
    zs_nccl_window registered;
    const zs_device *device;
    size_t used; /* bytes that have been cut off it, since it was last free */
    long blocks; /* that are lent */
} window;

struct zs_nccl_windows {
    zs_nccl_comm *comm;   /* counted reference */
    zs_comm *control;     /* borrowed */
    pthread_mutex_t lock; /* of what follows: blocks are given back by any thread */
    window **all;         /* in the order of their making, which is that of all ranks; owned */
    size_t n;
    window *current; /* small blocks are cut off it; NULL: none */
    long refs;       /* of who takes, and of each block */
};

/* What a block has to give back. */
typedef struct lent {
    zs_nccl_windows *windows;
    window *from;
} lent;

zs_status zs_nccl_windows_new(zs_nccl_comm *comm, zs_comm *control, zs_nccl_windows **out)
{
    zs_nccl_windows *made = calloc(1, sizeof *made);
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating NCCL windows");
    made->comm = zs_nccl_comm_retain(comm);
    made->control = control;
    made->refs = 1;
    pthread_mutex_init(&made->lock, NULL);
    *out = made;
    return ZS_OK;
}

/* Nothing of a window's may be under way when it goes. */
static void destroy(zs_nccl_windows *windows)
{
    for (size_t i = 0; i < windows->n; i++) {
        zs_device_cuda_join_all(windows->all[i]->device, true);
        zs_nccl_window_free(&windows->all[i]->registered);
        free(windows->all[i]);
    }
    zs_nccl_comm_release(windows->comm);
    pthread_mutex_destroy(&windows->lock);
    free(windows->all);
    free(windows);
}

/* Gives a reference back; `from` (or NULL) is where a block was cut off. */
static void drop(zs_nccl_windows *windows, window *from)
{
    pthread_mutex_lock(&windows->lock);
    if (from != NULL) from->blocks--;
    bool last = --windows->refs == 0;
    pthread_mutex_unlock(&windows->lock);
    if (last) destroy(windows);
}

void zs_nccl_windows_end(zs_nccl_windows *windows)
{
    if (windows != NULL) drop(windows, NULL);
}

/* What streams still do with it comes before what the compute stream does from now on, and so before its next use. */
static void give_back(zs_mem *mem)
{
    lent *block = mem->owner;
    zs_device_cuda_join_all(mem->device, false);
    drop(block->windows, block->from);
    free(block);
}

/* --- taking -------------------------------------------------------------------------------------------------------------- */

static bool is_free(const zs_nccl_windows *windows, const window *one, size_t bytes)
{
    return one->blocks == 0 && one != windows->current && one->registered.bytes == bytes;
}

/* A window of so many bytes that is free on all ranks, or NULL. Collective. */
static zs_status find_free(zs_nccl_windows *windows, size_t bytes, window **out)
{
    zs_comm *control = windows->control;
    unsigned char own[EXCHANGED] = {0};
    size_t size = (windows->n + 7) / 8;
    *out = NULL;
    if (size == 0) return ZS_OK;
    unsigned char *all = malloc(size * (size_t)control->world);
    if (all == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory listing %zu NCCL windows", windows->n);
    pthread_mutex_lock(&windows->lock);
    for (size_t i = 0; i < windows->n; i++)
        if (is_free(windows, windows->all[i], bytes)) own[i / 8] |= (unsigned char)(1U << i % 8);
    pthread_mutex_unlock(&windows->lock);
    zs_status status = zs_comm_exchange(control, own, size, all);
    for (size_t i = 0; status == ZS_OK && i < windows->n && *out == NULL; i++) {
        int free_on = 0;
        for (int r = 0; r < control->world; r++)
            free_on += all[(size_t)r * size + i / 8] >> i % 8 & 1;
        if (free_on == control->world) *out = windows->all[i];
    }
    free(all);
    return status;
}

static zs_status add_window(zs_nccl_windows *windows, const zs_device *device, size_t bytes, window **out)
{
    if (windows->n == MOST)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "NCCL windows: the limit of %d is reached; wrap fewer modules, or omit windows", MOST);
    window **grown = realloc(windows->all, (windows->n + 1) * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating NCCL window %zu", windows->n);
    windows->all = grown;
    window *made = calloc(1, sizeof *made);
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating NCCL window %zu", windows->n);
    made->device = device;
    zs_status status = zs_nccl_window_new(windows->comm, bytes, &made->registered);
    if (status != ZS_OK) {
        free(made);
        return status;
    }
    windows->all[windows->n++] = made;
    *out = made;
    return ZS_OK;
}

/* The window that the next block of `bytes` is cut off. Its place follows from the order of the calls alone. */
static zs_status choose(zs_nccl_windows *windows, const zs_device *device, size_t bytes, window **out)
{
    bool is_small = bytes <= PAGE / 2;
    size_t whole = is_small ? PAGE : zs_round_up(bytes, PAGE);
    window *current = windows->current;
    if (is_small && current != NULL && current->registered.bytes - current->used >= bytes) {
        *out = current;
        return ZS_OK;
    }
    ZS_TRY(find_free(windows, whole, out));
    if (*out == NULL) ZS_TRY(add_window(windows, device, whole, out));
    (*out)->used = 0;
    pthread_mutex_lock(&windows->lock);
    if (is_small) windows->current = *out;
    pthread_mutex_unlock(&windows->lock);
    return ZS_OK;
}

zs_status zs_nccl_windows_take(zs_nccl_windows *windows, const zs_device *device, size_t bytes, zs_mem **out)
{
    window *from = NULL;
    size_t room = zs_round_up(bytes > 0 ? bytes : 1, PLACE);
    ZS_TRY(choose(windows, device, room, &from));
    lent *block = malloc(sizeof *block);
    if (block == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a block descriptor");
    *block = (lent){windows, from};
    char *at = (char *)from->registered.ptr + from->used;
    zs_mem *mem = NULL;
    zs_status status = zs_mem_wrap(at, bytes > 0 ? bytes : 1, give_back, block, &mem);
    if (status != ZS_OK) {
        free(block);
        return status;
    }
    mem->device = device;
    pthread_mutex_lock(&windows->lock);
    from->used += room;
    from->blocks++;
    windows->refs++;
    pthread_mutex_unlock(&windows->lock);
    zs_mem_count_mapping();
    status = zs_device_zero(device, ZS_STREAM_COMPUTE, mem->ptr, mem->bytes);
    if (status == ZS_OK)
        *out = mem;
    else
        zs_mem_release(mem);
    return status;
}
