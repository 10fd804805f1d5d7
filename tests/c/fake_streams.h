/* fake_streams.h - streams of a GPU that is not there: work on a stream is done in order, on a thread of the stream's own.
 *
 * fake_nccl.c needs only "do this on that stream". Where the stand-in for the CUDA driver is loaded, its
 * fake_cuda_enqueue says what a stream is; alone, the few lines here do: the NULL stream does it at once, on the calling
 * thread; any other pointer is a stream, whose thread starts with its first work and lives as long as the process.
 */
#ifndef ZS_TEST_FAKE_STREAMS_H
#define ZS_TEST_FAKE_STREAMS_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*fake_enqueue)(void *stream, void (*run)(void *), void *arg);

typedef struct fake_item {
    void (*run)(void *);
    void *arg;
    struct fake_item *next;
} fake_item;

typedef struct fake_stream {
    void *name;
    fake_item *first, **last;
    struct fake_stream *next;
} fake_stream;

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t streams_changed = PTHREAD_COND_INITIALIZER;
static fake_stream *streams;

static void *work_on_stream(void *arg)
{
    fake_stream *stream = arg;
    for (;;) {
        pthread_mutex_lock(&streams_lock);
        while (stream->first == NULL)
            pthread_cond_wait(&streams_changed, &streams_lock);
        fake_item *item = stream->first;
        stream->first = item->next;
        if (stream->first == NULL) stream->last = &stream->first;
        pthread_mutex_unlock(&streams_lock);
        item->run(item->arg);
        free(item);
    }
    return NULL;
}

/* The stream of that name, with the lock held. */
static fake_stream *stream_of(void *name)
{
    for (fake_stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->name == name) return stream;
    fake_stream *made = calloc(1, sizeof *made);
    pthread_t thread;
    if (made == NULL || pthread_create(&thread, NULL, work_on_stream, made) != 0) abort();
    pthread_detach(thread);
    made->name = name;
    made->last = &made->first;
    made->next = streams;
    streams = made;
    return made;
}

static void own_enqueue(void *name, void (*run)(void *), void *arg)
{
    if (name == NULL) {
        run(arg);
        return;
    }
    fake_item *item = calloc(1, sizeof *item);
    if (item == NULL) abort();
    *item = (fake_item){.run = run, .arg = arg};
    pthread_mutex_lock(&streams_lock);
    fake_stream *stream = stream_of(name);
    *stream->last = item;
    stream->last = &item->next;
    pthread_cond_broadcast(&streams_changed);
    pthread_mutex_unlock(&streams_lock);
}

/* A function that the stand-in for the CUDA driver shows; NULL where that is not loaded. */
static void *drivers_function(const char *name)
{
    const char *path = getenv("ZSHARD_CUDA_LIB");
    void *symbol = dlsym(RTLD_DEFAULT, name);
    void *library = symbol == NULL && path != NULL ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    return library != NULL ? dlsym(library, name) : symbol;
}

/* Queues `run(arg)` on the stream. */
static void enqueue_on(void *stream, void (*run)(void *), void *arg)
{
    static fake_enqueue drivers;
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    if (drivers == NULL) {
        void *symbol = drivers_function("fake_cuda_enqueue");
        drivers = own_enqueue;
        if (symbol != NULL) memcpy(&drivers, &symbol, sizeof symbol);
    }
    fake_enqueue found = drivers;
    pthread_mutex_unlock(&once);
    found(stream, run, arg);
}

/* The stream's number in the log of the stand-in for the driver; -1 where that is not loaded. */
static int number_of_stream(void *stream)
{
    int (*number)(void *) = NULL;
    void *symbol = drivers_function("fake_cuda_stream_number");
    memcpy(&number, &symbol, sizeof symbol);
    return number != NULL ? number(stream) : -1;
}

#endif
