/* kept_area.h - the inside of a kept area: kept_area.c writes and checks its record, kept_step.c updates.
 *
 * The record has no addresses, but places in files: the process that finishes maps them elsewhere.
 */
#ifndef ZS_KEPT_AREA_H
#define ZS_KEPT_AREA_H

#include "optim/kept_step.h"

#include <string.h>

#include "device/device.h"

/* Every store to kept memory goes through these macros, except the update loops'. tests/c/check_kept.c redefines them
 * to kill the process at each store. The compiler moves no store across a mark: the release holds those before it, the
 * fence those after it. */
#ifndef ZS_KEPT_MARK
#define ZS_KEPT_MARK(at, value)                            \
    do {                                                   \
        __atomic_store_n((at), (value), __ATOMIC_RELEASE); \
        __atomic_signal_fence(__ATOMIC_SEQ_CST);           \
    } while (0)
#define ZS_KEPT_COPY(to, from, bytes) memcpy(to, from, bytes)
#define ZS_KEPT_UPDATE(loop, run, from, to) zs_update_range(loop, run, from, to)
#endif

/* The memory of a run: parameter and gradient, then its state. */
enum { ZS_KEPT_PARAM, ZS_KEPT_GRAD, ZS_KEPT_STATES, ZS_KEPT_MEMORIES = ZS_KEPT_STATES + ZS_OPTIM_STATES };

enum {
    ZS_KEPT_LINE = 64,    /* parts of the area, and the memories in an undo slot, begin at multiples of this */
    ZS_KEPT_PARAMS = 512, /* bytes of the parameter in a chunk: measured, see docs/design/keep.md */
    ZS_KEPT_UNDO = 4096,  /* a chunk of any kind fits */
};

/* A place in a file. */
typedef struct zs_kept_place {
    uint64_t offset;
    uint32_t file;
    uint32_t used; /* 0: the run has no such memory */
} zs_kept_place;

/* A run in the record. */
typedef struct zs_kept_run {
    zs_kept_place places[ZS_KEPT_MEMORIES];
    zs_constants constants;
    int64_t numel;
    uint64_t number;
    float factor;
    uint32_t rule, full, form, dtype, dithered;
} zs_kept_run;

/* The head of an area. */
typedef struct zs_kept_head {
    uint64_t magic;
    uint64_t run_bytes; /* of a zs_kept_run: another build's may differ */
    zs_kept_room room;
    uint64_t isa; /* whose loops the step begins with */
    int64_t n_runs, n_chunks, n_workers;
    uint64_t digest; /* of all above, the step and the runs */
    uint64_t step;   /* 0: no record */
} zs_kept_head;

/* The state of a worker (a thread of a step) for a process that continues. `done`: twice the number of its updated
 * chunks, plus 1 while it updates the next one, whose old contents are in `undo`. */
typedef struct zs_kept_worker {
    uint64_t done;
    char padding[ZS_KEPT_LINE - sizeof(uint64_t)];
    char undo[ZS_KEPT_UNDO];
} zs_kept_worker;

/* An area, taken apart; borrowed. */
typedef struct zs_kept_parts {
    zs_kept_head *head;
    zs_kept_run *runs;
    zs_kept_worker *workers;
} zs_kept_parts;

/* Files, and the range of the last hit: successive runs lie in successive places. */
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

/* Elements of a chunk of a run of this dtype: whole groups. The last one of a run may have less. */
static inline int64_t zs_kept_chunk(zs_dtype dtype)
{
    return ZS_KEPT_PARAMS / (int64_t)zs_dtype_size(dtype);
}

/* Number of chunks for `numel` elements. */
static inline int64_t zs_kept_n_chunks(int64_t numel, zs_dtype dtype)
{
    return (numel - 1) / zs_kept_chunk(dtype) + 1;
}

/* The first chunk of worker `index`; of n_workers, the end: chunks of all runs are numbered together. */
static inline int64_t zs_kept_first(const zs_kept_head *head, int64_t index)
{
    return index < head->n_workers ? head->n_chunks / head->n_workers * index : head->n_chunks;
}

/* A run of the record as loops take it, in the memory of this process; false: some of it is not there. */
bool zs_kept_open_run(const zs_kept_run *kept, zs_kept_finder *in, zs_run *out);

/* Is the area whole, with a record of this step for the loops of this process, and all memory that it names in `files`?
 * Fails as zs_kept_finish does. */
zs_status zs_kept_check(void *area, size_t bytes, uint64_t step, const zs_kept_files *files);

#endif
