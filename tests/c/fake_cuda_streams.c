/* fake_cuda_streams.c - streams and events of the stand-in for libcuda.so.1. See fake_cuda.h.
 *
 * One lock and one condition for everything; who waits looks again after each thing that was done. Nothing is
 * ever freed that a stream might still look at: tests are short.
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

struct fake_stream {
    fake_stream *next;
    task *first, *last;
    uint64_t given, done;
    int number;
    int capture;  /* the last that it was in */
    bool at_once; /* works on the caller's thread, and has none of its own */
};

typedef struct event {
    uint64_t recorded, done; /* how often it was recorded, and which of these has come to pass */
    int capture;             /* in which it was recorded last; 0: in none */
} event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static fake_stream *streams; /* all that there ever were */

static fake_stream *of(zs_cu_stream stream)
{
    return (fake_stream *)stream;
}

static task *next_of(fake_stream *stream)
{
    (void)pthread_mutex_lock(&lock);
    while (stream->first == NULL)
        (void)pthread_cond_wait(&changed, &lock);
    task *one = stream->first;
    stream->first = one->next;
    if (stream->first == NULL) stream->last = NULL;
    (void)pthread_mutex_unlock(&lock);
    return one;
}

static void *work_through(void *arg)
{
    fake_stream *stream = arg;
    for (;;) {
        task *one = next_of(stream);
        if (one->delay > 0) (void)usleep(one->delay);
        bool last = one->work == NULL;
        if (!last) one->work(one->args);
        free(one);
        (void)pthread_mutex_lock(&lock);
        stream->done++;
        (void)pthread_cond_broadcast(&changed);
        (void)pthread_mutex_unlock(&lock);
        if (last) return NULL;
    }
}

/* One more in the list. */
static fake_stream *add_stream(bool at_once)
{
    fake_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) abort();
    stream->at_once = at_once;
    (void)pthread_mutex_lock(&lock);
    stream->number = streams != NULL ? streams->number + 1 : 1;
    stream->next = streams;
    streams = stream;
    (void)pthread_mutex_unlock(&lock);
    return stream;
}

zs_cu_stream fake_stream_new(void)
{
    fake_stream *stream = add_stream(false);
    pthread_t thread;
    if (pthread_create(&thread, NULL, work_through, stream) != 0) abort();
    (void)pthread_detach(thread);
    return (zs_cu_stream)stream;
}

zs_cu_stream fake_stream_at_once(void)
{
    return (zs_cu_stream)add_stream(true);
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
    const char *delay = getenv("FAKE_CUDA_DELAY_US");
    task *one = malloc(sizeof *one + bytes);
    if (one == NULL) abort();
    *one = (task){.work = work, .delay = delay != NULL ? (useconds_t)strtoul(delay, NULL, 10) : 0};
    if (bytes > 0) memcpy(one->args, args, bytes);
    (void)pthread_mutex_lock(&lock);
    if (of(stream)->last != NULL) of(stream)->last->next = one;
    if (of(stream)->first == NULL) of(stream)->first = one;
    of(stream)->last = one;
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

/* --- events ------------------------------------------------------------------------------------------------------------- */

/* The capture that is under way; 0: none. */
static int capture_now(void)
{
    const char *value = getenv("FAKE_CUDA_CAPTURE");
    return value != NULL ? atoi(value) : 0;
}

bool fake_capturing(void)
{
    return capture_now() != 0;
}

static _Thread_local zs_cu_capture_mode capture_mode; /* of what this thread may do beside captures */
static int broken;                                    /* the capture that was broken last */

zs_cu_capture_mode fake_capture_exchange(zs_cu_capture_mode mode)
{
    zs_cu_capture_mode before = capture_mode;
    capture_mode = mode;
    return before;
}

bool fake_capture_breaks(void)
{
    bool breaks = fake_capturing() && capture_mode != ZS_CU_STREAM_CAPTURE_MODE_RELAXED;
    if (breaks) __atomic_store_n(&broken, capture_now(), __ATOMIC_RELEASE);
    return breaks;
}

bool fake_stream_broken(zs_cu_stream stream)
{
    return fake_stream_captured(stream) && __atomic_load_n(&broken, __ATOMIC_ACQUIRE) == capture_now();
}

bool fake_stream_captured(zs_cu_stream stream)
{
    return capture_now() != 0 && (stream == NULL || of(stream)->capture == capture_now());
}

bool fake_event_captured(zs_cu_event handle)
{
    return ((event *)handle)->capture != 0;
}

zs_cu_result fake_capture_wait(zs_cu_stream stream, zs_cu_event handle)
{
    const event *one = (event *)handle;
    if (one->recorded == 0) return ZS_CU_SUCCESS;
    if (one->capture != capture_now()) /* another's, or of work that the capture does not hold */
        return one->capture != 0              ? FAKE_CAPTURED_EVENT
               : fake_stream_captured(stream) ? FAKE_CAPTURE_ISOLATION
                                              : ZS_CU_SUCCESS;
    if (stream != NULL && one->capture != 0) of(stream)->capture = one->capture;
    return ZS_CU_SUCCESS;
}

/* An event as it was recorded at some time. */
typedef struct moment {
    event *event;
    uint64_t number;
} moment;

zs_cu_event fake_event_new(void)
{
    event *made = calloc(1, sizeof *made);
    if (made == NULL) abort();
    return (zs_cu_event)made;
}

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

void fake_event_record(zs_cu_event handle, zs_cu_stream stream)
{
    moment here = {.event = (event *)handle};
    (void)pthread_mutex_lock(&lock);
    here.number = ++here.event->recorded;
    here.event->capture = fake_stream_captured(stream) ? capture_now() : 0;
    (void)pthread_mutex_unlock(&lock);
    fake_submit(stream, pass, &here, sizeof here);
}

/* The event as it was recorded last; one that never was has passed. */
static moment last_of(zs_cu_event handle)
{
    moment last = {.event = (event *)handle};
    (void)pthread_mutex_lock(&lock);
    last.number = last.event->recorded;
    (void)pthread_mutex_unlock(&lock);
    return last;
}

void fake_event_wait(zs_cu_stream stream, zs_cu_event handle)
{
    moment last = last_of(handle);
    fake_submit(stream, wait_for, &last, sizeof last);
}

bool fake_event_done(zs_cu_event handle)
{
    event *one = (event *)handle;
    (void)pthread_mutex_lock(&lock);
    bool done = one->done >= one->recorded;
    (void)pthread_mutex_unlock(&lock);
    return done;
}
