/* kept_cases.h - steps of all kinds, for the programs that kill kept steps: check_kept.c, kill_kept.c. */
#ifndef ZS_KEPT_CASES_H
#define ZS_KEPT_CASES_H

#include "optim/kept_step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/memory.h"
#include "optim/optim.h"

/* What a run is. */
typedef struct kind {
    const char *name;
    zs_rule rule;
    bool full, first; /* SGD: first use of the momentum */
    zs_dtype dtype;
    zs_form form;
    bool dithered, low;
} kind;

#define PLAIN_KINDS(name, dtype, dithered)                                                   \
    {name "-adam", ZS_RULE_ADAM, false, false, dtype, ZS_FORM_PLAIN, dithered, false},       \
        {name "-amsgrad", ZS_RULE_ADAM, true, false, dtype, ZS_FORM_PLAIN, dithered, false}, \
        {name "-sgd", ZS_RULE_SGD, false, false, dtype, ZS_FORM_PLAIN, dithered, false},     \
        {name "-momentum", ZS_RULE_SGD, true, false, dtype, ZS_FORM_PLAIN, dithered, false}, \
    {                                                                                        \
        name "-first", ZS_RULE_SGD, true, true, dtype, ZS_FORM_PLAIN, dithered, false        \
    }
#define COMPACT_KINDS(name, dtype, form, low)                               \
    {name "-adam", ZS_RULE_ADAM, false, false, dtype, form, false, low},    \
    {                                                                       \
        name "-momentum", ZS_RULE_SGD, true, false, dtype, form, false, low \
    }

static const kind KINDS[] = {
    PLAIN_KINDS("f32", ZS_F32, false),
    PLAIN_KINDS("f64", ZS_F64, false),
    PLAIN_KINDS("bf16", ZS_BF16, false),
    PLAIN_KINDS("f16", ZS_F16, false),
    PLAIN_KINDS("dithered", ZS_BF16, true),
    COMPACT_KINDS("wide-f32", ZS_F32, ZS_FORM_WIDE, false),
    COMPACT_KINDS("wide-bf16", ZS_BF16, ZS_FORM_WIDE, false),
    COMPACT_KINDS("wide-low", ZS_BF16, ZS_FORM_WIDE, true),
    COMPACT_KINDS("coded-f32", ZS_F32, ZS_FORM_CODED, false),
    COMPACT_KINDS("coded-bf16", ZS_BF16, ZS_FORM_CODED, false),
    COMPACT_KINDS("coded-low", ZS_BF16, ZS_FORM_CODED, true),
    {"compact-sgd", ZS_RULE_SGD, false, false, ZS_BF16, ZS_FORM_WIDE, false, true},
};
enum { N_KINDS = sizeof KINDS / sizeof *KINDS, MOST_RUNS = 4 };

