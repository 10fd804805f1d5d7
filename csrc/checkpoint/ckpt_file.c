/* ckpt_file.c - see ckpt_file.h. */
#define _GNU_SOURCE /* O_NOFOLLOW */
#include "checkpoint/ckpt_file.h"

#include "base/clock.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIECE = 256 << 10,    /* written at once: fits a core's second-level cache */
    STRETCH = 4 << 20,    /* read at once: the system copies it, no cache has to hold it */
    BEHIND = 32 << 20,    /* bytes written until the disk is set to work on them */
    ASK_EVERY = 100000000 /* nanoseconds between two checks for Ctrl-C */
};

static bool (*_Atomic wait_hook)(void);

void zs_ckpt_on_wait(bool (*interrupted)(void))
{
    atomic_store(&wait_hook, interrupted);
}

/* Asks the hook if `*next` has come, or if `at_once`: a system call has been interrupted. */
static zs_status go_on(int64_t *next, bool at_once)
{
    bool (*hook)(void) = atomic_load(&wait_hook);
    int64_t time = zs_clock_ns();
    if (hook == NULL || (time < *next && !at_once)) return ZS_OK;
    *next = time + ASK_EVERY;
    return hook() ? ZS_FAIL(ZS_ERR_TORCH, "interrupted while reading or writing a file") : ZS_OK;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* --- open and close ----------------------------------------------------------------------------------------------- */

static const char *kind_of(mode_t mode)
{
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a FIFO";
    if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
    return "of an unknown type";
}

static zs_status must_be_regular(const zs_ckpt_file *file)
{
    struct stat facts;
    if (zs_fs_stat(file->fd, &facts) != 0) return ZS_FAIL_ERRNO("fstat");
    if (S_ISREG(facts.st_mode)) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE, "'%s' is not a regular file: it is %s", file->path, kind_of(facts.st_mode));
}

/* Opens, again after an interrupt. (Of network file systems open can be interrupted.) */
static zs_status open_file(const char *path, int flags, zs_ckpt_file *out)
{
    int64_t next = 0;
    out->path = path;
    while ((out->fd = zs_fs_open(path, flags)) < 0) {
        if (errno != EINTR) return ZS_FAIL_ERRNO("open");
        ZS_TRY(go_on(&next, true));
    }
    return ZS_OK;
}

static zs_status open_regular(const char *path, int flags, zs_ckpt_file *out)
{
    ZS_TRY(open_file(path, flags | O_NONBLOCK | O_NOCTTY, out));
    zs_status status = must_be_regular(out);
    if (status != ZS_OK) (void)zs_ckpt_file_close(out);
    return status;
}

zs_status zs_ckpt_file_open(const char *path, bool follow, zs_ckpt_file *out)
{
    return open_regular(path, O_RDONLY | (follow ? 0 : O_NOFOLLOW), out);
}

zs_status zs_ckpt_file_open_to_write(const char *path, zs_ckpt_file *out)
{
    return open_regular(path, O_RDWR | O_NOFOLLOW, out);
}

/* To reserve more than is free would first take all that is: other programs would find the disk full. */
static zs_status must_have_free(const zs_ckpt_file *file, int64_t bytes)
{
    struct statvfs disk;
    if (zs_fs_disk(file->fd, &disk) != 0 || disk.f_blocks == 0 || disk.f_frsize == 0) return ZS_OK; /* unknown */
    if ((uint64_t)bytes / disk.f_frsize <= disk.f_bavail) return ZS_OK;
    errno = ENOSPC;
    return ZS_FAIL_ERRNO("fallocate");
}

/* Room on the disk, or where the file system cannot promise any, the length alone. */
static zs_status reserve(const zs_ckpt_file *file, int64_t bytes)
{
    int64_t next = 0;
    ZS_TRY(must_have_free(file, bytes));
    while (bytes > 0 && zs_fs_reserve(file->fd, bytes) != 0) {
        if (errno == EINTR) {
            ZS_TRY(go_on(&next, true));
            continue;
        }
        if (errno != EOPNOTSUPP && errno != ENOSYS) return ZS_FAIL_ERRNO("fallocate");
        return zs_fs_truncate(file->fd, bytes) == 0 ? ZS_OK : ZS_FAIL_ERRNO("ftruncate");
    }
    return ZS_OK;
}

zs_status zs_ckpt_file_create(const char *path, int64_t bytes, zs_ckpt_file *out)
{
    if (bytes < 0) return ZS_FAIL(ZS_ERR_VALUE, "file size must not be negative, got %lld bytes", (long long)bytes);
    ZS_TRY(open_file(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, out));
    zs_status status = reserve(out, bytes);
    if (status != ZS_OK) {
        (void)zs_fs_remove(path);
        (void)zs_ckpt_file_close(out);
    }
    return status;
}

