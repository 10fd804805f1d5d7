/* fs.h - every call on files that checkpoints make.
 *
 * All access to the disk passes through here, so that a test can make the nth call fail, kill the process there, or log
 * all calls (fs_watch.h). A function makes the system call once, and returns -1 and sets errno on failure. Callers
 * handle interrupts and short counts.
 */
#ifndef ZS_FS_H
#define ZS_FS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>

/* open(2), close on exec; new files have mode 0666, less the umask. */
int zs_fs_open(const char *path, int flags);

/* close(2). The descriptor is closed even after an error. */
int zs_fs_close(int fd);

/* fstat(2); fstatvfs(3), of the file system that it is on */
int zs_fs_stat(int fd, struct stat *out);
int zs_fs_disk(int fd, struct statvfs *out);

/* pread(2) and pwrite(2) */
ssize_t zs_fs_read(int fd, void *memory, size_t bytes, int64_t offset);
ssize_t zs_fs_write(int fd, const void *memory, size_t bytes, int64_t offset);

/* Makes a file that is new `bytes` long, of zeros, with room on the disk for them: fallocate(2). */
int zs_fs_reserve(int fd, int64_t bytes);

/* ftruncate(2) */
int zs_fs_truncate(int fd, int64_t bytes);

/* sync_file_range(2): begins to write the range to the disk, and ignores errors, which fsync reports. */
int zs_fs_write_back(int fd, int64_t offset, int64_t bytes);

/* fsync(2) */
int zs_fs_sync(int fd);

/* flock(2) */
int zs_fs_lock(int fd, int operation);

/* mkdir(2), of mode 0777 less the umask; rmdir(2); unlink(2) */
int zs_fs_make_folder(const char *path);
int zs_fs_remove_folder(const char *path);
int zs_fs_remove(const char *path);

/* renameat2(2), with its flags: ZS_FS_KEEP fails if `to` exists; ZS_FS_SWAP exchanges the two. */
int zs_fs_rename(const char *from, const char *to, unsigned flags);

enum { ZS_FS_KEEP = 1, ZS_FS_SWAP = 2 }; /* the system's own numbers */

#endif
