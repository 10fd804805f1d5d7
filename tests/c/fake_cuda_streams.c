/* fake_cuda_streams.c - streams, events and captures of the fake of libcuda.so.1. See fake_cuda.h.
 *
 * One lock and one condition for everything; waiting threads look again after each piece of work. Nothing is ever freed
 * that a stream might still look at: tests are short.
 */
#define _GNU_SOURCE 1
#include "fake_cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct task {
    struct task *next;
    fake_work *work;
    useconds_t delay;
    _Alignas(16) char args[];
} task;

typedef struct fake_stream {
    struct fake_stream *next;
    task *first, **last;
    uint64_t given, done;
    int number;
    int capture;  /* the last that it was in */
    bool at_once; /* works on the caller's thread, without its own */
} fake_stream;

typedef struct event {
    uint64_t recorded, done; /* the number of records, and the number of the last one reached */
    int capture;             /* in which it was recorded last; 0: in none */
} event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static fake_stream *streams; /* all that there ever were */

static fake_stream *of(zs_cu_stream stream)
{
    return (fake_stream *)stream;
}

static void *work_through(void *arg)
{
    fake_stream *stream = arg;
    (void)pthread_mutex_lock(&lock);
    for (;;) {
        while (stream->first == NULL)
            (void)pthread_cond_wait(&changed, &lock);
        task *one = stream->first;
        stream->first = one->next;
        if (stream->first == NULL) stream->last = &stream->first;
        (void)pthread_mutex_unlock(&lock);
        if (one->delay > 0) (void)usleep(one->delay);
        one->work(one->args);
        free(one);
        (void)pthread_mutex_lock(&lock);
        stream->done++;
        (void)pthread_cond_broadcast(&changed);
    }
    return NULL;
}

/* One more in the list. */
static fake_stream *add_stream(bool at_once)
{
    fake_stream *stream = calloc(1, sizeof *stream);
    pthread_t thread;
    if (stream == NULL) abort();
    stream->at_once = at_once;
    stream->last = &stream->first;
    (void)pthread_mutex_lock(&lock);
    stream->number = streams != NULL ? streams->number + 1 : 1;
    stream->next = streams;
    streams = stream;
    (void)pthread_mutex_unlock(&lock);
    if (!at_once && pthread_create(&thread, NULL, work_through, stream) != 0) abort();
    if (!at_once) (void)pthread_detach(thread);
    return stream;
}

int fake_stream_number(zs_cu_stream stream)
{
    return stream == NULL ? 0 : of(stream)->number;
}

void fake_submit(zs_cu_stream stream, fake_work *work, const void *args, size_t bytes)
{
    if (stream == NULL || of(stream)->at_once) {
        work(args);
        return;
    }
    task *one = malloc(sizeof *one + bytes);
    if (one == NULL) abort();
    *one = (task){.work = work, .delay = (useconds_t)fake_number("FAKE_CUDA_DELAY_US", 0)};
    memcpy(one->args, args, bytes);
    (void)pthread_mutex_lock(&lock);
    *of(stream)->last = one;
    of(stream)->last = &one->next;
    of(stream)->given++;
    (void)pthread_cond_broadcast(&changed);
    (void)pthread_mutex_unlock(&lock);
}

void fake_drain(zs_cu_stream stream)
{
    if (stream == NULL) return;
    (void)pthread_mutex_lock(&lock);
    uint64_t all = of(stream)->given;
    while (of(stream)->done < all)
        (void)pthread_cond_wait(&changed, &lock);
    (void)pthread_mutex_unlock(&lock);
}

void fake_drain_all(void)
{
    (void)pthread_mutex_lock(&lock);
    fake_stream *stream = streams;
    (void)pthread_mutex_unlock(&lock);
    for (; stream != NULL; stream = stream->next)
        fake_drain((zs_cu_stream)stream);
}

/* --- captures ----------------------------------------------------------------------------------------------------- */

static _Thread_local zs_cu_capture_mode capture_mode; /* of this thread's calls during captures */
static int broken;                                    /* the capture that was broken last */

/* The capture that is under way; 0: none. */
static int capture_now(void)
{
    return (int)fake_number("FAKE_CUDA_CAPTURE", 0);
}

bool fake_capture_breaks(void)
{
    bool breaks = capture_now() != 0 && capture_mode != ZS_CU_STREAM_CAPTURE_MODE_RELAXED;
    if (breaks) __atomic_store_n(&broken, capture_now(), __ATOMIC_RELEASE);
    return breaks;
}

static bool is_captured(zs_cu_stream stream)
{
    return capture_now() != 0 && (stream == NULL || of(stream)->capture == capture_now());
}

bool fake_stream_broken(zs_cu_stream stream)
{
    return is_captured(stream) && __atomic_load_n(&broken, __ATOMIC_ACQUIRE) == capture_now();
}