zs_status zs_ckpt_file_close(zs_ckpt_file *file)
{
    if (file->fd < 0) return ZS_OK;
    int fd = file->fd;
    file->fd = -1;
    if (zs_fs_close(fd) == 0 || errno == EINTR) return ZS_OK; /* interrupted or not, Linux has closed it */
    return ZS_FAIL_ERRNO("close");
}

zs_status zs_ckpt_file_size(const zs_ckpt_file *file, int64_t *out)
{
    struct stat facts;
    if (zs_fs_stat(file->fd, &facts) != 0) return ZS_FAIL_ERRNO("fstat");
    *out = facts.st_size;
    return ZS_OK;
}

zs_status zs_ckpt_file_sync(const zs_ckpt_file *file)
{
    return zs_fs_sync(file->fd) == 0 ? ZS_OK : ZS_FAIL_ERRNO("fsync");
}

/* --- ranges ------------------------------------------------------------------------------------------------------- */

static zs_status check_range(const zs_ckpt_file *file, const zs_ckpt_range *range)
{
    if (range->offset >= 0 && range->bytes <= (uint64_t)(INT64_MAX - range->offset)) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE, "'%s': %zu bytes at offset %lld are out of range", file->path, range->bytes,
                   (long long)range->offset);
}

zs_status zs_ckpt_file_reaches(const zs_ckpt_file *file, const zs_ckpt_range *ranges, size_t n)
{
    int64_t size;
    ZS_TRY(zs_ckpt_file_size(file, &size));
    for (size_t i = 0; i < n; i++) {
        ZS_TRY(check_range(file, &ranges[i]));
        int64_t end = ranges[i].offset + (int64_t)ranges[i].bytes;
        if (end > size && ranges[i].bytes > 0)
            return ZS_FAIL(ZS_ERR_VALUE, "'%s' ends at byte %lld, before byte %lld: it is truncated; copy it again",
                           file->path, (long long)size, (long long)end);
    }
    return ZS_OK;
}

/* Reads all of `bytes`. */
static zs_status read_all(const zs_ckpt_file *file, char *memory, size_t bytes, int64_t offset, int64_t *next)
{
    while (bytes > 0) {
        size_t wanted = bytes < STRETCH ? bytes : STRETCH;
        ssize_t got = zs_fs_read(file->fd, memory, wanted, offset);
        if (got < 0 && errno != EINTR) return ZS_FAIL_ERRNO("pread");
        if (got == 0)
            return ZS_FAIL(ZS_ERR_VALUE,
                           "'%s' ends at or before byte %lld instead of %lld: it was truncated while being read",
                           file->path, (long long)offset, (long long)offset + (long long)bytes);
        ZS_TRY(go_on(next, got < 0));
        if (got < 0) continue;
        memory += got;
        bytes -= (size_t)got;
        offset += got;
    }
    return ZS_OK;
}

zs_status zs_ckpt_file_read(const zs_ckpt_file *file, const zs_ckpt_range *ranges, size_t n)
{
    int64_t next = zs_clock_ns() + ASK_EVERY;
    ZS_TRY(zs_ckpt_file_reaches(file, ranges, n));
    for (size_t i = 0; i < n; i++)
        ZS_TRY(read_all(file, ranges[i].memory, ranges[i].bytes, ranges[i].offset, &next));
    return ZS_OK;
}

/* State of a long write. */
typedef struct progress {
    int64_t next;       /* when to check for Ctrl-C */
    int64_t begin, end; /* the range that the disk has not been set to work on, */
    int64_t own;        /* and how much of it this call has written */
} progress;

/* [at, at + bytes) has been written. The disk begins while memory is still being copied, so that fsync has little to
 * wait for. Other ranks write in between; their bytes may be written out as well. */
static void write_behind(const zs_ckpt_file *file, progress *so_far, int64_t at, int64_t bytes)
{
    if (so_far->own == 0 || at < so_far->begin) so_far->begin = at;
    if (so_far->own == 0 || at + bytes > so_far->end) so_far->end = at + bytes;
    so_far->own += bytes;
    if (so_far->own < BEHIND) return;
    (void)zs_fs_write_back(file->fd, so_far->begin, so_far->end - so_far->begin);
    so_far->own = 0;
}

static zs_status write_all(const zs_ckpt_file *file, const char *memory, size_t bytes, int64_t offset, int64_t *next)
{
    while (bytes > 0) {
        ssize_t put = zs_fs_write(file->fd, memory, bytes, offset);
        if (put == 0) errno = EIO; /* it would not end */
        if (put <= 0 && errno != EINTR) return ZS_FAIL_ERRNO("pwrite");
        ZS_TRY(go_on(next, put < 0));
        if (put < 0) continue;
        memory += put;
        bytes -= (size_t)put;
        offset += put;
    }
    return ZS_OK;
}

