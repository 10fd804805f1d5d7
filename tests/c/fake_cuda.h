/* fake_cuda.h - shared by the files of the fake of libcuda.so.1.
 *
 * Device memory is host memory, and a stream is a thread that does one thing after another, so a missing wait gives
 * wrong results here as on a real GPU, and on any machine. The default stream (NULL) has no thread: it works at once on
 * the caller's, as torch's CPU operators do, which play the part of torch's CUDA ones.
 *
 * Environment, looked at in each call:
 *   FAKE_CUDA_LOG=path          a line for each call
 *   FAKE_CUDA_DELAY_US=n        each thing that a stream with a thread does begins so much later
 *   FAKE_CUDA_FAIL=call:n[:r]   the n-th call of that function from now on (from 1) fails with CUresult r (999: unknown)
 *   FAKE_CUDA_MEMORY=bytes      how much memory there is (64 GiB)
 *   FAKE_CUDA_MULTIPROCESSORS=n how many there are (2)
 *   FAKE_CUDA_CAPTURE=n         the default stream is in the n-th capture of a CUDA graph, in the default (global) mode: what
 *                               a capture forbids fails, as far as zshard could do it, on any thread, and what is merely
 *                               unsafe invalidates the capture unless the thread's own mode is relaxed; the rest is done at
 *                               once, as if the graph were run as it grows
 * and when the library is loaded:
 *   FAKE_CUDA_DEVICES=n (1), FAKE_CUDA_VERSION=n (13000), FAKE_CUDA_MISSING=call, which this driver then does not know
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include "device/cuda_api.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SHOWN __attribute__((visibility("default")))

/* Begins a call: writes the log, and returns the error to fail with: the one that FAKE_CUDA_FAIL asks for, else for
 * lack of cuInit or of a context. */
zs_cu_result fake_begin(const char *call, bool in_context, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* The same, and returns from the function, which is called fake_<call>, if the call fails. */
#define BEGIN(in_context, ...)                                                      \
    do {                                                                            \
        zs_cu_result result_ = fake_begin(__func__ + 5, (in_context), __VA_ARGS__); \
        if (result_ != ZS_CU_SUCCESS) return result_;                               \
    } while (0)

/* For calls that the driver calls potentially unsafe: while anything is captured they are forbidden to threads whose
 * mode is not relaxed, and break the capture. */
#define UNCAPTURED()                                                \
    do {                                                            \
        if (fake_capture_breaks()) return FAKE_CAPTURE_UNSUPPORTED; \
    } while (0)

/* For calls that queue something in `stream`: nothing more comes into a capture that was broken. */
#define INTO_STREAM()                                                    \
    do {                                                                 \
        if (fake_stream_broken(stream)) return FAKE_CAPTURE_INVALIDATED; \
    } while (0)

/* Success, if the argument is valid. */
#define GOOD(condition) ((condition) ? ZS_CU_SUCCESS : ZS_CU_ERROR_INVALID_VALUE)

enum {
    FAKE_CAPTURE_UNSUPPORTED = 900,
    FAKE_CAPTURE_INVALIDATED = 901,
    FAKE_CAPTURE_ISOLATION = 905,
    FAKE_CAPTURED_EVENT = 907,
};

#define STREAM_ID fake_stream_number(stream)
#define AT(pointer) ((void *)(uintptr_t)(pointer))

/* All calls that zshard makes, by the signatures that it believes in. */
#define FAKE_DECLARE(name, version, parameters) zs_cu_result fake_##name parameters;
ZS_CU_CALLS(FAKE_DECLARE)
ZS_CU_OPTIONAL_CALLS(FAKE_DECLARE)
#undef FAKE_DECLARE

/* A number that the environment has. */
long fake_number(const char *name, long usual);

/* torch's current stream of models on the CPU. */
void *fake_host_stream(void);

/* Something to do, with its argument copied. */
typedef void fake_work(const void *args);

/* Queues it in `stream`, after all earlier work; NULL does it now. Copies `bytes` of `args`. */
void fake_submit(zs_cu_stream stream, fake_work *work, const void *args, size_t bytes);

/* Number of a stream in the log: 0 is the default one. */
int fake_stream_number(zs_cu_stream stream);

/* This thread is about to make a call that is unsafe during a capture: true if it may not, and then the capture is
 * broken. */
bool fake_capture_breaks(void);

/* Is the stream in a capture that was broken? */
bool fake_stream_broken(zs_cu_stream stream);

/* Waits until the stream has done all that it was given, or all streams have. */
void fake_drain(zs_cu_stream stream);
void fake_drain_all(void);

/* Is this device memory? */
bool fake_known(zs_cu_ptr at);

typedef struct fake_kernel {
    const char *name;
    void (*run)(const void *args); /* one thread of the grid */
    size_t bytes;                  /* of its arguments */
    struct fake_kernel *next;
} fake_kernel;

/* The kernel of that name; NULL if there is none. */
const fake_kernel *fake_kernel_find(const char *name);

/* Runs `blocks` blocks of `threads` threads, one thread after the other. */
void fake_kernel_run(const fake_kernel *kernel, unsigned blocks, unsigned threads, const void *args);

/* For other fakes and for tests, which find these by name: makes the stream call run(arg), after all its earlier work;
 * new streams: torch's works at once, as the default one does; torch's current stream of models on the CPU; was a
 * capture of the default stream broken that still continues? the number of a stream in the log. */
SHOWN void fake_cuda_enqueue(void *stream, void (*run)(void *), void *arg);
SHOWN void *fake_cuda_new_stream(void);
SHOWN void *fake_cuda_torch_stream(void);
SHOWN void fake_cuda_set_host_stream(void *stream);
SHOWN int fake_cuda_capture_broken(void);
SHOWN int fake_cuda_stream_number(void *stream);

#ifdef __cplusplus
}
#endif
#endif
