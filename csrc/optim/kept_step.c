/* kept_step.c - the update of a kept step, chunk by chunk. See kept_step.h.
 *
 * A worker copies its next chunk to its undo slot, marks it in hand, updates it, and marks it done. So whenever it is
 * killed, its chunks before the mark are as after the step, those behind it as before the step, and the one in hand can
 * be put back.
 */
#include "base/memory.h"
#include "base/simd.h"
#include "optim/kept_area.h"
#include "optim/optim.h"

#include <stdatomic.h>

/* Elements [from, to) of a run. */
typedef struct piece {
    int64_t from, to;
} piece;

/* Memory of a run that the update overwrites. */
typedef struct stream {
    int which; /* of ZS_KEPT_MEMORIES */
    char *memory;
    size_t group_bytes; /* of ZS_GROUP elements */
    size_t in_slot;     /* where its copy begins */
} stream;

/* A run, ready for its chunks. */
typedef struct opened {
    zs_run run;
    zs_run_loop *loop;
    int64_t chunk; /* elements */
    stream streams[ZS_KEPT_MEMORIES - 1];
    int n;
} opened;

/* --- undo --------------------------------------------------------------------------------------------------------- */

/* Copies the memory that the update of a piece overwrites to the undo slot, or back. */
static void copy_undo(const opened *of, piece one, char *undo, bool back)
{
    for (int i = 0; i < of->n; i++) {
        const stream *s = &of->streams[i];
        char *memory = s->memory + (size_t)(one.from / ZS_GROUP) * s->group_bytes, *copy = undo + s->in_slot;
        const size_t bytes = zs_kept_bytes_of(&of->run, s->which, one.to - one.from);
        if (back)
            ZS_KEPT_COPY(memory, copy, bytes);
        else
            ZS_KEPT_COPY(copy, memory, bytes);
    }
}

/* Copies a whole chunk to the slot, of `n` memories of the parameter's dtype: a line of each in turn, as the update
 * reads them. This waits for memory, and prefetches the chunk after the next: memory is never idle while a chunk is
 * updated, and a step is faster than the plain one. */
#define COPY_AHEAD(name, target, fused, n)                                                            \
    target static void name(const opened *of, piece one, char *undo)                                  \
    {                                                                                                 \
        const size_t skipped = (size_t)(one.from / ZS_GROUP) * of->streams[0].group_bytes;            \
        const char *from[n], *grad = (const char *)of->run.grad + skipped;                            \
        for (int i = 0; i < n; i++)                                                                   \
            from[i] = of->streams[i].memory + skipped;                                                \
        for (size_t line = 0; line < ZS_KEPT_PARAMS; line += ZS_KEPT_LINE) {                          \
            _Pragma("GCC unroll 4") for (int i = 0; i < n; i++)                                       \
            {                                                                                         \
                ZS_KEPT_COPY(undo + (size_t)i * ZS_KEPT_PARAMS + line, from[i] + line, ZS_KEPT_LINE); \
                __builtin_prefetch(from[i] + line + 2 * ZS_KEPT_PARAMS);                              \
            }                                                                                         \
            __builtin_prefetch(grad + line + 2 * ZS_KEPT_PARAMS);                                     \
        }                                                                                             \
    }

ZS_FOR_EACH_ISA(COPY_AHEAD, copy_1, 1)
ZS_FOR_EACH_ISA(COPY_AHEAD, copy_2, 2)
ZS_FOR_EACH_ISA(COPY_AHEAD, copy_3, 3)
ZS_FOR_EACH_ISA(COPY_AHEAD, copy_4, 4)

static void save(const opened *of, piece one, char *undo)
{
    static void (*const loops[][ZS_ISA_COUNT])(const opened *of, piece one, char *undo) = {
        ZS_ISA_TABLE(copy_1), ZS_ISA_TABLE(copy_2), ZS_ISA_TABLE(copy_3), ZS_ISA_TABLE(copy_4)};
    if (of->run.form == ZS_FORM_PLAIN && one.to - one.from == of->chunk)
        loops[of->n - 1][zs_isa_best()](of, one, undo);
    else
        copy_undo(of, one, undo, false);
}

