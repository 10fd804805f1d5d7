/* ckpt_folder.h - what checkpoints do with names: folders, renames, removals, locks.
 *
 * A checkpoint becomes visible by a rename, and that lasts by an fsync of the folder it is in; so these are steps of
 * their own, and each reports whether it was done. All fail with ZS_ERR_SYSTEM and the errno.
 */
#ifndef ZS_CKPT_FOLDER_H
#define ZS_CKPT_FOLDER_H

#include "base/status.h"

/* A new folder. */
zs_status zs_ckpt_make_folder(const char *path);

/* The names in a folder are on the disk: what has been made, renamed and removed in it. Nothing is done where the
 * file system knows no such thing. */
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
