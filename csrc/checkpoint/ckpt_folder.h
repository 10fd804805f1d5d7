/* ckpt_folder.h - names on disk for checkpoints: folders, renames, removals, locks.
 *
 * A rename makes a checkpoint visible, and an fsync of its folder makes the rename durable; so these are separate
 * steps, and each reports whether it was done. All fail with ZS_ERR_SYSTEM and the errno.
 */
#ifndef ZS_CKPT_FOLDER_H
#define ZS_CKPT_FOLDER_H

#include "base/status.h"

/* A new folder. */
zs_status zs_ckpt_make_folder(const char *path);

/* Waits until a folder's names are on the disk: all creations, renames and removals in it. No-op on file systems that
 * do not support it. */
zs_status zs_ckpt_sync_folder(const char *path);

/* Renames `from` to `to`; EEXIST if `to` exists. (Where the file system cannot check and rename atomically, it is two
 * steps, and callers need a lock.) */
zs_status zs_ckpt_rename(const char *from, const char *to);

/* Exchanges the two, at once. */
zs_status zs_ckpt_swap(const char *a, const char *b);

/* Removes a file, or the link that is there; an empty folder. */
zs_status zs_ckpt_remove_file(const char *path);
zs_status zs_ckpt_remove_folder(const char *path);

/* Locks a file, made where there is none, for this process and those it forks; EAGAIN where it is locked. *fd: for
 * unlock. */
zs_status zs_ckpt_lock(const char *path, int *fd);

/* Unlocks and closes. The file stays: another process may be about to lock it. */
zs_status zs_ckpt_unlock(int fd);

#endif
