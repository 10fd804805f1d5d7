/* optim_cpu.c - the loops of optim.h on the CPU: each rule, for each dtype, for each instruction set.
 *
 * A loop is loads, one rule of update.h, stores. 28 bytes pass per element of AdamW, so memory sets the speed if the
 * compiler vectorises, and it does: no branch depends on an element. float16 and bfloat16 are updated in float, with
 * parameter and state rounded when stored, as torch's fused optimizers do: to nearest, or if the run is dithered, at
 * random, with separate bits for each tensor.
 */
#include "base/simd.h"
#include "optim/optim.h"
#include "update/codes.h"

#define SAME(x) (x)

typedef float real_f32;
typedef double real_f64;

/* Stores a result, given 16 random bits. If a rule does not use them, the compiler drops their computation. */
#define STORE_SAME(x, noise) ((void)(noise), (x))
#define STORE_BF16(x, noise) ((void)(noise), zs_to_bf16(x))
#define STORE_F16(x, noise) ((void)(noise), zs_to_f16(x))
#define STORE_DITHERED(x, noise) zs_to_bf16_dithered(x, noise)

/* The keys for elements [begin, ...) of a run. */
static inline zs_dither dither_of(const zs_run *run, int64_t begin)
{
    uint64_t number = run->number + (uint64_t)begin;
    return zs_dither_at(run->constants->seed, run->constants->round, (uint32_t)(number >> 32));
}

#define ADAM_LOOP(name, target, fused, T, real, load, store, amsgrad)                                             \
    target static void name(const zs_run *run, int64_t begin, int64_t end)                                        \
    {                                                                                                             \
        const zs_adam_##real k = run->constants->adam_##real;                                                     \
        T *restrict param = run->param;                                                                           \
        const T *restrict grad = run->grad;                                                                       \
        T *restrict exp_avg = run->state[0], *restrict exp_avg_sq = run->state[1], *restrict max = run->state[2]; \
        const zs_dither dither = dither_of(run, begin);                                                           \
        const uint32_t number = (uint32_t)run->number;                                                            \
        const real_##real factor = run->factor;                                                                   \
        ZS_NO_OVERLAP for (int64_t i = begin; i < end; i++)                                                       \
        {                                                                                                         \
            zs_adam_cell_##real cell = {load(param[i]), load(exp_avg[i]), load(exp_avg_sq[i]),                    \
                                        amsgrad ? load(max[i]) : 0};                                              \
            zs_adam_update_##real(&k, &cell, load(grad[i]) * factor, amsgrad, fused);                             \
            const zs_noise noise = zs_noise_of(&dither, number + (uint32_t)i);                                    \
            param[i] = store(cell.param, noise.of[0] >> 16);                                                      \
            exp_avg[i] = store(cell.exp_avg, noise.of[0] & 0xffffu);                                              \
            exp_avg_sq[i] = store(cell.exp_avg_sq, noise.of[1] >> 16);                                            \
            if (amsgrad) max[i] = store(cell.max_exp_avg_sq, noise.of[1] & 0xffffu);                              \
        }                                                                                                         \
    }

#define SGD_LOOP(name, target, fused, T, real, load, store, momentum)                   \
    target static void name(const zs_run *run, int64_t begin, int64_t end)              \
    {                                                                                   \
        const zs_sgd_##real k = run->constants->sgd_##real;                             \
        T *restrict param = run->param;                                                 \
        const T *restrict grad = run->grad;                                             \
        T *restrict buffer = run->state[0];                                             \
        const zs_dither dither = dither_of(run, begin);                                 \
        const uint32_t number = (uint32_t)run->number;                                  \
        const real_##real factor = run->factor;                                         \
        ZS_NO_OVERLAP for (int64_t i = begin; i < end; i++)                             \
        {                                                                               \
            zs_sgd_cell_##real cell = {load(param[i]), momentum ? load(buffer[i]) : 0}; \
            zs_sgd_update_##real(&k, &cell, load(grad[i]) * factor, momentum, fused);   \
            const zs_noise noise = zs_noise_of(&dither, number + (uint32_t)i);          \
            param[i] = store(cell.param, noise.of[0] >> 16);                            \
            if (momentum) buffer[i] = store(cell.buffer, noise.of[0] & 0xffffu);        \
        }                                                                               \
    }

#define LOOPS(suffix, T, real, load, store)                                  \
    ZS_FOR_EACH_ISA(ADAM_LOOP, adam_##suffix, T, real, load, store, false)   \
    ZS_FOR_EACH_ISA(ADAM_LOOP, amsgrad_##suffix, T, real, load, store, true) \
    ZS_FOR_EACH_ISA(SGD_LOOP, sgd_##suffix, T, real, load, store, false)     \
    ZS_FOR_EACH_ISA(SGD_LOOP, momentum_##suffix, T, real, load, store, true)

LOOPS(f32, float, f32, SAME, STORE_SAME)
LOOPS(f64, double, f64, SAME, STORE_SAME)
LOOPS(bf16, zs_bf16, f32, zs_from_bf16, STORE_BF16)
LOOPS(f16, zs_f16, f32, zs_from_f16, STORE_F16)
LOOPS(dithered, zs_bf16, f32, zs_from_bf16, STORE_DITHERED)

/* A dtype, or bfloat16 rounded stochastically. */
enum { DITHERED = ZS_BYTES, KINDS };

#define BY_KIND(rule)                                                                    \
    {                                                                                    \
        [ZS_F32] = ZS_ISA_TABLE(rule##_f32),        [ZS_F64] = ZS_ISA_TABLE(rule##_f64), \
        [ZS_BF16] = ZS_ISA_TABLE(rule##_bf16),      [ZS_F16] = ZS_ISA_TABLE(rule##_f16), \
        [DITHERED] = ZS_ISA_TABLE(rule##_dithered),                                      \
    }

zs_run_loop *zs_run_loop_for(zs_rule rule, bool full, const zs_run *run)
{
    if (run->form != ZS_FORM_PLAIN) return zs_compact_loop_for(rule, full, run);
    static zs_run_loop *const loops[2][2][KINDS][ZS_ISA_COUNT] = {
        [ZS_RULE_ADAM] = {BY_KIND(adam), BY_KIND(amsgrad)},
        [ZS_RULE_SGD] = {BY_KIND(sgd), BY_KIND(momentum)},
    };
    return loops[rule][full][run->dithered ? (int)DITHERED : (int)run->dtype][zs_isa_best()];
}

/* Threads' ranges end at multiples of this from the start of a run: whole groups, vectors and cache lines of every
 * dtype. */
enum { CUT = ZS_GROUP };

/* The cut at element `at` of a run of `numel` elements, moved to the next multiple of CUT. */
static int64_t cut(int64_t at, int64_t numel)
{
    if (at <= 0) return 0;
    int64_t rounded = (at + CUT - 1) / CUT * CUT;
    return rounded < numel ? rounded : numel;
}

void zs_update_range(zs_run_loop *loop, const zs_run *run, int64_t from, int64_t to)
{
    while (from < to) {
        uint64_t number = run->number + (uint64_t)from;
        uint64_t left = (UINT64_C(1) << 32) - (uint32_t)number; /* before it changes */
        int64_t stop = run->dithered && left < (uint64_t)(to - from) ? from + (int64_t)left : to;
        loop(run, from, stop);
        from = stop;
    }
}

void zs_update_part(const zs_update_job *job, int64_t begin, int64_t end)
{
    zs_run_loop *loop = zs_run_loop_for(job->rule, job->full, job->run);
    zs_update_range(loop, job->run, cut(begin, job->run->numel), cut(end, job->run->numel));
}
