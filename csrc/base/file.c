/* file.c - see file.h. */
#define _GNU_SOURCE 1 /* memfd_create, fallocate, F_SEAL_SHRINK */
#include "base/file.h"
#include "base/refs.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { HUGE_PAGE = 2 << 20 };

typedef struct bucket_slot {
    uint64_t offset, bytes;
    bool busy;
} bucket_slot;

struct zs_file {
    int fd;
    char *path;          /* of a file on disk; owned; NULL: of memory */
    bool named;          /* it can be opened by that */
    zs_file_freed freed; /* called when a flat is freed, with `arg`; or NULL */
    void *arg;
    bool kept;            /* freed regions keep their contents */
    bool common;          /* other processes grow it too */
    unsigned lifetime;    /* of the process that made it: a forked child must not punch holes */
    zs_refs refs;         /* the maker's and one per region */
    pthread_mutex_t lock; /* over what follows: regions may be freed on any thread */
    uint64_t end;         /* bytes given out so far */
    bucket_slot *slots;   /* regions of map_bucket, by index */
    size_t n_slots, room;
};

/* Peers may read a flat for longer than this rank has it: its space is freed with the file, when the last rank has
 * closed it. */
enum { A_FLAT = -1, READ_BY_PEERS = -2 };

/* State that a region's zs_mem needs to free the region. */
typedef struct region_owner {
    zs_file *file;
    uint64_t offset, bytes; /* of this rank's own region */
    int64_t slot;           /* index among the buckets; A_FLAT, READ_BY_PEERS: none of them */
    uint64_t before;        /* of the peers' regions that are mapped before it, in the same file */
} region_owner;

/* --- files -------------------------------------------------------------------------------------------------------- */

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x8U /* since Linux 6.3 */
#endif

/* If vm.memfd_noexec is 2, all memory files must be non-executable; older kernels do not know the flag. */
static int create_memory(const char *name)
{
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int file = memfd_create(name, flags | MFD_NOEXEC_SEAL);
    return file < 0 && errno == EINVAL ? memfd_create(name, flags) : file;
}

zs_status zs_file_memory(const char *name, size_t bytes, int *fd)
{
    int file = create_memory(name);
    if (file < 0) return ZS_FAIL_ERRNO("cannot create a shared-memory file (memfd_create)");
    if (ftruncate(file, (off_t)bytes) != 0 || fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
        zs_status status = ZS_FAIL_ERRNO("cannot size a shared-memory file");
        close(file);
        return status;
    }
    *fd = file;
    return ZS_OK;
}

/* A new handle of the file behind `fd`, which it takes over. */
static zs_status handle_new(int fd, zs_file **out)
{
    zs_file *file = calloc(1, sizeof *file);
    if (file == NULL) {
        close(fd);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a file object");
    }
    file->fd = fd;
    file->lifetime = zs_lifetime();
    zs_refs_init(&file->refs);
    pthread_mutex_init(&file->lock, NULL);
    *out = file;
    return ZS_OK;
}

zs_status zs_file_new(const char *name, zs_file **out)
{
    int fd;
    ZS_TRY(zs_file_memory(name, 0, &fd));
    return handle_new(fd, out);
}

zs_status zs_file_common(int fd, zs_file **out)
{
    ZS_TRY(handle_new(fd, out));
    (*out)->common = true;
    return ZS_OK;
}

/* Like ZS_FAIL_ERRNO, naming a directory. */
static zs_status fail_in(const char *directory, const char *what)
{
    char text[512];
    snprintf(text, sizeof text, "%s '%s'", what, directory);
    return ZS_FAIL_ERRNO(text);
}

