/* fake_cuda_memory.c - memory of the fake of libcuda.so.1, and copies. See fake_cuda.h. */
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
    bool pinned;
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;
static size_t in_use; /* device memory */

/* The link to the block that holds `at`, or to the end. With the lock. */
static block **find(const void *at)
{
    block **link = &blocks;
    while (*link != NULL && !((const char *)at >= (*link)->at && (const char *)at < (*link)->at + (*link)->bytes))
        link = &(*link)->next;
    return link;
}

/* Is this memory of that kind? */
static bool holds(const void *at, bool pinned)
{
    (void)pthread_mutex_lock(&lock);
    const block *one = *find(at);
    bool held = one != NULL && one->pinned == pinned;
    (void)pthread_mutex_unlock(&lock);
    return held;
}

bool fake_known(zs_cu_ptr at)
{
    return holds(AT(at), false);
}

/* New memory; all ones, which is NaN, so that no code takes it for zeroed. */
static zs_cu_result add(void **out, size_t bytes, bool pinned)
{
    size_t whole = (bytes + GRAIN - 1) / GRAIN * GRAIN, most = (size_t)fake_number("FAKE_CUDA_MEMORY", 64L << 30);
    zs_cu_result result = GOOD(bytes > 0);
    block *made = malloc(sizeof *made);
    if (made == NULL) abort();
    (void)pthread_mutex_lock(&lock);
    if (!pinned && in_use + whole > most) result = ZS_CU_ERROR_OUT_OF_MEMORY;
    *made = (block){.next = blocks, .bytes = whole, .pinned = pinned};
    if (result == ZS_CU_SUCCESS && (made->at = aligned_alloc(GRAIN, whole)) == NULL) result = ZS_CU_ERROR_OUT_OF_MEMORY;
    if (result == ZS_CU_SUCCESS) {
        *out = memset(made->at, 0xff, whole);
        blocks = made;
        in_use += pinned ? 0 : whole;
    } else {
        free(made);
    }
    (void)pthread_mutex_unlock(&lock);
    return result;
}

static zs_cu_result drop(const void *at, bool pinned)
{
    (void)pthread_mutex_lock(&lock);
    block **link = find(at), *gone = *link;
    bool known = gone != NULL && gone->pinned == pinned && gone->at == at;
    if (known) {
        in_use -= pinned ? 0 : gone->bytes;
        *link = gone->next;
        free(gone->at);
        free(gone);
    }
    (void)pthread_mutex_unlock(&lock);
    return GOOD(known);
}

zs_cu_result fake_cuMemAlloc(zs_cu_ptr *out, size_t bytes)
{
    BEGIN(true, "bytes=%zu", bytes);
    UNCAPTURED();
    void *at = NULL;
    zs_cu_result result = add(&at, bytes, false);
    *out = (zs_cu_ptr)(uintptr_t)at;
    return result;
}

zs_cu_result fake_cuMemFree(zs_cu_ptr at)
{
    BEGIN(true, "at=%p", AT(at));
    UNCAPTURED();
    fake_drain_all(); /* as the real one does */
    return at != 0 ? drop(AT(at), false) : ZS_CU_SUCCESS;
}

zs_cu_result fake_cuMemHostAlloc(void **out, size_t bytes, unsigned int flags)
{
    BEGIN(true, "bytes=%zu flags=%u", bytes, flags);
    UNCAPTURED();
    return add(out, bytes, true);
}

zs_cu_result fake_cuMemFreeHost(void *at)
{
    BEGIN(true, "at=%p", at);
    UNCAPTURED();
    return drop(at, true);
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

typedef struct copying {
    void *dst;
    const void *src;
    size_t bytes;
    void *staged; /* freed afterwards */
    int value;    /* of each byte, if src is NULL */
} copying;

static void run_copy(const void *args)
{
    const copying *one = args;
    if (one->src != NULL)
        memmove(one->dst, one->src, one->bytes);
    else
        memset(one->dst, one->value, one->bytes);
    free(one->staged);
}

/* Queues a copy; what comes from pageable memory has been read when this returns, as with the real one. */
static zs_cu_result queue_copy(zs_cu_stream stream, copying one, bool from_device)
{
    if (!from_device && !holds(one.src, true) && one.bytes > 0) {
        one.staged = malloc(one.bytes);
        if (one.staged == NULL) return ZS_CU_ERROR_OUT_OF_MEMORY;
        one.src = memcpy(one.staged, one.src, one.bytes);
    }
    fake_submit(stream, run_copy, &one, sizeof one);
    return ZS_CU_SUCCESS;
}

/* The driver itself determines which side is the host's. Nothing is forbidden to a capture here: with models on the
 * CPU, torch's tensors act as memory of a GPU and cannot be distinguished from others. */
zs_cu_result fake_cuMemcpyAsync(zs_cu_ptr dst, zs_cu_ptr src, size_t bytes, zs_cu_stream stream)
{
    BEGIN(true, "stream=%d dst=%p src=%p bytes=%zu", STREAM_ID, AT(dst), AT(src), bytes);
    INTO_STREAM();
    copying one = {.dst = AT(dst), .src = AT(src), .bytes = bytes};
    bool to_host = !fake_known(dst) && !holds(AT(dst), true);
    zs_cu_result result = queue_copy(stream, one, fake_known(src));
    if (to_host) fake_drain(stream);
    return result;
}

/* Pageable memory has been written when this returns. */
zs_cu_result fake_cuMemcpyDtoHAsync(void *dst, zs_cu_ptr src, size_t bytes, zs_cu_stream stream)
{
    BEGIN(true, "stream=%d dst=%p src=%p bytes=%zu", STREAM_ID, dst, AT(src), bytes);
    INTO_STREAM();
    copying one = {.dst = dst, .src = AT(src), .bytes = bytes};
    bool pinned = holds(dst, true);
    if (!pinned) UNCAPTURED();
    fake_submit(stream, run_copy, &one, sizeof one);
    if (!pinned) fake_drain(stream);
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuMemsetD8Async(zs_cu_ptr dst, unsigned char value, size_t bytes, zs_cu_stream stream)
{
    BEGIN(true, "stream=%d dst=%p bytes=%zu", STREAM_ID, AT(dst), bytes);
    INTO_STREAM();
    copying one = {.dst = AT(dst), .bytes = bytes, .value = value};
    fake_submit(stream, run_copy, &one, sizeof one);
    return ZS_CU_SUCCESS;
}
