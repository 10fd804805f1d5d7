/* check_kept.c - kept steps (optim/kept_step.h) that are killed at every store.
 *
 *   check_kept stores KIND            one thread, killed at every store, and what it left by processes that are killed at
 *                                     every store in turn, until no new state is reached
 *   check_kept write KIND             killed at every store of the record
 *   check_kept damage KIND            any bit of the record is flipped, any memory is missing
 *   check_kept random SEED COUNT      steps of random kinds, sizes and threads, killed up to four times
 *
 * Prints what was counted; exit 1 and the promise that is broken. The functions of csrc/ are compiled here with stores
 * that count down to a kill. The stores of a killed update are a part of its results, or garbage. Memory lies elsewhere
 * for each process.
 */
#include <setjmp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/memory.h"
#include "optim/kept_step.h"
#include "optim/optim.h"

/* A kind of run. */
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

static uint64_t random_word(void)
{
    return zs_mix64(random_state += UINT64_C(0x9e3779b97f4a7c15));
}

/* In [0, n). */
static int64_t random_below(int64_t n)
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

static void set_number(char *at, zs_dtype dtype, float value)
{
    const zs_bf16 bf16 = zs_to_bf16(value);
    const zs_f16 f16 = zs_to_f16(value);
    const double wide = value;
    const void *from = dtype == ZS_F64 ? (const void *)&wide : dtype == ZS_F32 ? (const void *)&value : &f16;
    memcpy(at, dtype == ZS_BF16 ? &bf16 : from, zs_dtype_size(dtype));
}

/* Room for `numel` numbers behind what there is, not aligned more than needed; filled from `least` on, up to 1. */
static char *numbers(step_case *to, zs_dtype dtype, int64_t numel, float least)
{
    const size_t size = zs_dtype_size(dtype);
    char *at = to->base + zs_round_up(to->bytes, size);
    for (int64_t i = 0; i < numel; i++)
        set_number(at + (size_t)i * size, dtype, least + (1 - least) * (float)random_below(1 << 20) / (1 << 20));
    to->bytes = (size_t)(at - to->base) + (size_t)numel * size;
    return at;
}

/* The same for bytes in [from, from + among). */
static char *some_bytes(step_case *to, int64_t n, int from, int among)
{
    char *at = to->base + to->bytes;
    for (int64_t i = 0; i < n; i++)
        at[i] = (char)(from + random_below(among));
    to->bytes += (size_t)n;
    return at;
}

static void add_state(step_case *to, zs_run *run, int state)
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

static void set_constants(const kind *of, zs_constants *out)
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
static void add_run(step_case *to, const kind *of, int64_t numel)
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
static void step_plainly(const step_case *of)
{
    for (int64_t i = 0; i < of->n; i++)
        zs_update_part(&of->jobs[i], 0, of->runs[i].numel);
}

/* --- stores that kill --------------------------------------------------------------------------------------------- */

#ifndef UNIT
#define UNIT 64 /* bytes of a store */
#endif
enum { MOST_THREADS = 4, MOST_BYTES = 1 << 18 };

static long countdown; /* stores until the kill; negative: none */
static jmp_buf thread_end, process_end;
static long kills_of[MOST_THREADS]; /* the same for each thread; as countdown begins */

static void one_store(void)
{
    if (countdown-- == 0) longjmp(thread_end, 1);
}

static void copy_units(char *to, const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += UNIT) {
        one_store();
        memcpy(to + at, from + at, bytes - at < UNIT ? bytes - at : UNIT);
    }
}

static void update_units(zs_run_loop *loop, const zs_run *run, int64_t from, int64_t to);

#define ZS_KEPT_COPY(to, from, bytes) copy_units((char *)(to), (const char *)(from), bytes)
#define ZS_KEPT_MARK(at, value) (one_store(), *(at) = (value))
#define ZS_KEPT_UPDATE(loop, run, from, to) update_units(loop, run, from, to)
#define ZS_UPDATE_GRAIN 128 /* two threads for two chunks */