zs_status zs_file_new_in(const char *directory, zs_file **out)
{
    size_t size = strlen(directory) + sizeof "/zshard-XXXXXX";
    char *path = malloc(size);
    if (path == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a file name");
    snprintf(path, size, "%s/zshard-XXXXXX", directory);
    int fd = mkostemp(path, O_CLOEXEC);
    zs_status status = fd < 0 ? fail_in(directory, "offload: cannot create a file in") : handle_new(fd, out);
    if (status != ZS_OK) {
        if (fd >= 0) unlink(path);
        free(path);
        return status;
    }
    (*out)->path = path;
    (*out)->named = true;
    return ZS_OK;
}

const char *zs_file_path(const zs_file *file)
{
    return file->path;
}

void zs_file_hide(zs_file *file)
{
    if (file->named) unlink(file->path);
    file->named = false;
}

void zs_file_on_free(zs_file *file, zs_file_freed call, void *arg)
{
    pthread_mutex_lock(&file->lock);
    file->freed = call;
    file->arg = arg;
    pthread_mutex_unlock(&file->lock);
}

uint64_t zs_file_end(zs_file *file)
{
    pthread_mutex_lock(&file->lock);
    uint64_t end = file->end;
    pthread_mutex_unlock(&file->lock);
    return end;
}

void zs_file_skip_to(zs_file *file, uint64_t end)
{
    pthread_mutex_lock(&file->lock);
    if (end > file->end) file->end = end;
    pthread_mutex_unlock(&file->lock);
}

void zs_file_keep(zs_file *file)
{
    file->kept = true;
}

void zs_file_release(zs_file *file)
{
    if (file == NULL || !zs_refs_drop(&file->refs)) return;
    if (file->lifetime == zs_lifetime()) zs_file_hide(file);
    free(file->path);
    close(file->fd);
    pthread_mutex_destroy(&file->lock);
    free(file->slots);
    free(file);
}

int zs_file_fd(const zs_file *file)
{
    return file->fd;
}

/* Larger regions start where a huge page may. */
static size_t region_align(size_t bytes)
{
    return bytes % HUGE_PAGE == 0 ? HUGE_PAGE : ZS_PAGE;
}

/* A hole that is touched when the disk has become full would be a SIGBUS. */
static zs_status reserve_on_disk(zs_file *file, uint64_t start, size_t bytes)
{
    int err = posix_fallocate(file->fd, (off_t)start, (off_t)bytes);
    if (err == 0) return ZS_OK;
    struct statvfs disk = {0};
    (void)fstatvfs(file->fd, &disk); /* only for the message */
    char text[512];
    snprintf(text, sizeof text, "offload: cannot grow '%s' by %zu MiB (disk has %llu MiB free)", file->path,
             bytes >> 20, (unsigned long long)disk.f_bavail * disk.f_frsize >> 20);
    errno = err;
    return ZS_FAIL_ERRNO(text);
}

/* Is the file at least so long? */
static bool has_length(const zs_file *file, uint64_t length)
{
    struct stat info;
    return fstat(file->fd, &info) == 0 && (uint64_t)info.st_size >= length;
}

/* Grows a file of memory. Where ranks grow one file, ftruncate() fails for the later rank: the file is longer already,
 * and sealed against shrinking. */
static zs_status lengthen(const zs_file *file, uint64_t length)
{
    if (file->common && has_length(file, length)) return ZS_OK;
    if (ftruncate(file->fd, (off_t)length) == 0 || (file->common && errno == EPERM && has_length(file, length)))
        return ZS_OK;
    return ZS_FAIL_ERRNO("cannot grow a shared-memory file");
}

/* Appends `bytes` to the file, aligned as regions of `shard_bytes` are. The caller holds the lock. */
static zs_status grow(zs_file *file, size_t bytes, size_t shard_bytes, uint64_t *offset)
{
    uint64_t start = zs_round_up(file->end, region_align(shard_bytes));
    ZS_TRY(file->path != NULL ? reserve_on_disk(file, start, bytes) : lengthen(file, start + bytes));
    file->end = start + bytes;
    *offset = start;
    return ZS_OK;
}

/* --- regions ------------------------------------------------------------------------------------------------------ */

/* The last reference to a region was dropped: unmap it, and free its pages unless this is a forked child. */
static void free_region(zs_mem *mem)
{
    region_owner *owner = mem->owner;
    zs_file *file = owner->file;
    zs_mapping_forget(mem->ptr);
    munmap(mem->ptr, mem->bytes);
    if (file->lifetime == zs_lifetime()) {
        pthread_mutex_lock(&file->lock);
        bool is_flat = owner->slot < 0, taken = file->kept || owner->slot == READ_BY_PEERS;
        if (is_flat && file->freed != NULL) taken = file->freed(file->arg, owner->offset, owner->bytes);
        if (!taken)
            fallocate(file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)owner->offset, (off_t)owner->bytes);
        if (!is_flat) file->slots[owner->slot].busy = false;
        pthread_mutex_unlock(&file->lock);
    }
    zs_file_release(file);
    free(owner);
}

