/* squares_cpu.c - the CPU's sums of squares, of device.h.
 *
 * Squares are added within groups of GROUP elements, and the groups' sums exactly. Shards begin at groups (layout.h),
 * so a norm has the same bits however gradients are sharded, and on however many threads.
 */
#include "device/device.h"

#include <pthread.h>

#include "base/half.h"
#include "base/simd.h"

enum { GROUP = 32, LANES = 8, GRAIN = 1 << 15, DTYPES = ZS_BYTES };

#define SAME(x) (x)

/* The lanes are in the source, because the compiler may not reorder a sum. */
#define SQUARES(name, target, fused, T, load)                            \
    target static void name(const void *x, int64_t numel, zs_exact *sum) \
    {                                                                    \
        for (int64_t at = 0; at < numel; at += GROUP) {                  \
            const T *in = (const T *)x + at;                             \
            T last[GROUP];                                               \
            double lane[LANES] = {0};                                    \
            if (numel - at < GROUP) {                                    \
                memset(last, 0, sizeof last);                            \
                memcpy(last, in, (size_t)(numel - at) * sizeof(T));      \
                in = last;                                               \
            }                                                            \
            for (int i = 0; i < GROUP; i += LANES)                       \
                for (int j = 0; j < LANES; j++) {                        \
                    const double value = (double)load(in[i + j]);        \
                    lane[j] += value * value;                            \
                }                                                        \
            for (int width = LANES / 2; width > 0; width /= 2)           \
                for (int j = 0; j < width; j++)                          \
                    lane[j] += lane[j + width];                          \
            zs_exact_add(sum, lane[0]);                                  \
        }                                                                \
    }

ZS_FOR_EACH_ISA(SQUARES, squares_f32, float, SAME)
ZS_FOR_EACH_ISA(SQUARES, squares_f64, double, SAME)
ZS_FOR_EACH_ISA(SQUARES, squares_bf16, zs_bf16, zs_from_bf16)
ZS_FOR_EACH_ISA(SQUARES, squares_f16, zs_f16, zs_from_f16)

typedef void squares_loop(const void *x, int64_t numel, zs_exact *sum);

static void squares_of(const zs_numbers *x, zs_exact *sum)
{
    static squares_loop *const loops[DTYPES][ZS_ISA_COUNT] = {
        [ZS_F32] = ZS_ISA_TABLE(squares_f32),
        [ZS_F64] = ZS_ISA_TABLE(squares_f64),
        [ZS_BF16] = ZS_ISA_TABLE(squares_bf16),
        [ZS_F16] = ZS_ISA_TABLE(squares_f16),
    };
    loops[x->dtype][zs_isa_best()](x->data, x->numel, sum);
}

static void join(zs_exact *sum, const zs_exact *part)
{
    static pthread_mutex_t one_by_one = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one_by_one);
    zs_exact_join(sum, part);
    pthread_mutex_unlock(&one_by_one);
}

typedef struct squares_job {
    const zs_numbers *x;
    zs_exact *sum;
} squares_job;

/* Groups [begin, end). */
static void squares_part(void *ctx, int64_t begin, int64_t end)
{
    const squares_job *job = ctx;
    const int64_t from = begin * GROUP, left = job->x->numel - from, most = (end - begin) * GROUP;
    zs_exact part = {0};
    zs_numbers some = {(char *)job->x->data + (size_t)from * zs_dtype_size(job->x->dtype), 0, job->x->dtype};
    some.numel = left < most ? left : most;
    squares_of(&some, &part);
    join(job->sum, &part);
}

void zs_cpu_squares(const zs_numbers *x, zs_exact *sum)
{
    squares_job job = {x, sum};
    zs_count_bytes((uint64_t)x->numel * zs_dtype_size(x->dtype));
    if (x->numel > 0) zs_parallel_for((x->numel + GROUP - 1) / GROUP, GRAIN / GROUP, squares_part, &job);
}

/* Elements of a piece, which is still in the cache when its squares are taken. */
enum { PIECE = 4096 };

/* Pieces [begin, end). */
static void sum_pieces(void *ctx, int64_t begin, int64_t end)
{
    const zs_sum *sum = ctx;
    const size_t item = zs_dtype_size(sum->dtype);
    const void *src[sum->world];
    zs_exact squares = {0};
    for (int64_t at = begin * PIECE; at < end * PIECE && at < sum->numel; at += PIECE) {
        zs_sum piece = *sum;
        piece.src = src;
        for (int r = 0; r < sum->world; r++)
            src[r] = sum->src[r] != NULL ? (const char *)sum->src[r] + (size_t)at * item : NULL;
        piece.dst = (char *)sum->dst + (size_t)at * zs_dtype_size(sum->to);
        if (piece.numel > at + PIECE) piece.numel = at + PIECE;
        piece.numel -= at;
        zs_cpu_sum(&piece);
        squares_of(&(zs_numbers){piece.dst, piece.numel, sum->to}, &squares);
    }
    join(sum->squares, &squares);
}

void zs_cpu_sum_squared(const zs_sum *sum)
{
    zs_sum copy = *sum;
    zs_parallel_for((sum->numel + PIECE - 1) / PIECE, GRAIN / PIECE, sum_pieces, &copy);
}