#include "optim/kept_area.c"
#include "optim/kept_step.c"

/* Leaves one memory as a killed update does: `units` have been stored, and every second one is garbage. */
static long leave_half(char *memory, const char *before, size_t bytes, long units)
{
    for (size_t at = 0; at < bytes; at += UNIT, units--) {
        const size_t n = bytes - at < UNIT ? bytes - at : UNIT;
        if (units <= 0)
            memcpy(memory + at, before + at, n);
        else if (units % 2 == 0)
            memset(memory + at, 0xa5, n);
    }
    return units;
}

static void update_units(zs_run_loop *loop, const zs_run *run, int64_t from, int64_t to)
{
    static char before[ZS_KEPT_MEMORIES][ZS_KEPT_UNDO];
    long units = 0;
    for (int i = 0; i < ZS_KEPT_MEMORIES; i++) {
        const char *memory = zs_kept_memory_of(run, i);
        if (i == ZS_KEPT_GRAD || memory == NULL) continue;
        const size_t bytes = zs_kept_bytes_of(run, i, to - from);
        memcpy(before[i], memory + zs_kept_bytes_of(run, i, from), bytes);
        units += (long)((bytes + UNIT - 1) / UNIT);
    }
    zs_update_range(loop, run, from, to);
    if (countdown < 0 || countdown >= units) {
        countdown -= countdown < 0 ? 0 : units;
        return;
    }
    for (int i = 0; i < ZS_KEPT_MEMORIES; i++) {
        char *memory = (char *)zs_kept_memory_of(run, i);
        if (i == ZS_KEPT_GRAD || memory == NULL) continue;
        const size_t bytes = zs_kept_bytes_of(run, i, to - from);
        countdown = leave_half(memory + zs_kept_bytes_of(run, i, from), before[i], bytes, countdown);
    }
    longjmp(thread_end, 1);
}

/* Threads in turn: they share no memory that they write to, so each may be killed at a different store. */
void zs_parallel_for(int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end), void *ctx)
{
    volatile bool killed = false;
    (void)grain;
    for (volatile int64_t i = 0; i < n; i++) {
        countdown = kills_of[i];
        if (setjmp(thread_end) == 0)
            fn(ctx, i, i + 1);
        else
            killed = true;
        kills_of[i] = killed ? kills_of[i] : countdown; /* the rest */
    }
    if (killed) longjmp(process_end, 1);
}

/* --- processes ---------------------------------------------------------------------------------------------------- */

enum { HOMES = 2, MOST_AREA = 1 << 16, MOST_RANGES = 2 };

static step_case now;                              /* its memory is homes[0] */
static _Alignas(64) char homes[HOMES][MOST_BYTES]; /* the kept memory, where a process has it */
static _Alignas(64) char areas[HOMES][MOST_AREA];
static _Alignas(64) char begin[MOST_BYTES], wanted[MOST_BYTES]; /* before the step and after it */
static size_t area_bytes;
static zs_kept_range ranges[HOMES][MOST_RANGES];
static zs_kept_files files[HOMES];
static long n_kills;

static void broken(const char *promise)
{
    printf("broken: %s (%s)\n", promise, zs_last_message());
    exit(1);
}

static void begin_case(void)
{
    now.base = homes[0];
    now.bytes = 0;
    now.n = 0;
}

/* Two files, in another order in each home. */
static void make_files(void)
{
    const size_t cut = (size_t)((const char *)now.runs[0].grad - homes[0]);
    for (int h = 0; h < HOMES; h++) {
        ranges[h][h] = (zs_kept_range){homes[h], cut, 4096, 5};
        ranges[h][1 - h] = (zs_kept_range){homes[h] + cut, now.bytes - cut, 0, 9};
        files[h] = (zs_kept_files){ranges[h], MOST_RANGES};
    }
}

