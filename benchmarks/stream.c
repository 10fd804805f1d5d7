/* stream.c - the yardstick of benchmarks/adam.py: what the memory gives.
 *
 * Reads four floats and writes three for each element, the 28 bytes of an AdamW step, with next to no arithmetic.
 * Threads are made for each call: a pool of its own would spin beside torch's.
 */
#include <pthread.h>
#include <stdint.h>

enum { MAX_THREADS = 64 };

typedef struct part {
    float *param;
    const float *grad;
    float *exp_avg;
    float *exp_avg_sq;
    int64_t begin, end;
} part;

static void *stream_part(void *arg)
{
    const part *p = arg;
    float *restrict param = p->param, *restrict exp_avg = p->exp_avg, *restrict exp_avg_sq = p->exp_avg_sq;
    const float *restrict grad = p->grad;
    for (int64_t i = p->begin; i < p->end; i++) {
        exp_avg[i] += grad[i];
        exp_avg_sq[i] += grad[i];
        param[i] += grad[i];
    }
    return 0;
}

/* Streams over `numel` elements of the four arrays on `threads` threads (at most MAX_THREADS); 0, or an error number. */
int stream(float *param, const float *grad, float *exp_avg, float *exp_avg_sq, int64_t numel, int threads)
{
    part parts[MAX_THREADS];
    pthread_t ids[MAX_THREADS];
    int made = 1, failed = 0;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    for (int t = 0; t < threads; t++) {
        const int64_t begin = numel * t / threads / 16 * 16;
        const int64_t end = t + 1 < threads ? numel * (t + 1) / threads / 16 * 16 : numel;
        parts[t] = (part){param, grad, exp_avg, exp_avg_sq, begin, end};
    }
    for (; made < threads && !failed; made++)
        failed = pthread_create(&ids[made], 0, stream_part, &parts[made]);
    if (failed) made--;
    stream_part(&parts[0]);
    for (int t = 1; t < made; t++)
        pthread_join(ids[t], 0);
    return failed;
}
