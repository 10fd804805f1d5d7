/* kept_area.h - the inside of a kept area: kept_area.c writes and checks its record, kept_step.c updates.
 *
 * The record has no addresses, but places in files: the process that finishes maps them elsewhere.
 */
#ifndef ZS_KEPT_AREA_H
#define ZS_KEPT_AREA_H

#include <string.h>

#include "device/device.h"
#include "optim/kept_step.h"

/* All stores to kept memory but those of the update's loops. tests/c/check_kept.c has its own, which kill. The compiler
 * may move no store across a mark: a release keeps those before it there, the fence those behind it. */
#ifndef ZS_KEPT_MARK
#define ZS_KEPT_MARK(at, value)                            \
    do {                                                   \
        __atomic_store_n((at), (value), __ATOMIC_RELEASE); \
        __atomic_signal_fence(__ATOMIC_SEQ_CST);           \
    } while (0)
#define ZS_KEPT_COPY(to, from, bytes) memcpy(to, from, bytes)
#define ZS_KEPT_UPDATE(job, from, to) zs_update_part(job, from, to)
#endif

/* The memory of a run: parameter and gradient, then its state. */
enum { ZS_KEPT_PARAM, ZS_KEPT_GRAD, ZS_KEPT_STATES, ZS_KEPT_MEMORIES = ZS_KEPT_STATES + ZS_OPTIM_STATES };

enum { ZS_KEPT_LINE = 64 }; /* what parts of the area and of undo slots are aligned to */

/* Where memory lies in a file. */
typedef struct zs_kept_place {
    uint64_t offset;
    uint32_t file;
    uint32_t used; /* 0: the run has no such memory */
} zs_kept_place;

/* A run as the record has it. */
typedef struct zs_kept_run {
    zs_kept_place places[ZS_KEPT_MEMORIES];
    zs_constants constants;
    int64_t numel;
    int64_t chunk;       /* elements of each chunk but the last */
    int64_t first_chunk; /* the index of its mark */
    uint64_t number;     /* as in zs_run, like the others */
    float factor;
    uint32_t rule, full, form, dtype, dithered;
} zs_kept_run;

/* What an area begins with. */
typedef struct zs_kept_head {
    uint64_t magic;
    uint64_t run_bytes; /* of a zs_kept_run: another build's may differ */
    zs_kept_room room;
    uint64_t isa; /* whose loops the step begins with */
    int64_t n_runs, n_chunks, n_elements;
    uint64_t digest; /* of all above, the step and the runs */
    uint64_t step;   /* 0: no record */
} zs_kept_head;

/* A chunk's mark; ZS_KEPT_IN_HAND + the number of the undo slot. */
typedef uint16_t zs_kept_mark;
enum { ZS_KEPT_TO_DO, ZS_KEPT_DONE, ZS_KEPT_IN_HAND };

/* An area, taken apart; borrowed. */
typedef struct zs_kept_parts {
    zs_kept_head *head;
    zs_kept_run *runs;
    zs_kept_mark *marks;
    char *slots;
} zs_kept_parts;

/* Ranges, and where the last one was found: runs follow each other there, too. */
typedef struct zs_kept_finder {
    const zs_kept_files *files;
    int64_t last;
} zs_kept_finder;

/* The parts of an area with this room. */
zs_kept_parts zs_kept_parts_of(void *area, const zs_kept_room *room);

/* Bytes of `numel` elements of a run, from the begin of a group on, in memory `which`. */
static inline size_t zs_kept_bytes_of(const zs_run *run, int which, int64_t numel)
{
    if (which < ZS_KEPT_STATES) return (size_t)numel * zs_dtype_size(run->dtype);
    return zs_run_state_bytes(run, which - ZS_KEPT_STATES, numel);
}

/* Its first byte; NULL: the run has no such memory. */
static inline const void *zs_kept_memory_of(const zs_run *run, int which)
{
    if (which == ZS_KEPT_PARAM) return run->param;
    return which == ZS_KEPT_GRAD ? run->grad : run->state[which - ZS_KEPT_STATES];
}

static inline int64_t zs_kept_chunks_of(const zs_kept_run *run)
{
    return (run->numel - 1) / run->chunk + 1;
}

/* A run of the record as loops take it, in the memory of this process; false: some of it is not there. */
bool zs_kept_open_run(const zs_kept_run *kept, zs_kept_finder *in, zs_run *out);

/* Is the area whole, with a record of this step for the loops of this process, and all memory that it names in `files`?
 * Fails as zs_kept_finish does. */
zs_status zs_kept_check(void *area, size_t bytes, uint64_t step, const zs_kept_files *files);

#endif