/* The case is complete: computes its contents before and after the step, and makes its area. */
static void end_case(int threads)
{
    if (now.bytes > MOST_BYTES) broken("a case is too large");
    memcpy(begin, homes[0], now.bytes);
    step_plainly(&now);
    memcpy(wanted, homes[0], now.bytes);
    memcpy(homes[0], begin, now.bytes);
    make_files();
    const zs_kept_room room = {now.n, threads};
    area_bytes = zs_kept_bytes(&room);
    if (area_bytes == 0 || area_bytes > MOST_AREA || zs_kept_format(areas[0], &room) != ZS_OK)
        broken("an area is made");
}

static void write_step(uint64_t step)
{
    countdown = -1;
    if (zs_kept_write(areas[0], step, now.jobs, now.n, &files[0]) != ZS_OK) broken("a step is recorded");
}

static void no_kills(void)
{
    for (int i = 0; i < MOST_THREADS; i++)
        kills_of[i] = -1;
}

/* A process at this home finishes a step, and is killed as kills_of says; true: it was not. */
static bool finish(int home, uint64_t step)
{
    if (setjmp(process_end) != 0) {
        n_kills++;
        return false;
    }
    if (zs_kept_finish(areas[home], area_bytes, step, &files[home]) != ZS_OK) broken("a step is finished");
    return true;
}

/* The next process has the files at the other home. */
static void move(int from)
{
    memcpy(homes[1 - from], homes[from], now.bytes);
    memcpy(areas[1 - from], areas[from], area_bytes);
    memset(homes[from], 0xee, now.bytes);
    memset(areas[from], 0xee, area_bytes);
}

static void check_done(int home)
{
    if (memcmp(homes[home], wanted, now.bytes) != 0) broken("the bits are those of the plain step");
}

static const kind *kind_named(const char *name)
{
    for (int i = 0; i < N_KINDS; i++)
        if (strcmp(KINDS[i].name, name) == 0) return &KINDS[i];
    broken("a kind is known");
    return NULL;
}

/* --- one thread, any number of kills ------------------------------------------------------------------------------ */

/* States of both, as they follow each other; those seen, by hash. */
static char *states;
static uint64_t *seen;
static long n_states, room_of_states;

static uint64_t hash_of(const char *from, size_t bytes)
{
    uint64_t x = 1;
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, from + at, bytes - at < 8 ? bytes - at : 8);
        x = zs_mix64(x ^ word) + 1;
    }
    return x;
}

static char *state_at(long index)
{
    return states + (size_t)index * (area_bytes + now.bytes);
}

/* Keeps the state of the process at this home, if it is new. */
static void keep_state(int home)
{
    if (n_states == room_of_states) {
        room_of_states += room_of_states + 1024;
        states = realloc(states, (size_t)room_of_states * (area_bytes + now.bytes));
        seen = realloc(seen, (size_t)room_of_states * sizeof *seen);
        if (states == NULL || seen == NULL) exit(2);
    }
    memcpy(state_at(n_states), areas[home], area_bytes);
    memcpy(state_at(n_states) + area_bytes, homes[home], now.bytes);
    const uint64_t hash = hash_of(state_at(n_states), area_bytes + now.bytes);
    for (long i = 0; i < n_states; i++)
        if (seen[i] == hash) return;
    seen[n_states++] = hash;
}

static void put_state(int home, long index)
{
    memcpy(areas[home], state_at(index), area_bytes);
    memcpy(homes[home], state_at(index) + area_bytes, now.bytes);
}

static void small_case(const kind *of, int threads)
{
    const int64_t chunk = zs_kept_chunk(of->dtype);
    begin_case();
    add_run(&now, of, threads == 1 ? chunk : 2 * chunk);
    add_run(&now, of, threads == 1 ? 33 : chunk + 33);
    end_case(threads);
}

static void check_stores(const kind *of)
{
    small_case(of, 1);
    write_step(1);
    keep_state(0);
    for (long i = 0; i < n_states; i++) {
        const int home = (int)(i % HOMES);
        for (long kill = 0;; kill++) {
            put_state(home, i);
            no_kills();
            kills_of[0] = kill;
            if (finish(home, 1)) break;
            keep_state(home);
        }
        check_done(home);
    }
    printf("states %ld kills %ld\n", n_states, n_kills);
}