/* Wraps a mapping as a zs_mem that owns the region; unmaps it on failure. */
static zs_status wrap_region(void *ptr, size_t mapped, region_owner made, zs_mem **out)
{
    zs_mem_count_mapping();
    region_owner *owner = malloc(sizeof *owner);
    zs_status status = owner == NULL ? ZS_ERR_MEMORY : ZS_OK;
    zs_mapping mapping = {ptr, mapped, made.offset - made.before, made.file->fd};
    if (made.file->path == NULL) ZS_THEN(status, zs_mapping_note(&mapping));
    if (status == ZS_OK) {
        *owner = made;
        status = zs_mem_wrap(ptr, mapped, free_region, owner, out);
    }
    if (status != ZS_OK) {
        zs_mapping_forget(ptr);
        free(owner);
        munmap(ptr, mapped);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a region descriptor");
    }
    zs_refs_take(&made.file->refs);
    return ZS_OK;
}

bool zs_file_holds(const zs_file *file, const zs_mem *mem)
{
    return mem->destroy == free_region && ((const region_owner *)mem->owner)->file == file;
}

uint64_t zs_file_offset_of(const zs_mem *mem)
{
    return ((const region_owner *)mem->owner)->offset;
}

/* Address space for `bytes`, aligned to `align`, that nothing else will be given. */
static zs_status reserve(size_t bytes, size_t align, char **out)
{
    size_t slack = align > ZS_PAGE ? align : 0;
    char *start = mmap(NULL, bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return ZS_FAIL(ZS_ERR_MEMORY, "cannot reserve %zu bytes of address space: %s", bytes + slack, strerror(errno));
    size_t front = slack == 0 ? 0 : (align - (uintptr_t)start % align) % align;
    if (front > 0) munmap(start, front);
    if (slack > front) munmap(start + front + bytes, slack - front);
    *out = start + front;
    return ZS_OK;
}

/* Peers' parts are writable too: what user code writes into a gathered parameter must reach its owner, as it would
 * reach the copy of a gathering transport, and must not be a SIGSEGV. */
static char *map_at(char *place, size_t bytes, int fd, uint64_t offset)
{
    return mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, (off_t)offset);
}

/* Maps every rank's region at `offset` into the reserved range, in rank order. */
static zs_status map_side_by_side(const int *fds, int own_fd, int world, size_t shard_bytes, uint64_t offset,
                                  char *base)
{
    for (int r = 0; r < world; r++) {
        char *place = base + (size_t)r * shard_bytes;
        if (map_at(place, shard_bytes, fds[r], offset) == MAP_FAILED)
            return ZS_FAIL(
                ZS_ERR_MEMORY,
                "cannot map %zu bytes of the memory of rank %d: %s (if units x ranks is large, raise vm.max_map_count)",
                shard_bytes, r, strerror(errno));
        if (shard_bytes % HUGE_PAGE == 0) madvise(place, shard_bytes, MADV_HUGEPAGE); /* advice, may fail */
        if (fds[r] != own_fd) madvise(place, shard_bytes, MADV_DONTDUMP); /* a core dump holds the own shard */
    }
    return ZS_OK;
}

zs_status zs_file_append(zs_file *file, size_t bytes, size_t shard_bytes, uint64_t *offset)
{
    if (shard_bytes == 0 || shard_bytes % ZS_PAGE != 0)
        return ZS_FAIL(ZS_ERR_VALUE, "shard size must be a multiple of %d, got %zu bytes", (int)ZS_PAGE, shard_bytes);
    pthread_mutex_lock(&file->lock);
    zs_status status = grow(file, bytes, shard_bytes, offset);
    pthread_mutex_unlock(&file->lock);
    return status;
}

zs_status zs_file_map_common(zs_file *file, int rank, int world, size_t shard_bytes, zs_mem **out)
{
    uint64_t offset = 0;
    size_t bytes = shard_bytes * (size_t)world, before = shard_bytes * (size_t)rank;
    char *base = NULL;
    ZS_TRY(zs_file_append(file, bytes, shard_bytes, &offset));
    ZS_TRY(reserve(bytes, region_align(shard_bytes), &base));
    if (map_at(base, bytes, file->fd, offset) == MAP_FAILED) {
        zs_status status = ZS_FAIL(ZS_ERR_MEMORY, "cannot map %zu bytes of shared memory: %s", bytes, strerror(errno));
        munmap(base, bytes);
        return status;
    }
    if (shard_bytes % HUGE_PAGE == 0) madvise(base, bytes, MADV_HUGEPAGE); /* advice, may fail */
    madvise(base, before, MADV_DONTDUMP);                                  /* a core dump holds the own shard */
    madvise(base + before + shard_bytes, bytes - before - shard_bytes, MADV_DONTDUMP);
    return wrap_region(base, bytes, (region_owner){file, offset + before, shard_bytes, A_FLAT, before}, out);
}

