/* disk.c - see disk.h. */
#define _GNU_SOURCE /* O_CLOEXEC, O_DIRECT */
#include "unit/disk.h"

#include "base/file.h"
#include "base/log.h"
#include "base/refs.h"
#include "pager/pager.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct zs_disk {
    zs_refs refs;
    const zs_device *device; /* not NULL: in its host's memory, with no file */
    zs_file *file;           /* owned */
    int *fds;   /* [world] the ranks' files where they are mapped side by side, else [1]; all but the own are owned */
    int direct; /* the own file once more, for direct I/O; -1: none; owned */
    int rank, world;
    bool mapped;           /* the transport gives the full buffer with a flat */
    _Atomic uint64_t keys; /* flats so far: equal on all ranks */
    _Atomic size_t bytes;  /* of this rank's regions */
};

/* State that a region's zs_mem needs to free the region. */
typedef struct region {
    zs_mem *mem;   /* owned reference: the file's mapping */
    zs_disk *disk; /* owned reference */
    size_t bytes;  /* of this rank's part */
} region;

zs_disk *zs_disk_retain(zs_disk *disk)
{
    zs_refs_take(&disk->refs);
    return disk;
}

void zs_disk_release(zs_disk *disk)
{
    if (disk == NULL || !zs_refs_drop(&disk->refs)) return;
    for (int r = 0; r < disk->world && disk->fds != NULL; r++)
        if (r != disk->rank && disk->fds[r] >= 0) close(disk->fds[r]);
    zs_file_release(disk->file);
    if (disk->direct >= 0) close(disk->direct);
    free(disk->fds);
    free(disk);
}

/* --- meeting ------------------------------------------------------------------------------------------------------ */

enum { PATH_ROOM = 4000 };

/* A rank's message about its file. */
typedef struct calling_card {
    uint64_t device, inode; /* a path may lead elsewhere on another rank: containers */
    int failed;
    char path[PATH_ROOM];
} calling_card;

static zs_status agree(zs_comm *all, zs_status own, const char *what)
{
    int failed = own != ZS_OK, every[all->world];
    zs_status status = zs_comm_exchange(all, &failed, sizeof failed, every);
    if (own != ZS_OK || status != ZS_OK) return own != ZS_OK ? own : status;
    for (int r = 0; r < all->world; r++)
        if (every[r]) return ZS_FAIL(ZS_ERR_STATE, "offload: rank %d %s; see the error of that rank", r, what);
    return ZS_OK;
}

static zs_status open_peer(const calling_card *card, int rank, int *fd)
{
    struct stat found;
    *fd = open(card->path, O_RDWR | O_CLOEXEC);
    bool same = *fd >= 0 && fstat(*fd, &found) == 0 && found.st_dev == card->device && found.st_ino == card->inode;
    if (same) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE,
                   "offload: cannot open the file of rank %d on the same host, '%s' (%s): pass a directory that all "
                   "ranks of the host can access, or transport='c10d'",
                   rank, card->path, *fd < 0 ? strerror(errno) : "the path names a different file here");
}

static zs_status describe_own(const zs_disk *disk, calling_card *card)
{
    struct stat found;
    const char *path = zs_file_path(disk->file);
    if (strlen(path) >= PATH_ROOM)
        return ZS_FAIL(ZS_ERR_VALUE, "offload: path too long: '%.200s...'; use a shorter one", path);
    if (fstat(zs_file_fd(disk->file), &found) != 0) return ZS_FAIL_ERRNO("offload: fstat");
    card->device = found.st_dev;
    card->inode = found.st_ino;
    snprintf(card->path, PATH_ROOM, "%s", path);
    return ZS_OK;
}

/* Opens the files of all ranks of `shards`. cards: [world + 1] */
static zs_status meet(zs_disk *disk, zs_comm *shards, calling_card *cards)
{
    calling_card *own = &cards[shards->world];
    zs_status status = describe_own(disk, own);
    own->failed = status != ZS_OK;
    zs_status met = zs_comm_exchange(shards, own, sizeof *own, cards);
    ZS_ALSO(status, met);
    for (int r = 0; r < shards->world && status == ZS_OK; r++)
        if (r != disk->rank && !cards[r].failed) status = open_peer(&cards[r], r, &disk->fds[r]);
    return status;
}

/* Opened again, by its descriptor: the file may have no name any more, and other users share its offset and flags. */
static int open_directly(int fd)
{
    const char *wanted = getenv("ZSHARD_OFFLOAD_DIRECT");
    if (wanted != NULL && strcmp(wanted, "0") == 0) return -1;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int direct = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    if (direct < 0)
        zs_log(ZS_LOG_INFO, "offload: the file system has no direct I/O: pages go through the kernel's cache");
    return direct;
}