static zs_status check_numbers(const zs_ckpt_file *file, const zs_ckpt_range *range, int64_t block)
{
    int64_t size = (int64_t)zs_floats_size(range->numbers);
    if (range->offset % size == 0 && (int64_t)range->bytes % size == 0 && block % size == 0) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE,
                   "'%s': %zu bytes at offset %lld in blocks of %lld are not aligned to elements of %lld bytes",
                   file->path, range->bytes, (long long)range->offset, (long long)block, (long long)size);
}

zs_status zs_ckpt_file_sums(const zs_ckpt_file *file, const zs_ckpt_range *ranges, size_t n, int64_t block, size_t *out)
{
    if (block < 1) return ZS_FAIL(ZS_ERR_VALUE, "block size must be positive, got %lld bytes", (long long)block);
    size_t sums = 0;
    for (size_t i = 0; i < n; i++) {
        ZS_TRY(check_range(file, &ranges[i]));
        ZS_TRY(check_numbers(file, &ranges[i], block));
        if (ranges[i].bytes == 0) continue;
        int64_t first = ranges[i].offset / block;
        int64_t last = (ranges[i].offset + (int64_t)ranges[i].bytes - 1) / block;
        sums += (size_t)(last - first) + 1;
    }
    *out = sums;
    return ZS_OK;
}

/* Bytes of [at, end) that belong to the block at `at`. */
static int64_t in_block(int64_t at, int64_t end, int64_t block)
{
    return smaller(end - at, block - at % block);
}

/* Writes what lies in one block, looking at each piece and summing it before it goes. */
static zs_status write_block(const zs_ckpt_file *file, zs_ckpt_range *range, zs_ckpt_sum *sum, progress *so_far)
{
    const char *memory = (const char *)range->memory + ((int64_t)sum->offset - range->offset);
    uint32_t crc = 0;
    for (size_t done = 0, piece = 0; done < sum->bytes; done += piece) {
        piece = sum->bytes - done < PIECE ? sum->bytes - done : PIECE;
        crc = zs_crc32c(crc, memory + done, piece);
        range->strange |= !zs_all_finite(range->numbers, memory + done, piece);
        int64_t at = (int64_t)(sum->offset + done);
        ZS_TRY(write_all(file, memory + done, piece, at, &so_far->next));
        write_behind(file, so_far, at, (int64_t)piece);
    }
    sum->crc = crc;
    return ZS_OK;
}

zs_status zs_ckpt_file_write(const zs_ckpt_file *file, zs_ckpt_range *ranges, size_t n, int64_t block,
                             zs_ckpt_sum *sums)
{
    progress so_far = {.next = zs_clock_ns() + ASK_EVERY};
    for (size_t i = 0; i < n; i++) {
        int64_t begin = ranges[i].offset, end = begin + (int64_t)ranges[i].bytes;
        for (int64_t at = begin; at < end; at += (int64_t)(sums++)->bytes) {
            *sums = (zs_ckpt_sum){(uint64_t)at, (uint64_t)in_block(at, end, block), 0};
            ZS_TRY(write_block(file, &ranges[i], sums, &so_far));
        }
    }
    return ZS_OK;
}

/* Sums one block, by way of `room` [PIECE]. */
static zs_status check_block(const zs_ckpt_file *file, char *room, zs_ckpt_sum *sum, int64_t *next)
{
    uint32_t crc = 0;
    for (size_t done = 0, piece = 0; done < sum->bytes; done += piece) {
        piece = sum->bytes - done < PIECE ? sum->bytes - done : PIECE;
        ZS_TRY(read_all(file, room, piece, (int64_t)(sum->offset + done), next));
        crc = zs_crc32c(crc, room, piece);
    }
    sum->crc = crc;
    return ZS_OK;
}

zs_status zs_ckpt_file_check(const zs_ckpt_file *file, zs_ckpt_range range, int64_t block, zs_ckpt_sum *sums)
{
    int64_t next = zs_clock_ns() + ASK_EVERY;
    char *room = malloc(PIECE);
    if (room == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a read buffer of %d bytes", (int)PIECE);
    zs_status status = ZS_OK;
    int64_t end = range.offset + (int64_t)range.bytes;
    for (int64_t at = range.offset; at < end && status == ZS_OK; at += (int64_t)(sums++)->bytes) {
        *sums = (zs_ckpt_sum){(uint64_t)at, (uint64_t)in_block(at, end, block), 0};
        status = check_block(file, room, sums, &next);
    }
    free(room);
    return status;
}