/* May this event be waited for in the stream? If so, that may bring the stream into a capture. */
static zs_cu_result wait_in_capture(zs_cu_stream stream, const event *one)
{
    if (one->recorded == 0) return ZS_CU_SUCCESS;
    if (one->capture != capture_now()) /* another's, or of work that the capture does not hold */
        return one->capture != 0 ? FAKE_CAPTURED_EVENT : is_captured(stream) ? FAKE_CAPTURE_ISOLATION : ZS_CU_SUCCESS;
    if (stream != NULL && one->capture != 0) of(stream)->capture = one->capture;
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuStreamIsCapturing(zs_cu_stream stream, zs_cu_capture_status *out)
{
    BEGIN(true, "stream=%d", STREAM_ID);
    *out = fake_stream_broken(stream) ? 2 : is_captured(stream) ? 1 : ZS_CU_STREAM_CAPTURE_STATUS_NONE;
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuThreadExchangeStreamCaptureMode(zs_cu_capture_mode *mode)
{
    BEGIN(false, "mode=%u", *mode);
    if (*mode > ZS_CU_STREAM_CAPTURE_MODE_RELAXED) return ZS_CU_ERROR_INVALID_VALUE;
    zs_cu_capture_mode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return ZS_CU_SUCCESS;
}

/* --- streams' calls ----------------------------------------------------------------------------------------------- */

zs_cu_result fake_cuStreamCreateWithPriority(zs_cu_stream *out, unsigned int flags, int priority)
{
    BEGIN(true, "flags=%u priority=%d", flags, priority);
    if (flags != ZS_CU_STREAM_NON_BLOCKING)
        return ZS_CU_ERROR_INVALID_VALUE; /* others synchronize with the NULL stream */
    *out = (zs_cu_stream)add_stream(false);
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuStreamSynchronize(zs_cu_stream stream)
{
    BEGIN(true, "stream=%d", STREAM_ID);
    UNCAPTURED();
    fake_drain(stream);
    return ZS_CU_SUCCESS;
}

/* --- events ------------------------------------------------------------------------------------------------------- */

/* An event as it was recorded at some time; one that never was has passed. */
typedef struct moment {
    event *event;
    uint64_t number;
} moment;

static void pass(const void *args)
{
    moment here;
    memcpy(&here, args, sizeof here);
    (void)pthread_mutex_lock(&lock);
    if (here.event->done < here.number) here.event->done = here.number;
    (void)pthread_cond_broadcast(&changed);
    (void)pthread_mutex_unlock(&lock);
}

static void wait_for(const void *args)
{
    moment there;
    memcpy(&there, args, sizeof there);
    (void)pthread_mutex_lock(&lock);
    while (there.event->done < there.number)
        (void)pthread_cond_wait(&changed, &lock);
    (void)pthread_mutex_unlock(&lock);
}

zs_cu_result fake_cuEventCreate(zs_cu_event *out, unsigned int flags)
{
    BEGIN(true, "flags=%u", flags);
    *out = calloc(1, sizeof(event));
    return *out != NULL ? ZS_CU_SUCCESS : ZS_CU_ERROR_OUT_OF_MEMORY;
}

zs_cu_result fake_cuEventRecord(zs_cu_event handle, zs_cu_stream stream)
{
    BEGIN(true, "stream=%d event=%p", STREAM_ID, (void *)handle);
    INTO_STREAM();
    moment here = {.event = (event *)handle};
    (void)pthread_mutex_lock(&lock);
    here.number = ++here.event->recorded;
    here.event->capture = is_captured(stream) ? capture_now() : 0;
    (void)pthread_mutex_unlock(&lock);
    fake_submit(stream, pass, &here, sizeof here);
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuStreamWaitEvent(zs_cu_stream stream, zs_cu_event handle, unsigned int flags)
{
    BEGIN(true, "stream=%d event=%p", STREAM_ID, (void *)handle);
    INTO_STREAM();
    if (flags != 0) return ZS_CU_ERROR_INVALID_VALUE;
    moment last = {.event = (event *)handle};
    (void)pthread_mutex_lock(&lock);
    last.number = last.event->recorded;
    zs_cu_result result = wait_in_capture(stream, last.event);
    (void)pthread_mutex_unlock(&lock);
    if (result == ZS_CU_SUCCESS) fake_submit(stream, wait_for, &last, sizeof last);
    return result;
}

zs_cu_result fake_cuEventQuery(zs_cu_event handle)
{
    BEGIN(false, "event=%p", (void *)handle);
    const event *one = (event *)handle;
    if (one->capture != 0) return FAKE_CAPTURED_EVENT;
    UNCAPTURED();
    (void)pthread_mutex_lock(&lock);
    bool done = one->done >= one->recorded;
    (void)pthread_mutex_unlock(&lock);
    return done ? ZS_CU_SUCCESS : ZS_CU_ERROR_NOT_READY;
}

zs_cu_result fake_cuEventDestroy(zs_cu_event handle)
{
    BEGIN(false, "event=%p", (void *)handle);
    return GOOD(handle != NULL); /* its memory stays: a stream may still read it */
}

/* --- for others --------------------------------------------------------------------------------------------------- */

typedef struct other_work {
    void (*run)(void *);
    void *arg;
} other_work;

static void run_other(const void *args)
{
    const other_work *work = args;
    work->run(work->arg);
}

void fake_cuda_enqueue(void *stream, void (*run)(void *), void *arg)
{
    other_work work = {run, arg};
    fake_submit((zs_cu_stream)stream, run_other, &work, sizeof work);
}

void *fake_cuda_new_stream(void)
{
    return add_stream(false);
}

void *fake_cuda_torch_stream(void)
{
    return add_stream(true);
}

static void *host_stream;

void *fake_host_stream(void)
{
    return host_stream;
}

void fake_cuda_set_host_stream(void *stream)
{
    host_stream = stream;
}

int fake_cuda_capture_broken(void)
{
    return fake_stream_broken(NULL);
}

int fake_cuda_stream_number(void *stream)
{
    return fake_stream_number((zs_cu_stream)stream);
}
