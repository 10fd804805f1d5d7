/* fake_cuda_enqueue.c - what the stand-in for libcuda.so.1 shows besides CUDA: a way for other stand-ins to use its streams.
 *
 * fake_nccl.c queues its collectives where the kernels and copies of the same stream are, and logs them by the
 * same numbers.
 */
#include "fake_cuda.h"

typedef struct other_work {
    void (*run)(void *);
    void *arg;
} other_work;

static void run_other(const void *args)
{
    const other_work *work = args;
    work->run(work->arg);
}

/* Has the stream call run(arg), after all that it was given before; NULL calls it now. */
__attribute__((visibility("default"))) void fake_cuda_enqueue(void *stream, void (*run)(void *), void *arg);

void fake_cuda_enqueue(void *stream, void (*run)(void *), void *arg)
{
    other_work work = {run, arg};
    fake_submit((zs_cu_stream)stream, run_other, &work, sizeof work);
}

/* A further stream for torch to make its current one. */
__attribute__((visibility("default"))) void *fake_cuda_torch_stream(void);

void *fake_cuda_torch_stream(void)
{
    return fake_stream_at_once();
}

static void *host_stream;

void *fake_host_stream(void)
{
    return host_stream;
}

/* Sets torch's current stream of models on the CPU; NULL is the default one. */
__attribute__((visibility("default"))) void fake_cuda_set_host_stream(void *stream);

void fake_cuda_set_host_stream(void *stream)
{
    host_stream = stream;
}

/* Has a capture of the default stream been broken, which goes on? */
__attribute__((visibility("default"))) int fake_cuda_capture_broken(void);

int fake_cuda_capture_broken(void)
{
    return fake_stream_broken(NULL);
}

/* The number of a stream in the log. */
__attribute__((visibility("default"))) int fake_cuda_stream_number(void *stream);

int fake_cuda_stream_number(void *stream)
{
    return fake_stream_number((zs_cu_stream)stream);
}