/* --- the record --------------------------------------------------------------------------------------------------- */

/* Records step 2 after step 1, killed after `kill` stores; true: it was not. */
static bool write_second(long kill)
{
    countdown = kill;
    if (setjmp(thread_end) != 0) return false;
    if (zs_kept_write(areas[0], 2, now.jobs, now.n, &files[0]) != ZS_OK) broken("a second step is recorded");
    return true;
}

static void after_killed_write(void)
{
    static char before[MOST_BYTES];
    memcpy(before, homes[0], now.bytes);
    no_kills();
    zs_clear_error();
    if (zs_kept_finish(areas[0], area_bytes, 2, &files[0]) != ZS_ERR_STATE) broken("no step without a whole record");
    zs_clear_error();
    const zs_status first = zs_kept_finish(areas[0], area_bytes, 1, &files[0]);
    if (first != ZS_OK && first != ZS_ERR_STATE) broken("the first step is done, or no more there");
    if (memcmp(before, homes[0], now.bytes) != 0) broken("nothing is updated without a record");
    zs_clear_error();
}

static void check_write(const kind *of)
{
    long kill = 0;
    for (bool whole = false; !whole; kill++) {
        small_case(of, 2);
        write_step(1);
        no_kills();
        finish(0, 1);
        whole = write_second(kill);
        if (!whole) after_killed_write();
        if (!whole) write_second(-1);
        no_kills();
        finish(0, 2);
        memcpy(begin, homes[0], now.bytes);
        memcpy(homes[0], wanted, now.bytes);
        step_plainly(&now);
        if (memcmp(begin, homes[0], now.bytes) != 0) broken("a second step has the bits of the plain step");
    }
    printf("kills %ld\n", kill - 1);
}

/* --- damage ------------------------------------------------------------------------------------------------------- */

static void check_refused(size_t bytes, const zs_kept_files *given, const char *promise)
{
    zs_clear_error();
    no_kills();
    if (zs_kept_finish(areas[0], bytes, 1, given) == ZS_OK) broken(promise);
    if (memcmp(homes[0], begin, now.bytes) != 0) broken("what is refused writes nothing");
}

static void check_bits(void)
{
    const zs_kept_parts at = zs_kept_parts_of(areas[0], &((zs_kept_head *)areas[0])->room);
    const size_t end = (size_t)((char *)(at.runs + at.head->n_runs) - areas[0]);
    for (size_t bit = 0; bit < 8 * end; bit++) {
        if (bit / 8 >= sizeof(zs_kept_head) && bit / 8 < (size_t)((char *)at.runs - areas[0])) continue; /* a gap */
        areas[0][bit / 8] ^= (char)(1 << bit % 8);
        check_refused(area_bytes, &files[0], "a damaged record is refused");
        areas[0][bit / 8] ^= (char)(1 << bit % 8);
    }
    for (size_t bytes = 0; bytes < area_bytes; bytes += 8)
        check_refused(bytes, &files[0], "a shortened area is refused");
    at.workers[1].done = 7; /* it has three chunks */
    check_refused(area_bytes, &files[0], "a thread behind its last chunk is refused");
    at.workers[1].done = 0;
}

static void check_missing(void)
{
    for (int r = 0; r < MOST_RANGES; r++) {
        zs_kept_range less[MOST_RANGES];
        memcpy(less, ranges[0], sizeof less);
        less[r].bytes -= 1;
        check_refused(area_bytes, &(zs_kept_files){less, MOST_RANGES}, "shorter memory is refused");
        less[r] = ranges[0][r];
        less[r].file = 77;
        check_refused(area_bytes, &(zs_kept_files){less, MOST_RANGES}, "memory of another file is refused");
    }
    check_refused(area_bytes, &(zs_kept_files){NULL, 0}, "a step without files is refused");
}