zs_status zs_file_set_apart(zs_mem *mem, int rank, bool apart)
{
    const region_owner *owner = mem->owner;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    char *made = apart ? mmap(mem->ptr, mem->bytes, PROT_READ | PROT_WRITE, flags, -1, 0)
                       : map_at(mem->ptr, mem->bytes, owner->file->fd, owner->offset - (uint64_t)rank * owner->bytes);
    if (made != MAP_FAILED) return ZS_OK;
    return ZS_FAIL(ZS_ERR_MEMORY, "cannot replace a mapping of %zu bytes: %s", mem->bytes, strerror(errno));
}

zs_status zs_file_map_flat(zs_file *file, const int *fds, int world, size_t shard_bytes, zs_mem **out)
{
    uint64_t offset = 0;
    size_t bytes = shard_bytes * (size_t)world;
    char *base = NULL;
    ZS_TRY(zs_file_append(file, shard_bytes, shard_bytes, &offset));
    ZS_TRY(reserve(bytes, region_align(shard_bytes), &base));
    zs_status status = map_side_by_side(fds, file->fd, world, shard_bytes, offset, base);
    if (status != ZS_OK) {
        munmap(base, bytes);
        return status;
    }
    return wrap_region(base, bytes, (region_owner){file, offset, shard_bytes, world > 1 ? READ_BY_PEERS : A_FLAT, 0},
                       out);
}

/* A free slot of exactly `bytes`, -1 if there is none. A larger one would work, but would make a unit's bucket as large
 * as that of the model that was there before; a free slot only takes address space in the file. */
static int64_t find_slot(const zs_file *file, uint64_t bytes)
{
    for (size_t i = 0; i < file->n_slots; i++)
        if (!file->slots[i].busy && file->slots[i].bytes == bytes) return (int64_t)i;
    return -1;
}

/* A new slot at the end of the file. */
static zs_status add_slot(zs_file *file, size_t bytes, int64_t *index)
{
    if (file->n_slots == file->room) {
        size_t room = file->room == 0 ? 16 : 2 * file->room;
        bucket_slot *slots = realloc(file->slots, room * sizeof *slots);
        if (slots == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory growing the list of buckets");
        file->slots = slots;
        file->room = room;
    }
    bucket_slot *slot = &file->slots[file->n_slots];
    *slot = (bucket_slot){.bytes = bytes};
    ZS_TRY(grow(file, bytes, bytes, &slot->offset));
    *index = (int64_t)file->n_slots++;
    return ZS_OK;
}

size_t zs_file_bucket_room(size_t bytes)
{
    return zs_round_up(bytes ? bytes : 1, bytes >= HUGE_PAGE ? HUGE_PAGE : ZS_PAGE);
}

zs_status zs_file_map_bucket(zs_file *file, size_t bytes, zs_region *region, zs_mem **out)
{
    size_t need = zs_file_bucket_room(bytes);
    pthread_mutex_lock(&file->lock);
    int64_t index = find_slot(file, need);
    zs_status status = index >= 0 ? ZS_OK : add_slot(file, need, &index);
    if (status == ZS_OK) file->slots[index].busy = true;
    pthread_mutex_unlock(&file->lock);
    if (status != ZS_OK) return status;

    *region = zs_file_region(file, (uint64_t)index);
    void *ptr =
        mmap(NULL, region->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file->fd, (off_t)region->offset);
    if (ptr == MAP_FAILED) {
        status = ZS_FAIL(ZS_ERR_MEMORY, "cannot map a bucket of %zu bytes: %s", bytes, strerror(errno));
    } else {
        if (region->bytes % HUGE_PAGE == 0) madvise(ptr, region->bytes, MADV_HUGEPAGE); /* advice, may fail */
        region_owner owner = {file, region->offset, region->bytes, index, 0};
        status = wrap_region(ptr, region->bytes, owner, out);
    }
    if (status != ZS_OK) {
        pthread_mutex_lock(&file->lock);
        file->slots[index].busy = false;
        pthread_mutex_unlock(&file->lock);
    }
    return status;
}

zs_region zs_file_region(zs_file *file, uint64_t index)
{
    pthread_mutex_lock(&file->lock);
    zs_region region = {index, file->slots[index].offset, file->slots[index].bytes};
    pthread_mutex_unlock(&file->lock);
    return region;
}
