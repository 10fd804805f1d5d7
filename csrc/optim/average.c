/* average.c - the loops of average.h: for each dtype of a parameter, for each instruction set. */
#include "optim/average.h"

#include "base/half.h"
#include "base/simd.h"
#include "device/device.h"
#include "optim/optim.h"
#include "pager/pager.h"
#include "update/update.h"

#define SAME(x) (x)

typedef float real_f32;
typedef double real_f64;

enum {
    BLOCK = 4096,    /* elements of a parameter that stay in the cache from one average to the next */
    PIECE = 2 << 20, /* elements that are in use at a time where memory lies on a disk */
};

typedef void average_loop(const void *param, void *average, int64_t numel, double weight);

#define AVERAGE_LOOP(name, target, fused, T, real, load)                                                 \
    target static void name(const void *param, void *average, int64_t numel, double weight)              \
    {                                                                                                    \
        const T *restrict end = param;                                                                   \
        real_##real *restrict start = average;                                                           \
        const real_##real own = (real_##real)weight, from_end = (real_##real) !(own < (real_##real)0.5); \
        const real_##real pull = own - from_end;                                                         \
        ZS_NO_OVERLAP for (int64_t i = 0; i < numel; i++) start[i] =                                     \
            zs_lerp_##real(pull, from_end, start[i], load(end[i]), fused);                               \
    }

ZS_FOR_EACH_ISA(AVERAGE_LOOP, average_f32, float, f32, SAME)
ZS_FOR_EACH_ISA(AVERAGE_LOOP, average_f64, double, f64, SAME)
ZS_FOR_EACH_ISA(AVERAGE_LOOP, average_bf16, zs_bf16, f32, zs_from_bf16)
ZS_FOR_EACH_ISA(AVERAGE_LOOP, average_f16, zs_f16, f32, zs_from_f16)

static average_loop *loop_for(zs_dtype dtype)
{
    static average_loop *const loops[ZS_BYTES][ZS_ISA_COUNT] = {
        [ZS_F32] = ZS_ISA_TABLE(average_f32),
        [ZS_F64] = ZS_ISA_TABLE(average_f64),
        [ZS_BF16] = ZS_ISA_TABLE(average_bf16),
        [ZS_F16] = ZS_ISA_TABLE(average_f16),
    };
    return loops[dtype][zs_isa_best()];
}

static size_t param_bytes(const zs_averaged *run, int64_t numel)
{
    return (size_t)numel * zs_dtype_size(run->dtype);
}

static size_t average_bytes(const zs_averaged *run, int64_t numel)
{
    return (size_t)numel * (run->dtype == ZS_F64 ? sizeof(double) : sizeof(float));
}

/* The run's elements from `at` on. */
static zs_averaged rest_of(const zs_averaged *run, int64_t at, int count)
{
    zs_averaged rest = *run;
    rest.param = (const char *)run->param + param_bytes(run, at);
    for (int k = 0; k < count; k++)
        rest.average[k] = (char *)run->average[k] + average_bytes(run, at);
    rest.numel -= at;
    return rest;
}

static bool continues(const zs_averaged *run, const zs_averaged *next, int count)
{
    zs_averaged end = rest_of(run, run->numel, count);
    bool all = run->dtype == next->dtype && next->param == end.param;
    for (int k = 0; k < count; k++)
        all = all && next->average[k] == end.average[k];
    return all;
}

void zs_average_add(zs_averaging *pass, const zs_averaged *next)
{
    if (pass->n_runs > 0 && continues(&pass->runs[pass->n_runs - 1], next, pass->count))
        pass->runs[pass->n_runs - 1].numel += next->numel;
    else
        pass->runs[pass->n_runs++] = *next;
}

static void average_block(const zs_averaging *pass, const zs_averaged *run, int64_t begin, int64_t numel)
{
    average_loop *loop = loop_for(run->dtype);
    zs_averaged block = rest_of(run, begin, pass->count);
    for (int k = 0; k < pass->count; k++)
        loop(block.param, block.average[k], numel, pass->weights[k]);
}

/* Elements [begin, end) of all runs laid end to end. */
static void average_part(void *ctx, int64_t begin, int64_t end)
{
    const zs_averaging *pass = ctx;
    int64_t start = 0;
    for (int64_t i = 0; i < pass->n_runs && start < end; start += pass->runs[i++].numel) {
        const zs_averaged *run = &pass->runs[i];
        int64_t from = begin > start ? begin - start : 0;
        int64_t to = end - start < run->numel ? end - start : run->numel;
        for (; from < to; from += BLOCK)
            average_block(pass, run, from, to - from < BLOCK ? to - from : BLOCK);
    }
}

/* One piece of a run, some of whose memory may lie on a disk. */
static zs_status average_piece(const zs_averaging *pass, zs_averaged *piece)
{
    zs_averaging one = *pass;
    one.runs = piece;
    one.n_runs = 1;
    int held = 0;
    zs_status status = zs_pager_want(piece->param, param_bytes(piece, piece->numel), ZS_PAGER_READ);
    for (; held < pass->count && status == ZS_OK; held += status == ZS_OK)
        status = zs_pager_want(piece->average[held], average_bytes(piece, piece->numel), ZS_PAGER_WRITE);
    if (status == ZS_OK) zs_parallel_for(piece->numel, ZS_UPDATE_GRAIN, average_part, &one);
    while (held-- > 0)
        zs_pager_done(piece->average[held], average_bytes(piece, piece->numel));
    zs_pager_done(piece->param, param_bytes(piece, piece->numel));
    return status;
}

static zs_status average_on_disk(const zs_averaging *pass)
{
    for (int64_t i = 0; i < pass->n_runs; i++) {
        for (int64_t at = 0; at < pass->runs[i].numel; at += PIECE) {
            zs_averaged piece = rest_of(&pass->runs[i], at, pass->count);
            if (piece.numel > PIECE) piece.numel = PIECE;
            ZS_TRY(average_piece(pass, &piece));
        }
    }
    return ZS_OK;
}

zs_status zs_average_run(const zs_averaging *pass)
{
    int64_t total = 0;
    for (int64_t i = 0; i < pass->n_runs; i++) {
        const zs_averaged *run = &pass->runs[i];
        total += run->numel;
        zs_count_bytes(param_bytes(run, run->numel) + 2 * (uint64_t)pass->count * average_bytes(run, run->numel));
    }
    if (zs_pager_active()) return average_on_disk(pass);
    if (total > 0) zs_parallel_for(total, ZS_UPDATE_GRAIN, average_part, (void *)pass);
    return ZS_OK;
}