/* --- updating ----------------------------------------------------------------------------------------------------- */

static void add_stream(opened *to, int which)
{
    stream *added = &to->streams[to->n];
    added->which = which;
    added->memory = (char *)zs_kept_memory_of(&to->run, which);
    added->group_bytes = zs_kept_bytes_of(&to->run, which, ZS_GROUP);
    added->in_slot = 0;
    if (to->n > 0) {
        const size_t bytes = zs_kept_bytes_of(&to->run, added[-1].which, to->chunk);
        added->in_slot = added[-1].in_slot + zs_round_up(bytes, ZS_KEPT_LINE);
    }
    to->n++;
}

static bool open_kept(const zs_kept_run *kept, zs_kept_finder *in, opened *out)
{
    if (!zs_kept_open_run(kept, in, &out->run)) return false;
    out->loop = zs_run_loop_for((zs_rule)kept->rule, kept->full != 0, &out->run);
    out->chunk = zs_kept_chunk(out->run.dtype);
    out->n = 0;
    for (int i = 0; i < ZS_KEPT_MEMORIES; i++)
        if (i != ZS_KEPT_GRAD && zs_kept_memory_of(&out->run, i) != NULL) add_stream(out, i);
    return true;
}

/* Updates chunk `index` of a run, the next one of this worker. */
static void update_chunk(const opened *of, int64_t index, zs_kept_worker *at)
{
    const int64_t from = index * of->chunk, left = of->run.numel - from;
    const piece one = {from, left > of->chunk ? from + of->chunk : of->run.numel};
    const uint64_t done = at->done / 2;
    if (at->done % 2 != 0) {
        copy_undo(of, one, at->undo, true); /* a killed process was updating it, and now this one is */
    } else {
        save(of, one, at->undo);
        ZS_KEPT_MARK(&at->done, 2 * done + 1);
    }
    ZS_KEPT_UPDATE(of->loop, &of->run, one.from, one.to);
    ZS_KEPT_MARK(&at->done, 2 * (done + 1));
}

/* Shared by the workers. */
typedef struct crew {
    const zs_kept_parts *at;
    const zs_kept_files *files;
    _Atomic bool failed; /* the step is incomplete */
} crew;

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void work(crew *all, int64_t index)
{
    const zs_kept_head *head = all->at->head;
    zs_kept_worker *at = &all->at->workers[index];
    const int64_t end = zs_kept_first(head, index + 1);
    int64_t chunk = zs_kept_first(head, index) + (int64_t)(at->done / 2), before = 0; /* this run */
    zs_kept_finder in = {all->files, 0};
    for (int64_t i = 0; i < head->n_runs && chunk < end; i++) {
        const zs_kept_run *kept = &all->at->runs[i];
        const int64_t n = zs_kept_n_chunks(kept->numel, (zs_dtype)kept->dtype), last = least(before + n, end);
        opened of;
        if (chunk < last && !open_kept(kept, &in, &of)) { /* zs_kept_check has opened it */
            atomic_store(&all->failed, true);
            return;
        }
        for (; chunk < last; chunk++)
            update_chunk(&of, chunk - before, at);
        before += n;
    }
}

static void work_part(void *ctx, int64_t begin, int64_t end)
{
    for (int64_t index = begin; index < end; index++)
        work(ctx, index);
}

zs_status zs_kept_finish(void *area, size_t bytes, uint64_t step, const zs_kept_files *files)
{
    ZS_TRY(zs_kept_check(area, bytes, step, files));
    const zs_kept_parts at = zs_kept_parts_of(area, &((zs_kept_head *)area)->room);
    crew all = {&at, files, false};
    zs_parallel_for(at.head->n_workers, 1, work_part, &all);
    if (atomic_load(&all.failed))
        return ZS_FAIL(ZS_ERR_STATE,
                       "step %llu in the kept area could not be finished: its memory has changed meanwhile",
                       (unsigned long long)step);
    return ZS_OK;
}
