/* cuda_update.c - optimizer steps on a GPU: see cuda_kernels.h.
 *
 * Tensors are many and may be small, and each launch begins and ends with a GPU that is not full. So a launch takes a
 * table with all the pieces of runs that fit into its arguments, and each block finds its piece.
 */
#include "device/cuda_kernels.h"
#include "device/cuda_launch.h"

#include <assert.h>
#include <string.h>

static_assert(ZS_CONSTANTS_BYTES == sizeof(zs_cuda_constants), "must match jobs.h");
static_assert((int)ZS_CUDA_STATES == (int)ZS_OPTIM_STATES, "must match jobs.h");

/* Elements of a piece, at most: no counter in the table needs more than 32 bits. */
static const int64_t piece_limit = INT64_C(1) << 31;

/* A launch in the making. */
typedef struct draft {
    const zs_cuda_update_job *job;
    void *stream;
    const zs_run *like; /* a run of those in it */
    uint64_t upper;     /* half of the numbers of its elements, where they matter */
    int64_t blocks;
    zs_cuda_update_args args;
} draft;

/* The kernel that does the job for a run. */
static int kernel_for(const zs_cuda_update_job *job, const zs_run *run)
{
    const int rule = 2 * (int)job->rule + job->full;
    if (run->form != ZS_FORM_PLAIN) return ZS_KERNEL_COMPACT + rule;
    if (job->live) return ZS_KERNEL_LIVE + ZS_CUDA_DTYPES * rule + (int)run->dtype;
    return ZS_KERNEL_STEP + ZS_CUDA_KINDS * rule + (run->dithered ? (int)ZS_CUDA_DITHERED : (int)run->dtype);
}

/* Can one launch take both? */
static bool alike(const zs_run *a, const zs_run *b)
{
    return a->constants == b->constants && a->dtype == b->dtype && a->dithered == b->dithered && a->form == b->form &&
           (a->state[ZS_STATE_LOW] == NULL) == (b->state[ZS_STATE_LOW] == NULL);
}

/* Sets the rule's constants, in the precision of the run. */
static void set_rule(zs_cuda_update_args *args, zs_rule rule, const zs_run *run)
{
    const zs_constants *k = run->constants;
    const bool wide = run->dtype == ZS_F64, adam = rule == ZS_RULE_ADAM;
    if (adam && wide) args->rule.adam_f64 = k->adam_f64;
    if (adam && !wide) args->rule.adam_f32 = k->adam_f32;
    if (adam && run->form != ZS_FORM_PLAIN) args->rule.adam_f32 = zs_adam_folded_f32(k->adam_f32);
    if (!adam && wide) args->rule.sgd_f64 = k->sgd_f64;
    if (!adam && !wide) args->rule.sgd_f32 = k->sgd_f32;
}

/* Launches it, and begins the next. */
static zs_status flush(draft *batch)
{
    if (batch->args.n_pieces == 0) return ZS_OK;
    const zs_cuda_update_job *job = batch->job;
    const zs_run *run = batch->like;
    const zs_constants *k = run->constants;
    zs_cuda_update_args *args = &batch->args;
    assert(run->form == ZS_FORM_PLAIN || (!job->live && job->grad_factor == NULL && job->found_inf == NULL));
    args->grad_factor = job->grad_factor;
    args->found_inf = job->found_inf;
    args->live = job->live ? k->live : NULL;
    args->round = k->round;
    args->kind = run->form != ZS_FORM_PLAIN ? (uint32_t)zs_compact_kind(run) : 0;
    args->coded = run->form == ZS_FORM_CODED;
    if (run->dithered) args->dither = zs_dither_at(k->seed, k->round, (uint32_t)batch->upper);
    set_rule(args, job->rule, run);
    zs_status status = zs_cuda_launch(kernel_for(job, run), batch->blocks, args, batch->stream);
    memset(args, 0, sizeof *args);
    batch->blocks = 0;
    return status;
}

/* Divides the elements of a piece, and returns the blocks for them: by groups, there are ZS_GROUP threads for each. */
static int64_t share_out(const zs_run *run, zs_cuda_piece *piece, int64_t numel)
{
    const size_t item = zs_dtype_size(run->dtype);
    const int64_t pack = zs_cuda_pack_of(item), groups = (numel + ZS_GROUP - 1) / ZS_GROUP;
    zs_cuda_array arrays[2 + ZS_CUDA_STATES] = {{piece->param, item}, {piece->grad, item}};
    for (int s = 0; s < ZS_CUDA_STATES; s++)
        arrays[2 + s] = (zs_cuda_array){piece->state[s], item};
    zs_cuda_cut cut = {.numel = numel, .packs = groups};
    if (run->form == ZS_FORM_PLAIN) cut = zs_cuda_cut_of(arrays, 2 + ZS_CUDA_STATES, numel, pack);
    piece->numel = (uint32_t)cut.numel;
    piece->head = (uint32_t)cut.head;
    piece->packs = (uint32_t)cut.packs;
    if (run->form == ZS_FORM_PLAIN) return zs_cuda_blocks_for(&cut, pack);
    return (groups * ZS_GROUP + ZS_CUDA_BLOCK - 1) / ZS_CUDA_BLOCK;
}

