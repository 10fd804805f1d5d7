/* optim_cpu.c - the loops of optim.h on the CPU: each rule, for each dtype, for each instruction set.
 *
 * The one idea: a loop is loads, one rule of update.h, stores. 28 bytes pass per element of AdamW, so memory sets the
 * speed if the compiler vectorises, and it does: no branch depends on an element. float16 and bfloat16 are updated in
 * float, with parameter and state rounded when stored, as torch's fused optimizers do.
 */
#include "optim.h"
#include "simd.h"

#define SAME(x) (x)

#define ADAM_LOOP(name, target, fused, T, real, load, store, amsgrad)                                             \
    target static void name(const zs_run *run, int64_t begin, int64_t end)                                        \
    {                                                                                                             \
        const zs_adam_##real k = run->constants->adam_##real;                                                     \
        T *restrict param = run->param;                                                                           \
        const T *restrict grad = run->grad;                                                                       \
        T *restrict exp_avg = run->state[0], *restrict exp_avg_sq = run->state[1], *restrict max = run->state[2]; \
        _Pragma("GCC ivdep") for (int64_t i = begin; i < end; i++)                                                \
        {                                                                                                         \
            zs_adam_cell_##real cell = {load(param[i]), load(exp_avg[i]), load(exp_avg_sq[i]),                    \
                                        amsgrad ? load(max[i]) : 0};                                              \
            zs_adam_update_##real(&k, &cell, load(grad[i]), amsgrad, fused);                                      \
            param[i] = store(cell.param);                                                                         \
            exp_avg[i] = store(cell.exp_avg);                                                                     \
            exp_avg_sq[i] = store(cell.exp_avg_sq);                                                               \
            if (amsgrad) max[i] = store(cell.max_exp_avg_sq);                                                     \
        }                                                                                                         \
    }

#define SGD_LOOP(name, target, fused, T, real, load, store, momentum)                   \
    target static void name(const zs_run *run, int64_t begin, int64_t end)              \
    {                                                                                   \
        const zs_sgd_##real k = run->constants->sgd_##real;                             \
        T *restrict param = run->param;                                                 \
        const T *restrict grad = run->grad;                                             \
        T *restrict buffer = run->state[0];                                             \
        _Pragma("GCC ivdep") for (int64_t i = begin; i < end; i++)                      \
        {                                                                               \
            zs_sgd_cell_##real cell = {load(param[i]), momentum ? load(buffer[i]) : 0}; \
            zs_sgd_update_##real(&k, &cell, load(grad[i]), momentum, fused);            \
            param[i] = store(cell.param);                                               \
            if (momentum) buffer[i] = store(cell.buffer);                               \
        }                                                                               \
    }

#define LOOPS(suffix, T, real, load, store)                                  \
    ZS_FOR_EACH_ISA(ADAM_LOOP, adam_##suffix, T, real, load, store, false)   \
    ZS_FOR_EACH_ISA(ADAM_LOOP, amsgrad_##suffix, T, real, load, store, true) \
    ZS_FOR_EACH_ISA(SGD_LOOP, sgd_##suffix, T, real, load, store, false)     \
    ZS_FOR_EACH_ISA(SGD_LOOP, momentum_##suffix, T, real, load, store, true)

LOOPS(f32, float, f32, SAME, SAME)
LOOPS(f64, double, f64, SAME, SAME)
LOOPS(bf16, zs_bf16, f32, zs_from_bf16, zs_to_bf16)
LOOPS(f16, zs_f16, f32, zs_from_f16, zs_to_f16)

enum { DTYPES = ZS_BYTES };

#define BY_DTYPE(rule)                         \
    {                                          \
        [ZS_F32] = ZS_ISA_TABLE(rule##_f32),   \
        [ZS_F64] = ZS_ISA_TABLE(rule##_f64),   \
        [ZS_BF16] = ZS_ISA_TABLE(rule##_bf16), \
        [ZS_F16] = ZS_ISA_TABLE(rule##_f16),   \
    }

zs_run_loop *zs_run_loop_for(zs_rule rule, bool full, zs_dtype dtype)
{
    static zs_run_loop *const loops[2][2][DTYPES][ZS_ISA_COUNT] = {
        [ZS_RULE_ADAM] = {BY_DTYPE(adam), BY_DTYPE(amsgrad)},
        [ZS_RULE_SGD] = {BY_DTYPE(sgd), BY_DTYPE(momentum)},
    };
    return loops[rule][full][dtype][zs_isa_best()];
}
