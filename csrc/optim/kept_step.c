/* kept_step.c - the update of a kept step, chunk by chunk. See kept_step.h.
 *
 * A chunk's mark goes from TO_DO over IN_HAND, with the number of an undo slot, to DONE. A worker copies the chunk to
 * its own slot, marks it in hand, updates it, and marks it done. So in any state that a kill can leave, a chunk is as
 * before the step, or as after it, or can be put back from the slot that its mark names; and no two marks name one slot.
 */
#include "optim/kept_area.h"

#include "base/memory.h"
#include "optim/optim.h"

static char *slot_of(const zs_kept_parts *at, int64_t number)
{
    return at->slots + (size_t)number * zs_round_up((size_t)at->head->room.undo, ZS_KEPT_LINE);
}

/* A chunk of a run. */
typedef struct piece {
    int64_t from, to;
    zs_kept_mark *at;
} piece;

static piece piece_of(const zs_kept_parts *at, const zs_kept_run *kept, int64_t index)
{
    piece one = {.from = index * kept->chunk, .at = &at->marks[kept->first_chunk + index]};
    one.to = kept->numel - one.from > kept->chunk ? one.from + kept->chunk : kept->numel;
    return one;
}

/* Copies all that the update overwrites of a chunk to its undo slot, or back. */
static void copy_undo(const zs_run *run, const piece *one, char *slot, bool back)
{
    for (int i = 0; i < ZS_KEPT_MEMORIES; i++) {
        char *memory = (char *)zs_kept_memory_of(run, i);
        if (i == ZS_KEPT_GRAD || memory == NULL) continue;
        memory += zs_kept_bytes_of(run, i, one->from);
        const size_t bytes = zs_kept_bytes_of(run, i, one->to - one->from);
        if (back)
            ZS_KEPT_COPY(memory, slot, bytes);
        else
            ZS_KEPT_COPY(slot, memory, bytes);
        slot += zs_round_up(bytes, ZS_KEPT_LINE);
    }
}

/* Puts back the chunks that a killed process had in hand. All of them, before a slot is used again. */
static void restore(const zs_kept_parts *at, const zs_kept_files *files)
{
    zs_kept_finder in = {files, 0};
    for (int64_t i = 0; i < at->head->n_runs; i++) {
        const zs_kept_run *kept = &at->runs[i];
        const int64_t n = zs_kept_chunks_of(kept);
        zs_run run;
        if (!zs_kept_open_run(kept, &in, &run)) continue; /* cannot be: zs_kept_check opened it */
        for (int64_t c = 0; c < n; c++) {
            const piece one = piece_of(at, kept, c);
            if (*one.at < ZS_KEPT_IN_HAND) continue;
            copy_undo(&run, &one, slot_of(at, *one.at - ZS_KEPT_IN_HAND), true);
            ZS_KEPT_MARK(one.at, (zs_kept_mark)ZS_KEPT_TO_DO);
        }
    }
}

static void update_chunk(const zs_update_job *job, const piece *one, int64_t worker, char *slot)
{
    if (*one->at == ZS_KEPT_DONE) return;
    copy_undo(job->run, one, slot, false);
    ZS_KEPT_MARK(one->at, (zs_kept_mark)(ZS_KEPT_IN_HAND + worker));
    ZS_KEPT_UPDATE(job, one->from, one->to);
    ZS_KEPT_MARK(one->at, (zs_kept_mark)ZS_KEPT_DONE);
}

/* What the workers share. */
typedef struct crew {
    const zs_kept_parts *at;
    const zs_kept_files *files;
    int64_t workers;
} crew;

/* The first chunk of a run that begins at or behind element `at` of the run; `at` may lie outside. */
static int64_t chunk_from(const zs_kept_run *kept, int64_t at)
{
    if (at <= 0) return 0;
    return at < kept->numel ? (at - 1) / kept->chunk + 1 : zs_kept_chunks_of(kept);
}

/* A worker's chunks: those that begin in its share of all elements. Its number is that of its undo slot. */
static void work(const crew *all, int64_t worker)
{
    const zs_kept_head *head = all->at->head;
    const int64_t share = head->n_elements / all->workers, begin = worker * share;
    const int64_t end = worker + 1 < all->workers ? begin + share : head->n_elements;
    zs_kept_finder in = {all->files, 0};
    int64_t before = 0; /* elements */
    for (int64_t i = 0; i < head->n_runs && before < end; before += all->at->runs[i++].numel) {
        const zs_kept_run *kept = &all->at->runs[i];
        const int64_t first = chunk_from(kept, begin - before), last = chunk_from(kept, end - before);
        zs_run run;
        if (first >= last || !zs_kept_open_run(kept, &in, &run)) continue;
        const zs_update_job job = {(zs_rule)kept->rule, kept->full != 0, &run, NULL, 1};
        for (int64_t c = first; c < last; c++) {
            const piece one = piece_of(all->at, kept, c);
            update_chunk(&job, &one, worker, slot_of(all->at, worker));
        }
    }
}

static void work_part(void *ctx, int64_t begin, int64_t end)
{
    for (int64_t worker = begin; worker < end; worker++)
        work(ctx, worker);
}

zs_status zs_kept_finish(void *area, size_t bytes, uint64_t step, const zs_kept_files *files)
{
    ZS_TRY(zs_kept_check(area, bytes, step, files));
    const zs_kept_head *head = area;
    const zs_kept_parts at = zs_kept_parts_of(area, &head->room);
    restore(&at, files);
    int64_t workers = head->n_elements / ZS_UPDATE_GRAIN + 1;
    crew all = {&at, files, workers < head->room.threads ? workers : head->room.threads};
    zs_parallel_for(all.workers, 1, work_part, &all);
    return ZS_OK;
}
