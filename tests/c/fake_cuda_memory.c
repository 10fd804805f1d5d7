/* fake_cuda_memory.c - memory of the stand-in for libcuda.so.1. See fake_cuda.h. */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { GRAIN = 1 << 12 };

/* Device memory, or pinned memory of the host. */
typedef struct block {
    struct block *next;
    char *at;
    size_t bytes;
    bool pinned, malloced;
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;
static size_t in_use;

/* The link to the block that holds `at`, or to the end. With the lock. */
static block **find(const void *at)
{
    block **link = &blocks;
    while (*link != NULL && !((const char *)at >= (*link)->at && (const char *)at < (*link)->at + (*link)->bytes))
        link = &(*link)->next;
    return link;
}

static void add(const block *made)
{
    block *copy = malloc(sizeof *copy);
    if (copy == NULL) abort();
    *copy = *made;
    copy->next = blocks;
    blocks = copy;
}

static void drop(block **link)
{
    block *gone = *link;
    *link = gone->next;
    if (gone->malloced) free(gone->at);
    free(gone);
}

void fake_info(size_t *left, size_t *total)
{
    const char *limit = getenv("FAKE_CUDA_MEMORY");
    *total = limit != NULL ? strtoull(limit, NULL, 10) : (size_t)64 << 30;
    (void)pthread_mutex_lock(&lock);
    *left = in_use < *total ? *total - in_use : 0;
    (void)pthread_mutex_unlock(&lock);
}

zs_cu_result fake_alloc(zs_cu_ptr *out, size_t bytes)
{
    size_t left, total, whole = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    fake_info(&left, &total);
    if (bytes == 0) return ZS_CU_ERROR_INVALID_VALUE;
    if (whole > left) return ZS_CU_ERROR_OUT_OF_MEMORY;
    block made = {.at = aligned_alloc(GRAIN, whole), .bytes = whole, .malloced = true};
    if (made.at == NULL) return ZS_CU_ERROR_OUT_OF_MEMORY;
    memset(made.at, 0xff, whole);
    (void)pthread_mutex_lock(&lock);
    add(&made);
    in_use += whole;
    (void)pthread_mutex_unlock(&lock);
    *out = (zs_cu_ptr)(uintptr_t)made.at;
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_free(zs_cu_ptr at)
{
    (void)pthread_mutex_lock(&lock);
    block **link = find((const void *)(uintptr_t)at);
    bool known = *link != NULL && !(*link)->pinned && (*link)->at == (const char *)(uintptr_t)at;
    if (known) {
        in_use -= (*link)->bytes;
        drop(link);
    }
    (void)pthread_mutex_unlock(&lock);
    return known ? ZS_CU_SUCCESS : ZS_CU_ERROR_INVALID_VALUE;
}

bool fake_known(zs_cu_ptr at)
{
    (void)pthread_mutex_lock(&lock);
    block *one = *find((const void *)(uintptr_t)at);
    bool known = one != NULL && !one->pinned;
    (void)pthread_mutex_unlock(&lock);
    return known;
}

/* --- pinned host memory ---------------------------------------------------------------------------------------------------- */

zs_cu_result fake_pin(void **out, void *at, size_t bytes)
{
    block made = {.at = at, .bytes = bytes, .pinned = true, .malloced = at == NULL};
    if (bytes == 0) return ZS_CU_ERROR_INVALID_VALUE;
    if (at == NULL) made.at = aligned_alloc(GRAIN, (bytes + GRAIN - 1) / GRAIN * GRAIN);
    if (made.at == NULL) return ZS_CU_ERROR_OUT_OF_MEMORY;
    (void)pthread_mutex_lock(&lock);
    add(&made);
    (void)pthread_mutex_unlock(&lock);
    if (out != NULL) *out = made.at;
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_unpin(void *at, bool allocated)
{
    (void)pthread_mutex_lock(&lock);
    block **link = find(at);
    bool known = *link != NULL && (*link)->pinned && (*link)->malloced == allocated && (*link)->at == (const char *)at;
    if (known) drop(link);
    (void)pthread_mutex_unlock(&lock);
    return known ? ZS_CU_SUCCESS : ZS_CU_ERROR_INVALID_VALUE;
}

bool fake_pinned(const void *at)
{
    (void)pthread_mutex_lock(&lock);
    block *one = *find(at);
    bool pinned = one != NULL && one->pinned;
    (void)pthread_mutex_unlock(&lock);
    return pinned;
}
