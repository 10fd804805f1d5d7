/* memory.c - see memory.h. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include "base/memory.h"

#include <errno.h>
#include <pthread.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Below this, a huge page would waste more than it saves in page faults. */
enum { HUGE_PAGE = 2 << 20, TRIM_AFTER = 32 << 20 };

static _Atomic long mappings;

void zs_mem_count_mapping(void)
{
    atomic_fetch_add_explicit(&mappings, 1, memory_order_relaxed);
}

long zs_mem_mappings(void)
{
    return atomic_load(&mappings);
}

static size_t in_pages(size_t bytes)
{
    return zs_round_up(bytes ? bytes : 1, 4096);
}

static void unmap_private(zs_mem *mem)
{
    munmap(mem->ptr, in_pages(mem->bytes));
}

zs_status zs_mem_wrap(void *ptr, size_t bytes, void (*destroy)(zs_mem *), void *owner, zs_mem **out)
{
    zs_mem *mem = calloc(1, sizeof *mem);
    if (mem == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a block descriptor");
    mem->ptr = ptr;
    mem->bytes = bytes;
    zs_refs_init(&mem->refs);
    mem->destroy = destroy;
    mem->owner = owner;
    mem->role = ZS_MEM_PLAIN;
    *out = mem;
    return ZS_OK;
}

/* Maps `length` bytes from a huge page's border on: only such ranges get huge pages. */
static void *map_aligned(size_t length)
{
    size_t room = length + HUGE_PAGE;
    zs_mem_count_mapping();
    char *ptr = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ptr == MAP_FAILED) return NULL;
    size_t before = zs_round_up((size_t)(uintptr_t)ptr, HUGE_PAGE) - (size_t)(uintptr_t)ptr;
    if (before > 0) munmap(ptr, before);
    if (before < HUGE_PAGE) munmap(ptr + before + length, HUGE_PAGE - before);
    return ptr + before;
}

static zs_status (*_Atomic divert)(size_t, zs_mem **); /* NULL: none */

void zs_mem_divert(zs_status (*make)(size_t bytes, zs_mem **out))
{
    atomic_store(&divert, make);
}

bool zs_mem_is_diverted(void)
{
    return atomic_load_explicit(&divert, memory_order_relaxed) != NULL;
}

zs_status zs_mem_new_private(size_t bytes, zs_mem **out)
{
    if (zs_mem_is_diverted()) return atomic_load(&divert)(bytes, out);
    size_t length = in_pages(bytes);
    void *ptr = map_aligned(length);
    if (ptr == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "cannot map %zu bytes of memory", length);
    if (length >= HUGE_PAGE) madvise(ptr, length, MADV_HUGEPAGE); /* advice: failing costs speed only */
    zs_status status = zs_mem_wrap(ptr, bytes ? bytes : 1, unmap_private, NULL, out);
    if (status != ZS_OK) munmap(ptr, length);
    return status;
}

static void free_heap(zs_mem *mem)
{
    free(mem->ptr);
}

zs_status zs_mem_new_on_heap(size_t bytes, zs_mem **out)
{
    enum { CACHE_LINE = 64 };
    void *ptr = aligned_alloc(CACHE_LINE, zs_round_up(bytes + 1, CACHE_LINE));
    if (ptr == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "cannot allocate %zu bytes of memory", bytes);
    zs_status status = zs_mem_wrap(ptr, bytes, free_heap, NULL, out);
    if (status != ZS_OK) free(ptr);
    return status;
}

void zs_mem_heap_freed(size_t bytes)
{
    static _Atomic size_t since;
    size_t freed = atomic_fetch_add(&since, bytes) + bytes;
    if (freed == 0 || (bytes > 0 && freed < TRIM_AFTER)) return;
    atomic_store(&since, 0);
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

zs_mem *zs_mem_retain(zs_mem *mem)
{
    zs_refs_take(&mem->refs);
    return mem;
}

void zs_mem_release(zs_mem *mem)
{
    if (mem == NULL) return;
    if (!zs_refs_drop(&mem->refs)) return;
    if (mem->destroy != NULL) mem->destroy(mem);
    free(mem);
}

/* --- forks -------------------------------------------------------------------------------------------------------- */

static _Atomic unsigned lifetime;

static void count_fork(void)
{
    atomic_fetch_add(&lifetime, 1);
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

unsigned zs_lifetime(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    return atomic_load(&lifetime);
}
