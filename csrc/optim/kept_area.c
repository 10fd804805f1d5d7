/* kept_area.c - a kept area: its room, the record of a step, and the checks of a process that opens it. See
 * kept_area.h.
 */
#include "optim/kept_area.h"

#include "base/memory.h"
#include "base/simd.h"
#include "optim/optim.h"

#define MAGIC UINT64_C(0x3130747065736b7a) /* also the format's version */

static const char *const NAMES[ZS_KEPT_MEMORIES] = {
    "parameter",
    "gradient",
    "first moment",
    "second moment",
    "maximum of a moment",
    "first moment's scale",
    "second moment's scale",
    "parameter's lower 8 bits",
};

/* --- the area ----------------------------------------------------------------------------------------------------- */

static bool possible(const zs_kept_room *room)
{
    const int64_t most = (INT64_C(1) << 48) / (int64_t)sizeof(zs_kept_run);
    return room->runs >= 0 && room->runs < most && room->threads >= 1 && room->threads <= ZS_KEPT_MAX_THREADS;
}

static size_t bytes_of_runs(const zs_kept_room *room)
{
    return zs_round_up((size_t)room->runs * sizeof(zs_kept_run), ZS_KEPT_LINE);
}

size_t zs_kept_bytes(const zs_kept_room *room)
{
    if (!possible(room)) return 0;
    const size_t workers = (size_t)room->threads * sizeof(zs_kept_worker);
    return zs_round_up(sizeof(zs_kept_head), ZS_KEPT_LINE) + bytes_of_runs(room) + workers;
}

zs_kept_parts zs_kept_parts_of(void *area, const zs_kept_room *room)
{
    char *runs = (char *)area + zs_round_up(sizeof(zs_kept_head), ZS_KEPT_LINE);
    return (zs_kept_parts){area, (void *)runs, (void *)(runs + bytes_of_runs(room))};
}

static uint64_t mixed(uint64_t sum, const void *from, size_t bytes)
{
    const char *next = from;
    for (uint64_t word; bytes >= sizeof word; bytes -= sizeof word, next += sizeof word) {
        memcpy(&word, next, sizeof word);
        sum = (sum ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        sum ^= sum >> 32;
    }
    return sum;
}

_Static_assert(sizeof(zs_kept_run) % 8 == 0 && offsetof(zs_kept_head, digest) % 8 == 0, "mixed() takes whole words");

static uint64_t digest_of(const zs_kept_parts *at, const zs_kept_head *head, uint64_t step)
{
    uint64_t sum = mixed(step, head, offsetof(zs_kept_head, digest));
    return mixed(sum, at->runs, (size_t)head->n_runs * sizeof(zs_kept_run));
}

zs_status zs_kept_format(void *area, const zs_kept_room *room)
{
    if (!possible(room))
        return ZS_FAIL(ZS_ERR_VALUE, "no kept area can have room for %lld runs and %lld threads", (long long)room->runs,
                       (long long)room->threads);
    zs_kept_head made = {.magic = MAGIC, .run_bytes = sizeof(zs_kept_run), .room = *room};
    memcpy(area, &made, sizeof made);
    return ZS_OK;
}

/* --- writing ------------------------------------------------------------------------------------------------------ */

/* Where does this memory lie in the files? */
static bool find_place(zs_kept_finder *in, const char *memory, size_t bytes, zs_kept_place *out)
{
    for (int64_t i = 0; i < in->files->n; i++) {
        int64_t at = (in->last + i) % in->files->n;
        const zs_kept_range *range = &in->files->ranges[at];
        uintptr_t skipped = (uintptr_t)memory - (uintptr_t)range->base; /* huge where it lies before */
        if (skipped > range->bytes || bytes > range->bytes - skipped) continue;
        in->last = at;
        *out = (zs_kept_place){range->offset + skipped, range->file, 1};
        return true;
    }
    return false;
}

/* Where is this place in the memory of this process? */
static char *find_memory(zs_kept_finder *in, zs_kept_place at, size_t bytes)
{
    for (int64_t i = 0; i < in->files->n; i++) {
        int64_t n = (in->last + i) % in->files->n;
        const zs_kept_range *range = &in->files->ranges[n];
        uint64_t skipped = at.offset - range->offset;
        if (range->file != at.file || skipped > range->bytes || bytes > range->bytes - skipped) continue;
        in->last = n;
        return range->base + skipped;
    }
    return NULL;
}

static zs_status record_places(const zs_run *run, zs_kept_finder *in, zs_kept_run *out)
{
    for (int i = 0; i < ZS_KEPT_MEMORIES; i++) {
        const void *memory = zs_kept_memory_of(run, i);
        out->places[i] = (zs_kept_place){0, 0, 0};
        if (i >= ZS_KEPT_STATES && memory == NULL) continue;
        if (!find_place(in, memory, zs_kept_bytes_of(run, i, run->numel), &out->places[i]))
            return ZS_FAIL(ZS_ERR_VALUE, "the %s (%lld elements) is not in memory that outlives this process", NAMES[i],
                           (long long)run->numel);
    }
    return ZS_OK;
}

/* Appends a run to the record that `head` describes. */
static zs_status record_run(const zs_kept_parts *at, zs_kept_head *head, const zs_update_job *job, const zs_run *run,
                            zs_kept_finder *in)
{
    if (job->live != NULL || (run->device != NULL && run->device->ops->queues))
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "a step that outlives its process needs parameters on the CPU, not on a GPU");
    if (head->n_runs >= head->room.runs)
        return ZS_FAIL(ZS_ERR_VALUE, "the step exceeds its kept area, made for %lld runs", (long long)head->room.runs);
    zs_kept_run made;
    memset(&made, 0, sizeof made);
    ZS_TRY(record_places(run, in, &made));
    made.constants = *run->constants;
    made.numel = run->numel;
    made.number = run->number;
    made.factor = run->factor;
    made.rule = job->rule;
    made.full = job->full;
    made.form = run->form;
    made.dtype = run->dtype;
    made.dithered = run->dithered;
    ZS_KEPT_COPY(&at->runs[head->n_runs], &made, sizeof made);
    head->n_runs++;
    head->n_chunks += zs_kept_n_chunks(run->numel, run->dtype);
    return ZS_OK;
}