/* --- random numbers ----------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

static inline uint64_t random_word(void)
{
    return zs_mix64(random_state += UINT64_C(0x9e3779b97f4a7c15));
}

/* In [0, n). */
static inline int64_t random_below(int64_t n)
{
    return (int64_t)(random_word() % (uint64_t)n);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* A step: its runs lie in `bytes` of memory from `base` on. */
typedef struct step_case {
    char *base;
    size_t bytes;
    zs_run runs[MOST_RUNS];
    zs_constants constants[MOST_RUNS];
    zs_update_job jobs[MOST_RUNS]; /* of a run each */
    int64_t n;
} step_case;

static inline void set_number(char *at, zs_dtype dtype, float value)
{
    const zs_bf16 bf16 = zs_to_bf16(value);
    const zs_f16 f16 = zs_to_f16(value);
    const double wide = value;
    const void *from = dtype == ZS_F64 ? (const void *)&wide : dtype == ZS_F32 ? (const void *)&value : &f16;
    memcpy(at, dtype == ZS_BF16 ? &bf16 : from, zs_dtype_size(dtype));
}

/* Room for `numel` numbers behind what there is, not aligned more than needed; filled from `least` on, up to 1. */
static inline char *numbers(step_case *to, zs_dtype dtype, int64_t numel, float least)
{
    const size_t size = zs_dtype_size(dtype);
    char *at = to->base + zs_round_up(to->bytes, size);
    for (int64_t i = 0; i < numel; i++)
        set_number(at + (size_t)i * size, dtype, least + (1 - least) * (float)random_below(1 << 20) / (1 << 20));
    to->bytes = (size_t)(at - to->base) + (size_t)numel * size;
    return at;
}

/* Likewise bytes, of [from, from + among). */
static inline char *some_bytes(step_case *to, int64_t n, int from, int among)
{
    char *at = to->base + to->bytes;
    for (int64_t i = 0; i < n; i++)
        at[i] = (char)(from + random_below(among));
    to->bytes += (size_t)n;
    return at;
}

static inline void add_state(step_case *to, zs_run *run, int state)
{
    const float least = state == ZS_STATE_FIRST ? -1 : 0;
    const int64_t n = zs_run_state_numel(state, run->numel);
    if (run->form == ZS_FORM_PLAIN)
        run->state[state] = numbers(to, run->dtype, n, least);
    else if (state >= ZS_STATE_FIRST_SCALE)
        run->state[state] = some_bytes(to, n, state == ZS_STATE_LOW ? -128 : 118, state == ZS_STATE_LOW ? 256 : 8);
    else if (run->form == ZS_FORM_CODED)
        run->state[state] = some_bytes(to, n, -128, 256);
    else
        run->state[state] = numbers(to, ZS_F32, n, least);
}

static inline void set_constants(const kind *of, zs_constants *out)
{
    const zs_hyper hyper = {.lr = 0.01,
                            .weight_decay = 0.1,
                            .beta1 = 0.9,
                            .beta2 = 0.99,
                            .eps = 1e-8,
                            .momentum = 0.9,
                            .decoupled = true,
                            .amsgrad = of->full,
                            .nesterov = true};
    *out = (zs_constants){.step = 3, .first = of->first, .seed = 7, .round = 3};
    out->adam_f32 = zs_adam_at_f32(&hyper, 3);
    out->adam_f64 = zs_adam_at_f64(&hyper, 3);
    out->sgd_f32 = zs_sgd_of_f32(&hyper, of->first);
    out->sgd_f64 = zs_sgd_of_f64(&hyper, of->first);
}

/* Appends a run, whose memory begins behind that of the runs before it. */
static inline void add_run(step_case *to, const kind *of, int64_t numel)
{
    zs_run *run = &to->runs[to->n];
    const bool adam = of->rule == ZS_RULE_ADAM, coded = of->form == ZS_FORM_CODED;
    *run = (zs_run){.factor = of->dtype == ZS_F32 ? 0.5f : 1, .form = of->form, .numel = numel, .dtype = of->dtype};
    run->dithered = of->dithered;
    /* The upper half of a dithered run's numbers changes within it. */
    run->number = of->dithered ? (UINT64_C(1) << 32) - (uint64_t)(numel / 3) : 32 * (uint64_t)random_below(1 << 20);
    run->constants = &to->constants[to->n];
    set_constants(of, &to->constants[to->n]);
    run->param = numbers(to, of->dtype, numel, -1);
    run->grad = numbers(to, of->dtype, numel, -1);
    const bool has[ZS_OPTIM_STATES] = {adam || of->full, adam, adam && of->full, coded, coded && adam, of->low};
    for (int s = 0; s < ZS_OPTIM_STATES; s++)
        if (has[s]) add_state(to, run, s);
    to->jobs[to->n] = (zs_update_job){of->rule, of->full, run, NULL, 1};
    to->n++;
}

/* The plain step. */
static inline void step_plainly(const step_case *of)
{
    for (int64_t i = 0; i < of->n; i++)
        zs_update_part(&of->jobs[i], 0, of->runs[i].numel);
}

#endif
