/* ckpt_folder.c - see ckpt_folder.h. */
#define _GNU_SOURCE /* O_DIRECTORY, O_NOFOLLOW, lstat */
#include "checkpoint/ckpt_folder.h"

#include "checkpoint/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>

/* Does `call` (-1 and errno where it fails) until it is not interrupted. None of these waits for long. */
#define AGAIN(result, call) \
    do {                    \
        (result) = (call);  \
    } while ((result) < 0 && errno == EINTR)

static zs_status outcome(int result, const char *what)
{
    return result < 0 ? ZS_FAIL_ERRNO(what) : ZS_OK;
}

zs_status zs_ckpt_make_folder(const char *path)
{
    int result;
    AGAIN(result, zs_fs_make_folder(path));
    return outcome(result, "mkdir");
}

zs_status zs_ckpt_sync_folder(const char *path)
{
    int fd;
    AGAIN(fd, zs_fs_open(path, O_RDONLY | O_DIRECTORY));
    ZS_TRY(outcome(fd, "open"));
    zs_status status = zs_fs_sync(fd) == 0 || errno == EINVAL ? ZS_OK : ZS_FAIL_ERRNO("fsync");
    (void)zs_fs_close(fd); /* nothing was written by it */
    return status;
}

/* For file systems whose renames know no flags (NFS). */
static int rename_in_two_steps(const char *from, const char *to)
{
    struct stat facts;
    if (lstat(to, &facts) == 0) {
        errno = EEXIST;
        return -1;
    }
    return errno == ENOENT ? zs_fs_rename(from, to, 0) : -1;
}

zs_status zs_ckpt_rename(const char *from, const char *to)
{
    int result;
    AGAIN(result, zs_fs_rename(from, to, ZS_FS_KEEP));
    if (result != 0 && (errno == EINVAL || errno == ENOSYS)) AGAIN(result, rename_in_two_steps(from, to));
    return outcome(result, "rename");
}

zs_status zs_ckpt_swap(const char *a, const char *b)
{
    int result;
    AGAIN(result, zs_fs_rename(a, b, ZS_FS_SWAP));
    return outcome(result, "rename");
}

zs_status zs_ckpt_remove_file(const char *path)
{
    int result;
    AGAIN(result, zs_fs_remove(path));
    return outcome(result, "unlink");
}

zs_status zs_ckpt_remove_folder(const char *path)
{
    int result;
    AGAIN(result, zs_fs_remove_folder(path));
    return outcome(result, "rmdir");
}

zs_status zs_ckpt_lock(const char *path, int *fd)
{
    int made, result;
    AGAIN(made, zs_fs_open(path, O_RDWR | O_CREAT | O_NOFOLLOW));
    ZS_TRY(outcome(made, "open"));
    AGAIN(result, zs_fs_lock(made, LOCK_EX | LOCK_NB));
    zs_status status = outcome(result, "flock");
    if (status == ZS_OK)
        *fd = made;
    else
        (void)zs_fs_close(made);
    return status;
}

zs_status zs_ckpt_unlock(int fd)
{
    int result;
    AGAIN(result, zs_fs_lock(fd, LOCK_UN)); /* at once, also for forked processes that hold the descriptor */
    zs_status status = outcome(result, "flock");
    (void)zs_fs_close(fd);
    return status;
}