/* All that there is room for; fewer if the step is small. */
static int64_t workers_for(const zs_kept_head *head)
{
    const int64_t pay = head->n_chunks / ((int64_t)sizeof(float) * ZS_UPDATE_GRAIN / ZS_KEPT_PARAMS) + 1;
    return pay < head->room.threads ? pay : head->room.threads;
}

zs_status zs_kept_write(void *area, uint64_t step, const zs_update_job *jobs, int64_t n_jobs,
                        const zs_kept_files *files)
{
    zs_kept_head made = *(zs_kept_head *)area;
    const zs_kept_parts at = zs_kept_parts_of(area, &made.room);
    zs_kept_finder in = {files, 0};
    made.isa = zs_isa_best();
    made.n_runs = made.n_chunks = 0;
    made.step = 0;
    ZS_KEPT_MARK(&at.head->step, UINT64_C(0)); /* the area now holds no valid step */
    for (int64_t i = 0; i < n_jobs; i++)
        for (int64_t r = 0; r < jobs[i].n_runs; r++)
            ZS_TRY(record_run(&at, &made, &jobs[i], &jobs[i].run[r], &in));
    made.n_workers = workers_for(&made);
    for (int64_t i = 0; i < made.n_workers; i++)
        ZS_KEPT_MARK(&at.workers[i].done, UINT64_C(0));
    made.digest = digest_of(&at, &made, step);
    ZS_KEPT_COPY(at.head, &made, sizeof made);
    ZS_KEPT_MARK(&at.head->step, step);
    return ZS_OK;
}

/* --- checking ----------------------------------------------------------------------------------------------------- */

