/* fake_cuda_memory.c - memory of the stand-in for libcuda.so.1. See fake_cuda.h.
 *
 * The one idea: an allocation is a memory file that is mapped, so another process maps the same bytes through the
 * descriptor's name in /proc; what is written there (flags that streams wait for, too) is seen at once. Who maps it holds a
 * shared lock on the file, which ends with the process too: memory that is freed before is a fault, as it is undefined.
 */
#define _GNU_SOURCE 1
#include "fake_cuda.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GRAIN = 1 << 12 };

/* Something mapped or pinned. */
typedef struct block {
    struct block *next;
    char *at;
    size_t bytes;
    int fd;     /* own allocations: the memory file, else -1 */
    int lock;   /* imports: a descriptor that has the file's lock, else -1 */
    int opened; /* imports: how often, else 0 */
    struct name {
        pid_t pid;
        int fd;
        unsigned long inode;
        size_t bytes;
        int gpu;
    } name; /* imports: what was opened */
    bool pinned, malloced;
} block;

_Static_assert(sizeof(struct name) <= sizeof(zs_cu_ipc_mem), "a name is what a handle holds");

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
    if (!gone->pinned) (void)munmap(gone->at, gone->bytes);
    if (gone->fd >= 0) (void)close(gone->fd);
    if (gone->lock >= 0) (void)close(gone->lock);
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
    block made = {.bytes = whole, .fd = memfd_create("fake-cuda", MFD_CLOEXEC), .lock = -1};
    if (made.fd < 0 || ftruncate(made.fd, (off_t)whole) != 0) return ZS_CU_ERROR_OUT_OF_MEMORY;
    made.at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, made.fd, 0);
    if (made.at == MAP_FAILED) return ZS_CU_ERROR_OUT_OF_MEMORY;
    memset(made.at, 0xff, whole);
    (void)pthread_mutex_lock(&lock);
    add(&made);
    in_use += whole;
    (void)pthread_mutex_unlock(&lock);
    *out = (zs_cu_ptr)(uintptr_t)made.at;
    return ZS_CU_SUCCESS;
}

/* The real driver promises nothing then. */
static void end_if_mapped(const block *own)
{
    if (flock(own->fd, LOCK_EX | LOCK_NB) == 0) return;
    fprintf(stderr, "fake_cuda: cuMemFree of memory that another process has mapped (%zu bytes)\n", own->bytes);
    abort();
}

zs_cu_result fake_free(zs_cu_ptr at)
{
    (void)pthread_mutex_lock(&lock);
    block **link = find((const void *)(uintptr_t)at);
    bool known = *link != NULL && (*link)->fd >= 0 && (*link)->at == (const char *)(uintptr_t)at;
    if (known) {
        end_if_mapped(*link);
        in_use -= (*link)->bytes;
        drop(link);
    }
    (void)pthread_mutex_unlock(&lock);
    return known ? ZS_CU_SUCCESS : ZS_CU_ERROR_INVALID_VALUE;
}

zs_cu_result fake_range(zs_cu_ptr *base, size_t *bytes, zs_cu_ptr at)
{
    (void)pthread_mutex_lock(&lock);
    block *one = *find((const void *)(uintptr_t)at);
    bool known = one != NULL && !one->pinned;
    if (known && base != NULL) *base = (zs_cu_ptr)(uintptr_t)one->at;
    if (known && bytes != NULL) *bytes = one->bytes;
    (void)pthread_mutex_unlock(&lock);
    return known ? ZS_CU_SUCCESS : ZS_CU_ERROR_NOT_FOUND;
}

/* --- between processes --------------------------------------------------------------------------------------------------- */

zs_cu_result fake_export(zs_cu_ipc_mem *handle, zs_cu_ptr at)
{
    struct stat facts;
    (void)pthread_mutex_lock(&lock);
    block *one = *find((const void *)(uintptr_t)at);
    struct name name = {.pid = getpid(), .gpu = fake_gpu()};
    bool base = one != NULL && one->at == (const char *)(uintptr_t)at; /* the whole allocation, or nothing */
    bool own = base && one->fd >= 0 && fstat(one->fd, &facts) == 0;
    if (own) name.fd = one->fd, name.inode = facts.st_ino, name.bytes = one->bytes;
    (void)pthread_mutex_unlock(&lock);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &name, sizeof name);
    return own ? ZS_CU_SUCCESS : ZS_CU_ERROR_INVALID_VALUE;
}

/* Does this process see the GPU of that number? */
static bool sees(int gpu)
{
    const char *visible = getenv("FAKE_CUDA_VISIBLE");
    bool seen = visible == NULL || gpu < 0;
    for (; visible != NULL && !seen; visible = strchr(visible, ','), visible += visible != NULL)
        seen = atoi(visible) == gpu;
    return seen;
}

/* Maps what the handle names, if it is still what it was. */
static zs_cu_result map(const struct name *name, block *out)
{
    char path[64];
    struct stat facts;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)name->pid, name->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return ZS_CU_ERROR_INVALID_VALUE;
    bool same = fstat(fd, &facts) == 0 && facts.st_ino == name->inode && (size_t)facts.st_size == name->bytes;
    *out = (block){.bytes = name->bytes, .fd = -1, .lock = fd, .opened = 1, .name = *name};
    same = same && flock(fd, LOCK_SH | LOCK_NB) == 0;
    out->at = same ? mmap(NULL, name->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (out->at != MAP_FAILED) return ZS_CU_SUCCESS;
    (void)close(fd);
    return ZS_CU_ERROR_INVALID_VALUE;
}

zs_cu_result fake_import(zs_cu_ptr *out, const zs_cu_ipc_mem *handle)
{
    struct name name;
    memcpy(&name, handle, sizeof name);
    if (name.pid == getpid()) return ZS_CU_ERROR_INVALID_CONTEXT; /* as the real one has it */
    if (!sees(name.gpu)) return ZS_CU_ERROR_INVALID_VALUE;
    zs_cu_result result = ZS_CU_SUCCESS;
    (void)pthread_mutex_lock(&lock);
    block *one = blocks;
    while (one != NULL && !(one->opened > 0 && memcmp(&one->name, &name, sizeof name) == 0))
        one = one->next;
    if (one != NULL) {
        one->opened++;
    } else {
        block made;
        result = map(&name, &made);
        if (result == ZS_CU_SUCCESS) add(&made);
        one = blocks;
    }
    if (result == ZS_CU_SUCCESS) *out = (zs_cu_ptr)(uintptr_t)one->at;
    (void)pthread_mutex_unlock(&lock);
    return result;
}

zs_cu_result fake_close(zs_cu_ptr at)
{
    (void)pthread_mutex_lock(&lock);
    block **link = find((const void *)(uintptr_t)at);
    bool known = *link != NULL && (*link)->opened > 0 && (*link)->at == (const char *)(uintptr_t)at;
    if (known && --(*link)->opened == 0) drop(link);
    (void)pthread_mutex_unlock(&lock);
    return known ? ZS_CU_SUCCESS : ZS_CU_ERROR_INVALID_VALUE;
}

/* --- pinned host memory ---------------------------------------------------------------------------------------------------- */

zs_cu_result fake_pin(void **out, void *at, size_t bytes)
{
    block made = {.at = at, .bytes = bytes, .fd = -1, .lock = -1, .pinned = true, .malloced = at == NULL};
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