/* Elements [from, to) of a run, whose numbers have the same upper half. */
static zs_status add_piece(draft *batch, const zs_run *run, int64_t from, int64_t to)
{
    zs_cuda_update_args *args = &batch->args;
    const uint64_t number = run->number + (uint64_t)from;
    const bool other = run->dithered && number >> 32 != batch->upper;
    if (other || args->n_pieces == ZS_CUDA_PIECES) ZS_TRY(flush(batch));
    batch->like = run;
    batch->upper = number >> 32;
    args->begin[args->n_pieces] = (uint32_t)batch->blocks;
    zs_cuda_piece *piece = &args->piece[args->n_pieces++];
    const size_t item = zs_dtype_size(run->dtype);
    piece->param = (char *)run->param + (size_t)from * item;
    piece->grad = (const char *)run->grad + (size_t)from * item;
    for (int s = 0; s < ZS_CUDA_STATES; s++)
        if (run->state[s] != NULL) piece->state[s] = (char *)run->state[s] + zs_run_state_bytes(run, s, from);
    piece->number = (uint32_t)number;
    batch->blocks += share_out(run, piece, to - from);
    return ZS_OK;
}

static zs_status add_run(draft *batch, const zs_run *run)
{
    for (int64_t from = 0, to; from < run->numel; from = to) {
        const int64_t left = piece_limit - (int64_t)((run->number + (uint64_t)from) % (uint64_t)piece_limit);
        to = left < run->numel - from ? from + left : run->numel;
        ZS_TRY(add_piece(batch, run, from, to));
    }
    return ZS_OK;
}

/* The first run that is like run `i`. */
static int64_t first_like(const zs_run *runs, int64_t i)
{
    int64_t first = 0;
    while (!alike(&runs[first], &runs[i]))
        first++;
    return first;
}

zs_status zs_cuda_update(const zs_cuda_update_job *job, void *stream)
{
    draft made = {.job = job, .stream = stream};
    for (int64_t i = 0; i < job->n_runs; i++) {
        if (first_like(job->runs, i) < i) continue; /* went with that one */
        for (int64_t k = i; k < job->n_runs; k++)
            if (alike(&job->runs[i], &job->runs[k])) ZS_TRY(add_run(&made, &job->runs[k]));
        ZS_TRY(flush(&made));
    }
    return ZS_OK;
}

/* All of the job but the counters. */
static zs_cuda_constants_args constants_of(const zs_constants_job *job)
{
    const zs_hyper *hyper = job->hyper;
    const zs_live *live = job->live;
    return (zs_cuda_constants_args){
        .out = job->out,
        .lr = live->lr,
        .found_inf = live->found_inf,
        .hyper = {hyper->lr, hyper->weight_decay, hyper->beta1, hyper->beta2, hyper->eps, hyper->momentum,
                  hyper->dampening},
        .decoupled = hyper->decoupled,
        .amsgrad = hyper->amsgrad,
        .nesterov = hyper->nesterov,
        .maximize = hyper->maximize,
        .sgd = job->rule == ZS_RULE_SGD,
        .first = job->first,
        .lr_wide = live->lr_dtype == ZS_F64,
        .step_wide = job->step_dtype == ZS_F64,
    };
}

zs_status zs_cuda_constants_make(const zs_constants_job *job, void *stream)
{
    zs_cuda_constants_args args = constants_of(job);
    int64_t done = 0;
    do {
        int64_t left = job->n_steps - done;
        args.n_steps = (int32_t)(left < ZS_CUDA_STEPS ? left : ZS_CUDA_STEPS);
        for (int32_t i = 0; i < args.n_steps; i++)
            args.step[i] = job->steps[done + i];
        ZS_TRY(zs_cuda_launch(ZS_KERNEL_CONSTANTS, 1, &args, stream));
        args.out = NULL; /* made by the first, before it counts */
        done += args.n_steps;
    } while (done < job->n_steps);
    return ZS_OK;
}