static zs_status open_own(zs_disk *disk, const char *directory)
{
    size_t n = (size_t)disk->world;
    disk->fds = malloc(n * sizeof *disk->fds);
    if (disk->fds == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating %zu file descriptors", n);
    for (size_t r = 0; r < n; r++)
        disk->fds[r] = -1;
    ZS_TRY(zs_file_new_in(directory, &disk->file));
    disk->fds[disk->rank] = zs_file_fd(disk->file);
    disk->direct = open_directly(disk->fds[disk->rank]);
    return ZS_OK;
}

/* One without any file yet; NULL: out of memory. */
static zs_disk *disk_alloc(void)
{
    zs_disk *disk = calloc(1, sizeof *disk);
    if (disk == NULL) return NULL;
    zs_refs_init(&disk->refs);
    disk->direct = -1;
    return disk;
}

zs_status zs_disk_new(const char *directory, zs_comm *all, zs_comm *shards, zs_disk **out)
{
    const int world = shards->ops->mapped ? shards->world : 1;
    zs_disk *disk = disk_alloc();
    calling_card *cards = calloc((size_t)world + 1, sizeof *cards); /* before the peers wait for this rank */
    zs_status status;
    if (disk == NULL || cards == NULL) {
        status = ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating an offload directory");
    } else {
        disk->mapped = shards->ops->mapped;
        disk->world = world;
        disk->rank = disk->mapped ? shards->rank : 0;
        status = open_own(disk, directory);
    }
    status = agree(all, status, "could not create its file");
    if (status == ZS_OK && cards != NULL && world > 1) status = meet(disk, shards, cards);
    if (status == ZS_OK || world > 1) status = agree(all, status, "could not open the files of its peers");
    free(cards);
    if (disk != NULL && disk->file != NULL) zs_file_hide(disk->file);
    if (status != ZS_OK) {
        zs_disk_release(disk);
        return status;
    }
    *out = disk;
    return ZS_OK;
}

zs_status zs_disk_new_on_host(const zs_device *device, zs_disk **out)
{
    if (device->ops->mem_new_host == NULL)
        return ZS_FAIL(
            ZS_ERR_VALUE,
            "offload: offloading to host memory requires a GPU: omit it, as everything is in host memory already");
    zs_disk *disk = disk_alloc();
    if (disk == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating an offload to host memory");
    disk->device = device;
    disk->world = 1;
    *out = disk;
    return ZS_OK;
}

/* --- regions ------------------------------------------------------------------------------------------------------ */

static void free_region(zs_mem *mem)
{
    region *owner = mem->owner;
    if (owner->disk->device == NULL) zs_pager_remove(mem->ptr);
    zs_mem_release(owner->mem);
    atomic_fetch_sub(&owner->disk->bytes, owner->bytes);
    zs_disk_release(owner->disk);
    free(owner);
}

/* Registers the mapping `mem` of `parts` regions with the pager, and takes it over. */
static zs_status wrap(zs_disk *disk, zs_mem *mem, size_t part_bytes, zs_mem **out)
{
    int parts = (int)(mem->bytes / part_bytes), own = parts > 1 ? disk->rank : 0;
    zs_pager_map map = {mem->ptr, part_bytes, parts, own, NULL, zs_file_offset_of(mem), disk->direct};
    map.fds = parts > 1 ? disk->fds : &disk->fds[disk->rank];
    region *owner = malloc(sizeof *owner);
    zs_status status = owner == NULL ? ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a region") : zs_pager_add(&map);
    bool known = status == ZS_OK;
    if (known) {
        *owner = (region){mem, zs_disk_retain(disk), part_bytes};
        status = zs_mem_wrap(mem->ptr, mem->bytes, free_region, owner, out);
    }
    if (status == ZS_OK) {
        atomic_fetch_add(&disk->bytes, part_bytes);
        return ZS_OK;
    }
    if (known) {
        zs_pager_remove(map.ptr);
        zs_disk_release(disk);
    }
    free(owner);
    zs_mem_release(mem);
    return status;
}

static zs_status take_on_host(zs_disk *disk, size_t bytes, zs_mem **out)
{
    zs_mem *mem = NULL;
    region *owner = malloc(sizeof *owner);
    zs_status status = owner == NULL ? ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a region")
                                     : disk->device->ops->mem_new_host(disk->device, bytes, &mem);
    ZS_THEN(status, zs_mem_wrap(mem->ptr, mem->bytes, free_region, owner, out));
    if (status != ZS_OK) {
        zs_mem_release(mem);
        free(owner);
        return status;
    }
    *owner = (region){mem, zs_disk_retain(disk), mem->bytes};
    (*out)->device = mem->device;
    (*out)->on_host = true;
    atomic_fetch_add(&disk->bytes, mem->bytes);
    return ZS_OK;
}

zs_status zs_disk_take(zs_disk *disk, size_t bytes, zs_mem **out)
{
    if (disk->device != NULL) return take_on_host(disk, bytes, out);
    size_t room = zs_round_up(bytes ? bytes : 1, ZS_PAGE);
    zs_mem *mem = NULL;
    ZS_TRY(zs_file_map_own(disk->file, room, &mem));
    return wrap(disk, mem, room, out);
}

zs_status zs_disk_flat_new(zs_disk *disk, size_t shard_bytes, zs_flat_mem *out)
{
    out->shard_bytes = shard_bytes;
    out->key = UINT64_C(1) << 62 | atomic_fetch_add(&disk->keys, 1); /* apart from those that transports give */
    if (disk->world == 1) { /* `mapped` is never set for a host's memory, which is copied */
        ZS_TRY(zs_disk_take(disk, shard_bytes, &out->mem));
        out->shard = out->mem->ptr;
        if (disk->mapped) out->full = out->shard;
        return ZS_OK;
    }
    zs_mem *mem = NULL;
    ZS_TRY(zs_file_map_flat(disk->file, disk->fds, disk->world, shard_bytes, &mem));
    ZS_TRY(wrap(disk, mem, shard_bytes, &out->mem));
    out->full = out->mem->ptr;
    out->shard = out->full + (size_t)disk->rank * shard_bytes;
    return ZS_OK;
}

size_t zs_disk_bytes(const zs_disk *disk)
{
    return disk == NULL ? 0 : atomic_load(&disk->bytes);
}
