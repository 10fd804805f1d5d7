/* ckpt_file.h - a file of a checkpoint: ranges of it written with checksums, read into place, or checked.
 *
 * Memory and disk meet in pieces that fit a core's cache, so that a piece is summed while it is in the cache, a range
 * of any size needs no other buffer, and Ctrl-C is noticed. Interrupted and short calls resume; any other failure is
 * reported once.
 */
#ifndef ZS_CKPT_FILE_H
#define ZS_CKPT_FILE_H

#include "base/status.h"
#include <stdbool.h>
#include <stddef.h>

/* --- finite.c ----------------------------------------------------------------------------------------------------- */

/* A format of numbers. ZS_NO_FLOATS: nothing is asked of the bytes. */
typedef enum zs_floats { ZS_NO_FLOATS, ZS_BFLOAT16S, ZS_FLOAT16S, ZS_FLOAT32S, ZS_FLOAT64S } zs_floats;

/* The format that safetensors calls `code`, such as "F32"; ZS_NO_FLOATS for any other. */
zs_floats zs_floats_of(const char *code);

/* Bytes of one number; 1 for ZS_NO_FLOATS. */
size_t zs_floats_size(zs_floats kind);

/* Is none of the numbers in `bytes` of `data` NaN or infinite? `bytes` is a multiple of a number's size; `data` may
 * lie anywhere. */
bool zs_all_finite(zs_floats kind, const void *data, size_t bytes);

/* --- ckpt_file.c -------------------------------------------------------------------------------------------------- */

/* An open regular file. */
typedef struct zs_ckpt_file {
    int fd;           /* -1: closed */
    const char *path; /* borrowed; outlives it */
} zs_ckpt_file;

/* Bytes in memory, and where in a file they belong. */
typedef struct zs_ckpt_range {
    int64_t offset;
    size_t bytes;
    void *memory;      /* borrowed; writing only reads it */
    zs_floats numbers; /* that a write checks while they are in the cache: is one NaN or infinite, */
    bool strange;      /* this is set */
} zs_ckpt_range;

/* The checksum of a part of a file. */
typedef struct zs_ckpt_sum {
    uint64_t offset, bytes, crc;
} zs_ckpt_sum;

/* Makes long reads and writes call `interrupted` about ten times a second. If it returns true, they end with
 * ZS_ERR_TORCH (it has set a Python exception). NULL: never. */
void zs_ckpt_on_wait(bool (*interrupted)(void));

/* Opens `path` for reading. `follow`: follow a link there; else a link is ELOOP. ZS_ERR_VALUE if it is not a regular
 * file; never waits for a FIFO's writer. */
zs_status zs_ckpt_file_open(const char *path, bool follow, zs_ckpt_file *out);

/* A file that exists, to be written (and read); no link. */
zs_status zs_ckpt_file_open_to_write(const char *path, zs_ckpt_file *out);

/* A new file of `bytes` zeros, to be written (and read), with room on the disk for them where the file system can
 * reserve it. Nothing is left of it on failure. */
zs_status zs_ckpt_file_create(const char *path, int64_t bytes, zs_ckpt_file *out);

/* Its current length. */
zs_status zs_ckpt_file_size(const zs_ckpt_file *file, int64_t *out);

/* Fills the memory of all ranges. ZS_ERR_VALUE, naming file and byte, where the file ends before; nothing has been
 * read then, unless the file is getting shorter just now. */
zs_status zs_ckpt_file_read(const zs_ckpt_file *file, const zs_ckpt_range *ranges, size_t n);

/* Number of sums that zs_ckpt_file_write and _check make: ranges cut at the multiples of `block` in the file.
 * ZS_ERR_VALUE for a range that no file can have, or whose numbers a block would cut; the others accept every range
 * that this accepts. */
zs_status zs_ckpt_file_sums(const zs_ckpt_file *file, const zs_ckpt_range *ranges, size_t n, int64_t block,
                            size_t *out);

/* Is the file long enough for all ranges? ZS_ERR_VALUE, naming it, if not. */
zs_status zs_ckpt_file_reaches(const zs_ckpt_file *file, const zs_ckpt_range *ranges, size_t n);

/* Writes all ranges; sums [zs_ckpt_file_sums] in their order. The file grows where it has to. */
zs_status zs_ckpt_file_write(const zs_ckpt_file *file, zs_ckpt_range *ranges, size_t n, int64_t block,
                             zs_ckpt_sum *sums);

/* The sums of a range, read and not kept: the range's memory is not used. ZS_ERR_VALUE as above. */
zs_status zs_ckpt_file_check(const zs_ckpt_file *file, zs_ckpt_range range, int64_t block, zs_ckpt_sum *sums);

/* Waits until all writes are on the disk. After a failure, the state of earlier writes is unknown, and a second call
 * would not reveal it. */
zs_status zs_ckpt_file_sync(const zs_ckpt_file *file);

/* Closes it, even where that fails. Nothing if it is closed. */
zs_status zs_ckpt_file_close(zs_ckpt_file *file);

#endif
