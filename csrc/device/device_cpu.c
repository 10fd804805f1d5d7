/* device_cpu.c - the CPU's loops of device.h.
 *
 * Memory is the limit, so every byte passes once: a sum reads all its sources side by side. With any number of threads
 * and any cuts, an element takes the same operations in the same order; norms are cut into parts that depend on the
 * length alone. So the bits are the same on every run.
 */
#include "device/device.h"

#include <math.h>
#include <stdalign.h>
#include <stdatomic.h>

#include "base/half.h"
#include "base/simd.h"
#include "base/tree.h"

/* Elements below which another thread costs more than it helps. */
enum { GRAIN = 1 << 15 };

enum { DTYPES = ZS_BYTES }; /* the dtypes that are numbers */

#define SAME(x) (x)
#define BY_DTYPE(loop)                         \
    {                                          \
        [ZS_F32] = ZS_ISA_TABLE(loop##_f32),   \
        [ZS_F64] = ZS_ISA_TABLE(loop##_f64),   \
        [ZS_BF16] = ZS_ISA_TABLE(loop##_bf16), \
        [ZS_F16] = ZS_ISA_TABLE(loop##_f16),   \
    }
#define FOR_EACH_DTYPE(LOOP, name)                                               \
    ZS_FOR_EACH_ISA(LOOP, name##_f32, float, float, SAME, SAME)                  \
    ZS_FOR_EACH_ISA(LOOP, name##_f64, double, double, SAME, SAME)                \
    ZS_FOR_EACH_ISA(LOOP, name##_bf16, zs_bf16, float, zs_from_bf16, zs_to_bf16) \
    ZS_FOR_EACH_ISA(LOOP, name##_f16, zs_f16, float, zs_from_f16, zs_to_f16)

uint64_t zs_count_bytes(uint64_t bytes)
{
    static atomic_uint_least64_t so_far;
    return atomic_fetch_add(&so_far, bytes) + bytes;
}

size_t zs_dtype_size(zs_dtype dtype)
{
    static const size_t sizes[] = {[ZS_F32] = 4, [ZS_F64] = 8, [ZS_BF16] = 2, [ZS_F16] = 2, [ZS_BYTES] = 1};
    return sizes[dtype];
}

/* --- sum over ranks ----------------------------------------------------------------------------------------------- */

/* Elements whose partial sums stay in the first-level cache (8 KiB in double); of floats, one page of each source. */
enum { BLOCK = 1024 };

/* Sources that are added in registers in one pass. */
enum { TOGETHER = 4 };

typedef void sum_loop(const zs_sum *sum, int64_t begin, int64_t end);

/* 1 to 4 sources and nothing to add to: one pass, straight to dst. dst may be a source, element upon element. */
#define SUM_FEW(name, target, fused, T, R, load, store)                                                   \
    target static void name(const zs_sum *sum, int64_t begin, int64_t end)                                \
    {                                                                                                     \
        const R scale = (R)sum->scale;                                                                    \
        const T *a = sum->src[0], *b = sum->src[sum->world > 1 ? 1 : 0];                                  \
        const T *c = sum->src[sum->world > 2 ? 2 : 0], *d = sum->src[sum->world > 3 ? 3 : 0];             \
        T *dst = sum->dst;                                                                                \
        if (sum->world == 1) {                                                                            \
            ZS_NO_OVERLAP for (int64_t i = begin; i < end; i++) dst[i] = store(load(a[i]) * scale);       \
        } else if (sum->world == 2) {                                                                     \
            ZS_NO_OVERLAP for (int64_t i = begin; i < end; i++) dst[i] =                                  \
                store(load(a[i]) * scale + load(b[i]) * scale);                                           \
        } else if (sum->world == 3) {                                                                     \
            ZS_NO_OVERLAP for (int64_t i = begin; i < end; i++) dst[i] =                                  \
                store(load(a[i]) * scale + load(b[i]) * scale + load(c[i]) * scale);                      \
        } else {                                                                                          \
            ZS_NO_OVERLAP for (int64_t i = begin; i < end; i++) dst[i] =                                  \
                store(load(a[i]) * scale + load(b[i]) * scale + load(c[i]) * scale + load(d[i]) * scale); \
        }                                                                                                 \
    }

/* Any number of sources, absent ones, accumulation: block by block, TOGETHER sources at a time. -0 is what adding does
 * not change. */
#define SUM_MANY(name, target, fused, T, load, D, load_to, store, R)                                                \
    target static void name(const zs_sum *sum, int64_t begin, int64_t end)                                          \
    {                                                                                                               \
        static const T zeros[BLOCK];                                                                                \
        const R scale = (R)sum->scale;                                                                              \
        R total[BLOCK], before[BLOCK];                                                                              \
        for (int64_t at = begin; at < end; at += BLOCK) {                                                           \
            D *dst = (D *)sum->dst + at;                                                                            \
            const int n = (int)(end - at < BLOCK ? end - at : BLOCK);                                               \
            for (int i = 0; i < n; i++)                                                                             \
                total[i] = -(R)0;                                                                                   \
            for (int i = 0; i < n; i++)                                                                             \
                before[i] = sum->accumulate ? load_to(dst[i]) : -(R)0;                                              \
            for (int r = 0; r < sum->world; r += TOGETHER) {                                                        \
                const T *in[TOGETHER];                                                                              \
                const int sources = sum->world - r < TOGETHER ? sum->world - r : TOGETHER;                          \
                for (int s = 0; s < sources; s++)                                                                   \
                    in[s] = sum->src[r + s] ? (const T *)sum->src[r + s] + at : zeros;                              \
                if (sources == TOGETHER) {                                                                          \
                    const T *a = in[0], *b = in[1], *c = in[2], *d = in[3];                                         \
                    for (int i = 0; i < n; i++)                                                                     \
                        total[i] = total[i] + (load(a[i]) + before[i]) * scale + (load(b[i]) + before[i]) * scale + \
                                   (load(c[i]) + before[i]) * scale + (load(d[i]) + before[i]) * scale;             \
                    continue;                                                                                       \
                }                                                                                                   \
                for (int s = 0; s < sources; s++) {                                                                 \
                    const T *one = in[s];                                                                           \
                    for (int i = 0; i < n; i++)                                                                     \
                        total[i] += (load(one[i]) + before[i]) * scale;                                             \
                }                                                                                                   \
            }                                                                                                       \
            for (int i = 0; i < n; i++)                                                                             \
                dst[i] = store(total[i]);                                                                           \
        }                                                                                                           \
    }

/* From each dtype to each; in double where one of the two is. */
#define FROM_EACH(LOOP, name, to, D, load_to, store, R, R64)                             \
    ZS_FOR_EACH_ISA(LOOP, name##_f32_##to, float, SAME, D, load_to, store, R)            \
    ZS_FOR_EACH_ISA(LOOP, name##_f64_##to, double, SAME, D, load_to, store, R64)         \
    ZS_FOR_EACH_ISA(LOOP, name##_bf16_##to, zs_bf16, zs_from_bf16, D, load_to, store, R) \
    ZS_FOR_EACH_ISA(LOOP, name##_f16_##to, zs_f16, zs_from_f16, D, load_to, store, R)
#define FROM_EACH_TO_EACH(LOOP, name)                                          \
    FROM_EACH(LOOP, name, f32, float, SAME, SAME_FLOAT, float, double)         \
    FROM_EACH(LOOP, name, f64, double, SAME, SAME, double, double)             \
    FROM_EACH(LOOP, name, bf16, zs_bf16, zs_from_bf16, TO_BF16, float, double) \
    FROM_EACH(LOOP, name, f16, zs_f16, zs_from_f16, TO_F16, float, double)
#define BY_SOURCE(loop, to)                         \
    {                                               \
        [ZS_F32] = ZS_ISA_TABLE(loop##_f32_##to),   \
        [ZS_F64] = ZS_ISA_TABLE(loop##_f64_##to),   \
        [ZS_BF16] = ZS_ISA_TABLE(loop##_bf16_##to), \
        [ZS_F16] = ZS_ISA_TABLE(loop##_f16_##to),   \
    }
#define BY_TARGET(loop)                    \
    {                                      \
        [ZS_F32] = BY_SOURCE(loop, f32),   \
        [ZS_F64] = BY_SOURCE(loop, f64),   \
        [ZS_BF16] = BY_SOURCE(loop, bf16), \
        [ZS_F16] = BY_SOURCE(loop, f16),   \
    }
#define SAME_FLOAT(x) ((float)(x))
#define TO_BF16(x) zs_to_bf16((float)(x))
#define TO_F16(x) zs_to_f16((float)(x))

FOR_EACH_DTYPE(SUM_FEW, sum_few)
FROM_EACH_TO_EACH(SUM_MANY, sum_many)

static void sum_part(void *ctx, int64_t begin, int64_t end)
{
    static sum_loop *const few[DTYPES][ZS_ISA_COUNT] = BY_DTYPE(sum_few);
    static sum_loop *const many[DTYPES][DTYPES][ZS_ISA_COUNT] = BY_TARGET(sum_many);
    const zs_sum *sum = ctx;
    bool plain = sum->world <= TOGETHER && !sum->accumulate && sum->to == sum->dtype;
    for (int r = 0; r < sum->world; r++)
        plain = plain && sum->src[r] != NULL;
    (plain ? few[sum->dtype] : many[sum->to][sum->dtype])[zs_isa_best()](sum, begin, end);
}

/* Elements of each host's sum at a time. */
enum { CHUNK = 512, ROOM = 8 * CHUNK }; /* of all hosts: of more than 8, chunks are shorter */

/* The sources from `first` on of one host, unscaled, to `part`; NULL: none of them has anything. */
static const void *sum_host(const zs_sum *sum, int first, int64_t at, int64_t n, void *part)
{
    const void *src[sum->per_host];
    bool any = false;
    for (int r = 0; r < sum->per_host; r++) {
        const char *from = sum->src[first + r];
        src[r] = from != NULL ? from + (size_t)at * zs_dtype_size(sum->dtype) : NULL;
        any = any || from != NULL;
    }
    if (!any) return NULL;
    zs_sum host = {.src = src, .world = sum->per_host, .dst = part, .numel = n, .dtype = sum->dtype, .scale = 1.0};
    host.to = zs_dtype_of_partial_sum(sum->dtype);
    sum_part(&host, 0, n);
    return part;
}

/* Host by host, then the hosts' sums: the result of a transport that sums within hosts first. */
static void sum_hosts(void *ctx, int64_t begin, int64_t end)
{
    const zs_sum *sum = ctx;
    const void *src[sum->world];
    const int hosts = sum->world / sum->per_host;
    const int64_t fits = hosts < ROOM ? ROOM / hosts : 1, chunk = fits < CHUNK ? fits : CHUNK;
    alignas(64) double parts[hosts < ROOM ? ROOM : hosts]; /* the stack is a thread's of torch or OpenMP */
    zs_sum all = *sum;
    all.src = src;
    all.dtype = zs_dtype_of_partial_sum(sum->dtype);
    for (int64_t at = begin; at < end; at += chunk) {
        int64_t n = end - at < chunk ? end - at : chunk;
        for (int r = 0; r < all.world; r++)
            src[r] =
                r % sum->per_host == 0 ? sum_host(sum, r, at, n, parts + (size_t)(r / sum->per_host * chunk)) : NULL;
        all.dst = (char *)sum->dst + (size_t)at * zs_dtype_size(sum->to);
        sum_part(&all, 0, n);
    }
}

/* Adds two chunks; NULL: it is absent. */
static const void *add_pair(const zs_sum *sum, const void *left, const void *right, int64_t n, void *dst)
{
    if (left == NULL || right == NULL) return left != NULL ? left : right;
    const void *src[] = {left, right};
    zs_sum pair = {.src = src, .world = 2, .dst = dst, .numel = n, .dtype = sum->dtype, .to = sum->dtype, .scale = 1.0};
    sum_part(&pair, 0, n);
    return dst;
}

static void sum_tree(void *ctx, int64_t begin, int64_t end)
{
    static const double zeros[CHUNK];
    const zs_sum *sum = ctx;
    const size_t size = zs_dtype_size(sum->dtype);
    const void *sums[ZS_TREE_LEVELS + 1] = {NULL};
    alignas(64) double memory[sum->tree->depth][CHUNK];
    for (int64_t at = begin; at < end; at += CHUNK) {
        int64_t n = end - at < CHUNK ? end - at : CHUNK;
        int top = 0;
        for (size_t i = 0; i < sum->tree->n_order; i++) {
            int source = sum->tree->order[i];
            if (source != ZS_TREE_ADD) {
                const char *from = sum->src[source];
                sums[top++] = from != NULL ? from + (size_t)at * size : NULL;
                continue;
            }
            top--;
            sums[top - 1] = add_pair(sum, sums[top - 1], sums[top], n, memory[top - 1]);
        }
        const void *src[] = {sums[0] != NULL ? sums[0] : zeros, zeros};
        zs_sum root = {.src = src, .world = 2, .numel = n, .dtype = sum->dtype, .to = sum->to, .scale = sum->scale};
        root.dst = (char *)sum->dst + (size_t)at * zs_dtype_size(sum->to);
        sum_part(&root, 0, n);
    }
}

zs_dtype zs_dtype_of_partial_sum(zs_dtype dtype)
{
    return dtype == ZS_F64 ? ZS_F64 : ZS_F32;
}

void zs_cpu_sum(const zs_sum *sum)
{
    zs_sum copy = *sum;
    bool by_host = sum->per_host > 1 && sum->per_host < sum->world;
    zs_parallel_for(sum->numel, GRAIN, sum->tree != NULL ? sum_tree : by_host ? sum_hosts : sum_part, &copy);
}

/* --- casts -------------------------------------------------------------------------------------------------------- */

typedef void cast_loop(const zs_cast *job, int64_t begin, int64_t end);

#define CAST(name, target, fused, T, load, D, load_to, store, R)                                \
    target static void name(const zs_cast *job, int64_t begin, int64_t end)                     \
    {                                                                                           \
        const T *restrict src = job->src;                                                       \
        D *restrict dst = job->dst;                                                             \
        ZS_NO_OVERLAP for (int64_t i = begin; i < end; i++) dst[i] = (D)store((R)load(src[i])); \
    }

FROM_EACH_TO_EACH(CAST, cast)

static void cast_part(void *ctx, int64_t begin, int64_t end)
{
    static cast_loop *const loops[DTYPES][DTYPES][ZS_ISA_COUNT] = BY_TARGET(cast);
    const zs_cast *job = ctx;
    loops[job->to][job->from][zs_isa_best()](job, begin, end);
}

void zs_cpu_cast(const zs_cast *cast)
{
    zs_cast job = *cast;
    zs_parallel_for(cast->numel, GRAIN, cast_part, &job);
}

/* --- norm --------------------------------------------------------------------------------------------------------- */

/* Parallel accumulators of a loop: the compiler may not reorder a sum, so the source already has it in lanes. */
enum { LANES = 32 };

/* With any number of threads, a norm is taken in at most so many parts of at least so many elements. */
enum { PARTS = 256, SMALLEST_PART = 1024 };

typedef double norm_loop(const void *x, int64_t n);

#define FOLD_SUM(total, value) ((total) + (value))
#define FOLD_MAX(total, value) ((total) >= (value) || (total) != (total) ? (total) : (value)) /* NaN comes through */
#define ABSOLUTE(value) fabs(value)
#define SQUARE(value) ((value) * (value))

#define NORM(name, target, T, load, measure, fold)            \
    target static double name(const void *x, int64_t n)       \
    {                                                         \
        const T *in = x;                                      \
        double lane[LANES] = {0};                             \
        int64_t i = 0;                                        \
        for (; i + LANES <= n; i += LANES) {                  \
            for (int j = 0; j < LANES; j++) {                 \
                const double value = (double)load(in[i + j]); \
                const double measured = measure(value);       \
                lane[j] = fold(lane[j], measured);            \
            }                                                 \
        }                                                     \
        for (; i < n; i++) {                                  \
            const double value = (double)load(in[i]);         \
            const double measured = measure(value);           \
            lane[0] = fold(lane[0], measured);                \
        }                                                     \
        double total = 0;                                     \
        for (int j = 0; j < LANES; j++)                       \
            total = fold(total, lane[j]);                     \
        return total;                                         \
    }
#define NORM_ABS(name, target, fused, T, R, load, store) NORM(name, target, T, load, ABSOLUTE, FOLD_SUM)
#define NORM_SQUARE(name, target, fused, T, R, load, store) NORM(name, target, T, load, SQUARE, FOLD_SUM)
#define NORM_MAX(name, target, fused, T, R, load, store) NORM(name, target, T, load, ABSOLUTE, FOLD_MAX)

FOR_EACH_DTYPE(NORM_ABS, norm_abs)
FOR_EACH_DTYPE(NORM_SQUARE, norm_square)
FOR_EACH_DTYPE(NORM_MAX, norm_max)

typedef struct norm_job {
    const char *x;
    int64_t numel;
    int64_t part; /* elements in a part */
    size_t item;  /* bytes in an element */
    norm_loop *loop;
    double *parts; /* [PARTS] results */
} norm_job;

static void norm_parts(void *ctx, int64_t begin, int64_t end)
{
    const norm_job *job = ctx;
    for (int64_t i = begin; i < end; i++) {
        const int64_t from = i * job->part, left = job->numel - from;
        job->parts[i] = job->loop(job->x + (size_t)from * job->item, left < job->part ? left : job->part);
    }
}

static norm_loop *norm_loop_for(double p, zs_dtype dtype)
{
    static norm_loop *const abs[DTYPES][ZS_ISA_COUNT] = BY_DTYPE(norm_abs);
    static norm_loop *const square[DTYPES][ZS_ISA_COUNT] = BY_DTYPE(norm_square);
    static norm_loop *const max[DTYPES][ZS_ISA_COUNT] = BY_DTYPE(norm_max);
    return (isinf(p) ? max : p == 1 ? abs : square)[dtype][zs_isa_best()];
}

double zs_cpu_norm(const zs_numbers *x, double p)
{
    const int64_t numel = x->numel;
    double parts[PARTS];
    norm_job job = {.x = x->data, .numel = numel, .item = zs_dtype_size(x->dtype), .parts = parts};
    job.loop = norm_loop_for(p, x->dtype);
    job.part = (int64_t)zs_round_up((size_t)((numel + PARTS - 1) / PARTS), SMALLEST_PART);
    const int64_t n_parts = numel > 0 ? (numel + job.part - 1) / job.part : 0;
    if (n_parts > 0) zs_parallel_for(n_parts, 1 + GRAIN / job.part, norm_parts, &job);
    zs_count_bytes((uint64_t)numel * job.item);

    double total = 0;
    for (int64_t i = 0; i < n_parts; i++)
        total = isinf(p) ? FOLD_MAX(total, parts[i]) : FOLD_SUM(total, parts[i]);
    return total;
}

/* --- scale -------------------------------------------------------------------------------------------------------- */

typedef struct scale_job {
    void *x;
    zs_dtype dtype;
    double factor;
} scale_job;

typedef void scale_loop(const scale_job *job, int64_t begin, int64_t end);

#define SCALE(name, target, fused, T, R, load, store)                         \
    target static void name(const scale_job *job, int64_t begin, int64_t end) \
    {                                                                         \
        const R factor = (R)job->factor;                                      \
        T *x = job->x;                                                        \
        for (int64_t i = begin; i < end; i++)                                 \
            x[i] = store(load(x[i]) * factor);                                \
    }

FOR_EACH_DTYPE(SCALE, scale)

static void scale_part(void *ctx, int64_t begin, int64_t end)
{
    static scale_loop *const loops[DTYPES][ZS_ISA_COUNT] = BY_DTYPE(scale);
    const scale_job *job = ctx;
    loops[job->dtype][zs_isa_best()](job, begin, end);
}

void zs_cpu_scale(const zs_numbers *x, double factor)
{
    scale_job job = {.x = x->data, .dtype = x->dtype, .factor = factor};
    zs_count_bytes(2 * (uint64_t)x->numel * zs_dtype_size(x->dtype));
    zs_parallel_for(x->numel, GRAIN, scale_part, &job);
}
