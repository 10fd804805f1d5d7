/* optim_compact.c - the loops of optim.h on the CPU for runs that are stepped by groups of 32 elements (compact.h), for
 * each width of parameter and state, for each instruction set.
 */
#include "base/simd.h"
#include "optim/optim.h"
#include "update/compact.h"

/* The length of a whole group is a constant, for the compiler. */
#define OVER_GROUPS(name, target, K, constants, update, kind, coded, blocks, ...) \
    target static void name(const zs_run *run, int64_t begin, int64_t end)        \
    {                                                                             \
        if (blocks) begin = zs_adam_blocks(run, begin, end);                      \
        const zs_group first = zs_run_group(run);                                 \
        const K k = constants;                                                    \
        for (int64_t at = begin; at < end; at += ZS_GROUP) {                      \
            const zs_group group = zs_group_at(&first, at, kind, coded);          \
            if (end - at >= ZS_GROUP)                                             \
                update(&group, &k, ZS_GROUP, __VA_ARGS__);                        \
            else                                                                  \
                update(&group, &k, (int)(end - at), __VA_ARGS__);                 \
        }                                                                         \
    }
#define ADAM_LOOP(name, target, fused, kind, coded)                                                                  \
    OVER_GROUPS(name, target, zs_adam_f32, zs_adam_folded_f32(run->constants->adam_f32), zs_group_adam, kind, coded, \
                coded, kind, coded)
#define SGD_LOOP(name, target, fused, kind, momentum, coded)                                                         \
    OVER_GROUPS(name, target, zs_sgd_f32, run->constants->sgd_f32, zs_group_sgd, kind, coded, false, kind, momentum, \
                coded)

ZS_FOR_EACH_ISA(ADAM_LOOP, adam_f32_wide, ZS_IN_F32, false)
ZS_FOR_EACH_ISA(ADAM_LOOP, adam_bf16_wide, ZS_IN_BF16, false)
ZS_FOR_EACH_ISA(ADAM_LOOP, adam_low_wide, ZS_IN_BF16_LOW, false)
ZS_FOR_EACH_ISA(ADAM_LOOP, adam_f32_coded, ZS_IN_F32, true)
ZS_FOR_EACH_ISA(ADAM_LOOP, adam_bf16_coded, ZS_IN_BF16, true)
ZS_FOR_EACH_ISA(ADAM_LOOP, adam_low_coded, ZS_IN_BF16_LOW, true)
ZS_FOR_EACH_ISA(SGD_LOOP, sgd_f32, ZS_IN_F32, false, false)
ZS_FOR_EACH_ISA(SGD_LOOP, sgd_bf16, ZS_IN_BF16, false, false)
ZS_FOR_EACH_ISA(SGD_LOOP, sgd_low, ZS_IN_BF16_LOW, false, false)
ZS_FOR_EACH_ISA(SGD_LOOP, momentum_f32_wide, ZS_IN_F32, true, false)
ZS_FOR_EACH_ISA(SGD_LOOP, momentum_bf16_wide, ZS_IN_BF16, true, false)
ZS_FOR_EACH_ISA(SGD_LOOP, momentum_low_wide, ZS_IN_BF16_LOW, true, false)
ZS_FOR_EACH_ISA(SGD_LOOP, momentum_f32_coded, ZS_IN_F32, true, true)
ZS_FOR_EACH_ISA(SGD_LOOP, momentum_bf16_coded, ZS_IN_BF16, true, true)
ZS_FOR_EACH_ISA(SGD_LOOP, momentum_low_coded, ZS_IN_BF16_LOW, true, true)

zs_run_loop *zs_compact_loop_for(zs_rule rule, bool full, const zs_run *run)
{
    enum { KINDS = 3 };
    static zs_run_loop *const adam[][KINDS][ZS_ISA_COUNT] = {
        {ZS_ISA_TABLE(adam_f32_wide), ZS_ISA_TABLE(adam_bf16_wide), ZS_ISA_TABLE(adam_low_wide)},
        {ZS_ISA_TABLE(adam_f32_coded), ZS_ISA_TABLE(adam_bf16_coded), ZS_ISA_TABLE(adam_low_coded)},
    };
    static zs_run_loop *const momentum[][KINDS][ZS_ISA_COUNT] = {
        {ZS_ISA_TABLE(momentum_f32_wide), ZS_ISA_TABLE(momentum_bf16_wide), ZS_ISA_TABLE(momentum_low_wide)},
        {ZS_ISA_TABLE(momentum_f32_coded), ZS_ISA_TABLE(momentum_bf16_coded), ZS_ISA_TABLE(momentum_low_coded)},
    };
    static zs_run_loop *const sgd[KINDS][ZS_ISA_COUNT] = {ZS_ISA_TABLE(sgd_f32), ZS_ISA_TABLE(sgd_bf16),
                                                          ZS_ISA_TABLE(sgd_low)};
    const int kind = zs_compact_kind(run), coded = run->form == ZS_FORM_CODED;
    if (rule == ZS_RULE_ADAM) return adam[coded][kind][zs_isa_best()];
    return full ? momentum[coded][kind][zs_isa_best()] : sgd[kind][zs_isa_best()];
}
