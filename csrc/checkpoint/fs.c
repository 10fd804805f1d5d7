/* fs.c - see fs.h. */
#define _GNU_SOURCE /* renameat2, fallocate, sync_file_range */
#include "checkpoint/fs.h"

#include "checkpoint/fs_watch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

static const zs_fs_watcher *watcher; /* __atomic access only */

void zs_fs_watch(const zs_fs_watcher *who)
{
    __atomic_store_n(&watcher, who, __ATOMIC_RELEASE);
}

static zs_fs_fate before(void)
{
    const zs_fs_watcher *who = __atomic_load_n(&watcher, __ATOMIC_ACQUIRE);
    return who != NULL ? who->before() : (zs_fs_fate){0};
}

static long after(zs_fs_fate fate, long result, const zs_fs_entry *entry)
{
    const zs_fs_watcher *who = __atomic_load_n(&watcher, __ATOMIC_ACQUIRE);
    return who != NULL ? who->after(fate, result, entry) : result;
}

static long failed(int err)
{
    errno = err;
    return -1;
}

/* Makes `call` under the watcher and logs it: `...` are the fields of its zs_fs_entry. */
#define RETURN_CALL(type, call, ...)                      \
    do {                                                  \
        zs_fs_fate fate = before();                       \
        long result = fate.err ? failed(fate.err) : call; \
        zs_fs_entry entry = {__VA_ARGS__};                \
        return (type)after(fate, result, &entry);         \
    } while (0)

int zs_fs_open(const char *path, int flags)
{
    zs_fs_fate fate = before();
    int fd = fate.err ? (int)failed(fate.err) : open(path, flags | O_CLOEXEC, 0666);
    zs_fs_entry entry = {.call = flags & O_CREAT ? "create" : "open", .path = path, .fd = fd};
    return (int)after(fate, fd, &entry);
}

int zs_fs_close(int fd)
{
    zs_fs_fate fate = before();
    long result = close(fd);
    zs_fs_entry entry = {.call = "close", .fd = fd};
    return (int)after(fate, fate.err ? failed(fate.err) : result, &entry);
}

int zs_fs_stat(int fd, struct stat *out)
{
    RETURN_CALL(int, fstat(fd, out), .call = "stat", .fd = fd);
}

int zs_fs_disk(int fd, struct statvfs *out)
{
    RETURN_CALL(int, fstatvfs(fd, out), .call = "disk", .fd = fd);
}

/* Bytes that a call to be cut short transfers: at least one, as zero would be the end of the file. */
static size_t cut(zs_fs_fate fate, size_t bytes)
{
    return fate.half && bytes > 1 ? bytes / 2 : bytes;
}

ssize_t zs_fs_read(int fd, void *memory, size_t bytes, int64_t offset)
{
    RETURN_CALL(ssize_t, pread(fd, memory, cut(fate, bytes), offset), .call = "read", .fd = fd, .offset = offset,
                .length = result);
}

ssize_t zs_fs_write(int fd, const void *memory, size_t bytes, int64_t offset)
{
    RETURN_CALL(ssize_t, pwrite(fd, memory, cut(fate, bytes), offset), .call = "write", .fd = fd, .offset = offset,
                .length = result, .data = memory);
}

int zs_fs_reserve(int fd, int64_t bytes)
{
    RETURN_CALL(int, fallocate(fd, 0, 0, bytes), .call = "reserve", .fd = fd, .length = bytes);
}

int zs_fs_truncate(int fd, int64_t bytes)
{
    RETURN_CALL(int, ftruncate(fd, bytes), .call = "truncate", .fd = fd, .length = bytes);
}

int zs_fs_write_back(int fd, int64_t offset, int64_t bytes)
{
    RETURN_CALL(int, sync_file_range(fd, offset, bytes, SYNC_FILE_RANGE_WRITE), .call = "write_back", .fd = fd,
                .offset = offset, .length = bytes);
}

int zs_fs_sync(int fd)
{
    RETURN_CALL(int, fsync(fd), .call = "sync", .fd = fd);
}

int zs_fs_lock(int fd, int operation)
{
    RETURN_CALL(int, flock(fd, operation), .call = "lock", .fd = fd);
}

int zs_fs_make_folder(const char *path)
{
    RETURN_CALL(int, mkdir(path, 0777), .call = "make_folder", .path = path);
}

int zs_fs_remove_folder(const char *path)
{
    RETURN_CALL(int, rmdir(path), .call = "remove_folder", .path = path);
}

int zs_fs_remove(const char *path)
{
    RETURN_CALL(int, unlink(path), .call = "remove", .path = path);
}

int zs_fs_rename(const char *from, const char *to, unsigned flags)
{
    RETURN_CALL(int, renameat2(AT_FDCWD, from, AT_FDCWD, to, flags), .call = flags == ZS_FS_SWAP ? "swap" : "rename",
                .path = from, .to = to);
}