/* Each memory of a run in turn is outside of the files. */
static void check_unkept(void)
{
    static char outside[MOST_BYTES];
    static const char *const WORDS[] = {"parameter", "gradient", "first moment", "second moment"};
    for (int i = 0; i < 4; i++) {
        zs_run run = now.runs[0];
        void **const at[] = {&run.param, (void **)&run.grad, &run.state[0], &run.state[1]};
        if (*at[i] == NULL) continue;
        *at[i] = outside;
        zs_update_job job = now.jobs[0];
        job.run = &run;
        zs_clear_error();
        countdown = -1;
        const zs_status status = zs_kept_write(areas[0], 1, &job, 1, &files[0]);
        if (status != ZS_ERR_VALUE || strstr(zs_last_message(), WORDS[i]) == NULL) broken("unkept memory is named");
        check_refused(area_bytes, &files[0], "a failed record is none");
    }
}

static void check_unsupported(void)
{
    static const zs_device_ops OPS = {.queues = true};
    const zs_device device = {.ops = &OPS};
    zs_run run = now.runs[0];
    run.device = &device;
    zs_update_job jobs[] = {now.jobs[0], now.jobs[0]};
    jobs[1].run = &run;
    zs_clear_error();
    if (zs_kept_write(areas[0], 1, jobs, 2, &files[0]) != ZS_ERR_UNSUPPORTED) broken("a GPU's runs are refused");
    zs_clear_error();
    zs_update_job many[] = {now.jobs[0], now.jobs[0], now.jobs[0]};
    if (zs_kept_write(areas[0], 1, many, 3, &files[0]) != ZS_ERR_VALUE) broken("more runs than fit are refused");
    const zs_kept_room none = {1, 0}, huge = {INT64_MAX, 1}, crowd = {1, ZS_KEPT_MAX_THREADS + 1};
    if (zs_kept_bytes(&none) || zs_kept_bytes(&huge) || zs_kept_bytes(&crowd)) broken("impossible rooms have no size");
    if (zs_kept_format(areas[0], &none) != ZS_ERR_VALUE) broken("impossible rooms are refused");
}

static void check_damage(const kind *of)
{
    small_case(of, 2);
    write_step(1);
    check_bits();
    check_missing();
    check_unkept();
    check_unsupported();
    printf("damage %s\n", of->name);
}

/* --- random kills ------------------------------------------------------------------------------------------------- */

static void random_case(int threads)
{
    const int64_t n = 1 + random_below(MOST_RUNS);
    begin_case();
    for (int64_t i = 0; i < n; i++)
        add_run(&now, &KINDS[random_below(N_KINDS)], 1 + random_below(random_below(2) ? 600 : 40));
    end_case(threads);
}

static void check_random(long count)
{
    for (long i = 0; i < count; i++) {
        int home = 0;
        random_case(1 + (int)random_below(MOST_THREADS));
        write_step(1);
        for (int64_t kills = 1 + random_below(4); kills > 0; kills--) {
            for (int t = 0; t < MOST_THREADS; t++)
                kills_of[t] = random_below(3) ? random_below(random_below(2) ? 400 : 40) : -1;
            finish(home, 1);
            move(home);
            home = 1 - home;
        }
        no_kills();
        finish(home, 1);
        check_done(home);
        if (!finish(home, 1)) broken("a finished step has nothing left");
        check_done(home);
    }
    printf("steps %ld kills %ld\n", count, n_kills);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    static const struct {
        const char *name;
        void (*check)(const kind *of);
    } CHECKS[] = {{"stores", check_stores}, {"write", check_write}, {"damage", check_damage}};
    for (size_t i = 0; argc == 3 && i < sizeof CHECKS / sizeof *CHECKS; i++) {
        if (strcmp(what, CHECKS[i].name) != 0) continue;
        CHECKS[i].check(kind_named(argv[2]));
        return 0;
    }
    if (argc != 4 || strcmp(what, "random") != 0) return 2;
    random_state = strtoull(argv[2], NULL, 10);
    check_random(atol(argv[3]));
    return 0;
}