bool zs_kept_open_run(const zs_kept_run *kept, zs_kept_finder *in, zs_run *out)
{
    *out = (zs_run){.factor = kept->factor, .form = kept->form, .constants = &kept->constants, .numel = kept->numel};
    out->number = kept->number;
    out->dtype = kept->dtype;
    out->dithered = kept->dithered != 0;
    void *memory[ZS_KEPT_MEMORIES] = {NULL};
    for (int i = ZS_KEPT_STATES; i < ZS_KEPT_MEMORIES; i++) /* sizes depend on which there are */
        out->state[i - ZS_KEPT_STATES] = kept->places[i].used ? (void *)out : NULL;
    for (int i = 0; i < ZS_KEPT_MEMORIES; i++) {
        if (!kept->places[i].used) continue;
        memory[i] = find_memory(in, kept->places[i], zs_kept_bytes_of(out, i, kept->numel));
        if (memory[i] == NULL) return false;
    }
    out->param = memory[ZS_KEPT_PARAM];
    out->grad = memory[ZS_KEPT_GRAD];
    memcpy(out->state, &memory[ZS_KEPT_STATES], sizeof out->state);
    return true;
}

/* Is the record whole, of this step, and for the loops of this process? */
static zs_status check_record(void *area, size_t bytes, uint64_t step)
{
    const zs_kept_head *head = area;
    const unsigned long long wanted = step;
    if (bytes < sizeof *head || head->magic != MAGIC || head->run_bytes != sizeof(zs_kept_run))
        return ZS_FAIL(ZS_ERR_VALUE, "the kept area is not one of this version of zshard");
    const size_t whole = zs_kept_bytes(&head->room);
    if (whole == 0 || bytes < whole) return ZS_FAIL(ZS_ERR_VALUE, "the kept area is damaged: %zu bytes long", bytes);
    const uint64_t found = __atomic_load_n(&head->step, __ATOMIC_ACQUIRE);
    if (found != step || step == 0)
        return ZS_FAIL(ZS_ERR_STATE, "the kept area holds step %llu (0: none), not step %llu",
                       (unsigned long long)found, wanted);
    const zs_kept_parts at = zs_kept_parts_of(area, &head->room);
    if (head->n_runs < 0 || head->n_runs > head->room.runs || head->digest != digest_of(&at, head, step))
        return ZS_FAIL(ZS_ERR_VALUE, "the record of step %llu in the kept area is damaged", wanted);
    if (head->isa != (uint64_t)zs_isa_best())
        return ZS_FAIL(ZS_ERR_STATE,
                       "step %llu was begun with other instructions (%llu, not %d): set ZSHARD_ISA as "
                       "it was then",
                       wanted, (unsigned long long)head->isa, (int)zs_isa_best());
    return ZS_OK;
}

/* Are all runs' memory and marks where the record says? */
static zs_status check_runs(const zs_kept_parts *at, const zs_kept_files *files)
{
    zs_kept_finder in = {files, 0};
    int64_t chunks = 0;
    for (int64_t i = 0; i < at->head->n_runs; i++) {
        const zs_kept_run *kept = &at->runs[i];
        zs_run run;
        if (!zs_kept_open_run(kept, &in, &run))
            return ZS_FAIL(ZS_ERR_VALUE, "the kept step needs memory of %lld elements that is not in the files given",
                           (long long)kept->numel);
        if (run.param == NULL || run.grad == NULL || run.numel <= 0)
            return ZS_FAIL(ZS_ERR_VALUE, "run %lld in the kept area is damaged", (long long)i);
        chunks += zs_kept_n_chunks(run.numel, run.dtype);
    }
    if (chunks != at->head->n_chunks)
        return ZS_FAIL(ZS_ERR_VALUE, "the kept area is damaged: it has %lld chunks", (long long)chunks);
    return ZS_OK;
}

/* Is each worker among its own chunks? */
static zs_status check_workers(const zs_kept_parts *at)
{
    for (int64_t i = 0; i < at->head->n_workers; i++) {
        const int64_t own = zs_kept_first(at->head, i + 1) - zs_kept_first(at->head, i);
        if (at->workers[i].done > 2 * (uint64_t)own)
            return ZS_FAIL(ZS_ERR_VALUE, "thread %lld in the kept area is damaged", (long long)i);
    }
    return ZS_OK;
}

zs_status zs_kept_check(void *area, size_t bytes, uint64_t step, const zs_kept_files *files)
{
    ZS_TRY(check_record(area, bytes, step));
    const zs_kept_parts at = zs_kept_parts_of(area, &((zs_kept_head *)area)->room);
    ZS_TRY(check_runs(&at, files));
    return check_workers(&at);
}
