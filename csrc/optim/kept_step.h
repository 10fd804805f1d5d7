/* kept_step.h - an optimizer step that another process can finish when this one is killed.
 *
 * Parameters, gradients, state and one *kept area* lie in files that outlive a process (memfds). The area holds the
 * record of the step and, for each thread, how far it is, and an undo slot: it holds a chunk's old contents before the
 * chunk is overwritten. Stores that a killed process has executed stay in such memory, so only their order in the
 * program counts, and zs_kept_finish continues wherever it stopped. See docs/design/keep.md.
 */
#ifndef ZS_KEPT_STEP_H
#define ZS_KEPT_STEP_H

#include "device/device.h"
#include "update/jobs.h"

/* Memory of this process that is a part of such a file. */
typedef struct zs_kept_range {
    char *base;
    size_t bytes;
    uint64_t offset; /* in the file */
    uint32_t file;   /* its number: the caller's, the same in all processes */
} zs_kept_range;

/* All of it; borrowed. Ranges may be in any order. */
typedef struct zs_kept_files {
    const zs_kept_range *ranges;
    int64_t n;
} zs_kept_files;

/* Capacity of an area. */
typedef struct zs_kept_room {
    int64_t runs;    /* of a step */
    int64_t threads; /* that update at the same time, 1 to ZS_KEPT_MAX_THREADS */
} zs_kept_room;

enum { ZS_KEPT_MAX_THREADS = 4096 }; /* more than any machine has cores */

/* Bytes of an area with this room; 0: no area can have it. */
size_t zs_kept_bytes(const zs_kept_room *room);

/* Makes an area of zs_kept_bytes(room) bytes, at a multiple of 64. It holds no record. ZS_ERR_VALUE for a room that no
 * area can have. */
zs_status zs_kept_format(void *area, const zs_kept_room *room);

/* Records step number `step`, not 0, in place of the step before, which must be finished: the host runs of each of the
 * jobs. Updates nothing. The memory that the runs point to may be freed afterwards. On failure, and if killed, the area
 * holds no record. ZS_ERR_VALUE where a parameter, gradient or state lies outside of `files`, or the step exceeds the
 * room; ZS_ERR_UNSUPPORTED for runs of a GPU and capturable steps. */
zs_status zs_kept_write(void *area, uint64_t step, const zs_update_job *jobs, int64_t n_jobs,
                        const zs_kept_files *files);

/* Updates the rest of step `step`: all of it after zs_kept_write, nothing once it has returned; in another process, the
 * rest after a killed call. May be killed itself, any number of times. The bits are those of the plain step. `bytes`:
 * the size of the mapped area. Needs no GIL. ZS_ERR_STATE where the area holds no record of this step, or one by loops
 * of another instruction set; ZS_ERR_VALUE where the record is damaged, or memory that it names lies outside of
 * `files`: then it has written nothing. */
zs_status zs_kept_finish(void *area, size_t bytes, uint64_t step, const zs_kept_files *files);

#endif
