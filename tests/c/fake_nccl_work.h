/* fake_nccl_work.h - the inside of fake_nccl.c: communicators, and the work of their operations on streams. Included
 * once.
 *
 * A job is a list of transfers between pairs of ranks, through one box for each pair, and the arithmetic that follows
 * them; its loop moves all bytes that can be moved until all is done, or the communicator is aborted.
 */
#ifndef ZS_TEST_FAKE_NCCL_WORK_H
#define ZS_TEST_FAKE_NCCL_WORK_H

#include "comm/nccl/nccl_lib.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 8, CHUNK = 16384 };

/* The functions, by number. */
typedef enum function {
#define NUMBER(result, name, parameters) F_##name,
    ZS_NCCL_REQUIRED(NUMBER) ZS_NCCL_OPTIONAL(NUMBER)
#undef NUMBER
        FUNCTIONS
} function;

static const char *const names[] = {
#define NAME(result, name, parameters) #name,
    ZS_NCCL_REQUIRED(NAME) ZS_NCCL_OPTIONAL(NAME)
#undef NAME
};

/* Bytes from one rank to another. */
typedef struct box {
    _Atomic int full;
    int function;   /* the sender's function */
    uint64_t total; /* bytes that it sends in all */
    uint32_t bytes; /* in `data` */
    char data[CHUNK];
} box;

/* Shared by the ranks of a communicator. */
typedef struct board {
    _Atomic int arrived, aborted;
    _Atomic pid_t processes[MOST_RANKS]; /* 0: has not come yet, -1: has ended its communicator */
    _Atomic int gpus[MOST_RANKS];        /* 1 + the first of FAKE_CUDA_VISIBLE; 0: not set */
    box boxes[MOST_RANKS][MOST_RANKS];   /* [from][to] */
} board;

/* A communicator. Never freed: calls on a dead one must be noticed. */
typedef struct fake {
    bool dead;
    int rank, world;
    pid_t pid;
    board *shared;
    char path[112];
    _Atomic int inside; /* threads */
    _Atomic int aborted;
    _Atomic int state; /* a zs_nccl_result */
    _Atomic uint64_t ended;
    uint64_t begun;
    function busy_with; /* while the state is "in progress" */
    int polls, late;    /* looks until it ends, and its result */
    struct job *pending;
    struct fake *next;
} fake;

typedef struct transfer {
    int peer;
    char *ptr;
    size_t bytes, done;
    bool send;
} transfer;

/* One piece of work on a stream. */
typedef struct job {
    fake *comm;
    function called, function; /* the function called, and the peers' name for it */
    uint64_t number;           /* of its communicator: they run in this order on all streams */
    void *stream;
    pthread_t caller; /* who has queued it */
    transfer *transfers;
    size_t count, room;
    bool hangs;
    struct job *next;
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fake *comms;
static int calls[FUNCTIONS], operations;
static _Thread_local int nth_call; /* of its function: this thread's last one */
static char last_error[512];
static _Thread_local int depth, group_error;
static _Thread_local job *group_jobs, *group_pairs; /* those of Send and Recv are one job */

__attribute__((format(printf, 1, 2))) static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "fake_nccl, pid %d: ", (int)getpid());
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

/* A function that the fake of the CUDA driver exports, about a stream. */
static void *drivers_function(const char *name)
{
    void *symbol = dlsym(RTLD_DEFAULT, name);
    void *library = symbol == NULL ? dlopen(getenv("ZSHARD_CUDA_LIB"), RTLD_NOW) : NULL;
    if (library != NULL) symbol = dlsym(library, name);
    if (symbol == NULL) die("no %s: is ZSHARD_CUDA_LIB the stand-in?", name);
    return symbol;
}

/* Queues `run(arg)` on the stream. */
static void enqueue_on(void *stream, void (*run)(void *), void *arg)
{
    void (*enqueue)(void *stream, void (*run)(void *), void *arg) = NULL;
    void *symbol = drivers_function("fake_cuda_enqueue");
    memcpy(&enqueue, &symbol, sizeof symbol);
    enqueue(stream, run, arg);
}

/* The stream's number in the log of the fake of the driver. */
static int number_of_stream(void *stream)
{
    int (*number)(void *) = NULL;
    void *symbol = drivers_function("fake_cuda_stream_number");
    memcpy(&number, &symbol, sizeof symbol);
    return number(stream);
}

static int complain(int result, const char *words)
{
    pthread_mutex_lock(&lock);
    snprintf(last_error, sizeof last_error, "%s", words);
    pthread_mutex_unlock(&lock);
    return result;
}

static long number_of(const char *variable, long otherwise)
{
    const char *text = getenv(variable);
    return text != NULL ? atol(text) : otherwise;
}

/* Is this thread's last call, of this function, the one that `variable` names? Then its result, else 0. */
static int planned(const char *variable, function f)
{
    char name[64] = "";
    int which = 0, result = ZS_NCCL_INTERNAL_ERROR;
    const char *text = getenv(variable);
    if (text == NULL || sscanf(text, "%63[^:]:%d:%d", name, &which, &result) < 2) return 0;
    return which == nth_call && strcmp(name, names[f]) == 0 ? result : 0;
}

/* Writes a line into the log, if there is one. */
__attribute__((format(printf, 1, 2))) static void write_log(const char *format, ...)
{
    const char *path = getenv("FAKE_NCCL_LOG");
    FILE *log = path != NULL ? fopen(path, "a") : NULL;
    if (log == NULL) return;
    va_list args;
    va_start(args, format);
    vfprintf(log, format, args);
    va_end(args);
    fclose(log);
}

/* Counts and logs a call; returns the error to fail with. */
static int begin_call(function f, const fake *comm, size_t size, const void *stream)
{
    pthread_mutex_lock(&lock);
    nth_call = ++calls[f];
    pthread_mutex_unlock(&lock);
    write_log("%s comm=%p rank=%d size=%zu stream=%p\n", names[f], (const void *)comm, comm != NULL ? comm->rank : -1,
              size, stream);
    int result = planned("FAKE_NCCL_FAIL", f);
    return result != 0 ? complain(result, "the stand-in was told to fail") : ZS_NCCL_SUCCESS;
}

/* A communicator that may be used by this thread now. */
static fake *enter(void *handle, function f)
{
    fake *comm = handle;
    if (comm == NULL) die("nccl%s without a communicator", names[f]);
    if (comm->pid != getpid()) die("nccl%s in a forked child", names[f]);
    if (comm->dead) die("nccl%s after abort or destroy", names[f]);
    if (atomic_fetch_add(&comm->inside, 1) != 0) die("nccl%s while another thread is inside", names[f]);
    return comm;
}

static int leave(fake *comm, int result)
{
    atomic_fetch_sub(&comm->inside, 1);
    return result;
}

/* --- work on a stream --------------------------------------------------------------------------------------------- */

static void sleep_us(long us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

/* Moves up to a chunk; false if it has to wait for the peer. */
static bool advance(job *work, transfer *t)
{
    fake *comm = work->comm;
    box *b = t->send ? &comm->shared->boxes[comm->rank][t->peer] : &comm->shared->boxes[t->peer][comm->rank];
    if (t->done == t->bytes || atomic_load(&b->full) == t->send) return false;
    if (t->send) {
        size_t part = t->bytes - t->done < CHUNK ? t->bytes - t->done : CHUNK;
        memcpy(b->data, t->ptr + t->done, part);
        b->bytes = (uint32_t)part;
        b->total = t->bytes;
        b->function = (int)work->function;
        t->done += part;
    } else if (b->total != t->bytes || b->function != (int)work->function) {
        atomic_store(&comm->state, complain(ZS_NCCL_INTERNAL_ERROR, "the ranks are at different operations"));
        work->hangs = true;
        return false;
    } else {
        memmove(t->ptr + t->done, b->data, b->bytes);
        t->done += b->bytes;
    }
    atomic_store(&b->full, t->send);
    return true;
}

/* Are all transfers with that peer that come before this one done? Their bytes go through the same box. */
static bool is_next(const job *work, size_t i)
{
    const transfer *it = &work->transfers[i];
    for (size_t k = 0; k < i; k++) {
        const transfer *t = &work->transfers[k];
        if (t->peer == it->peer && t->send == it->send && t->done < t->bytes) return false;
    }
    return true;
}

/* The peers that have exited, a bit each. */
static uint64_t gone_peers(const fake *comm)
{
    uint64_t gone = 0;
    for (int r = 0; r < comm->world; r++) {
        pid_t process = atomic_load(&comm->shared->processes[r]);
        if (process < 0 || (process > 0 && kill(process, 0) != 0)) gone |= UINT64_C(1) << r;
    }
    return gone;
}

/* Does the job wait for one of these peers? A peer that has done its part may go while others still wait for each
 * other. One that hangs waits for all. */
static bool waits_for(const job *work, uint64_t peers)
{
    if (work->hangs) return peers != 0;
    for (size_t i = 0; i < work->count; i++) {
        const transfer *t = &work->transfers[i];
        if (t->done < t->bytes && (peers >> t->peer & 1) != 0) return true;
    }
    return false;
}

/* The kernel: spins until all is there, or it is aborted. If it blocks the host, no thread could abort it (in the real
 * one no call waits for a kernel), so then it ends with the peers that it waits for. */
static void run(void *arg)
{
    job *work = arg;
    fake *comm = work->comm;
    sleep_us(number_of("FAKE_NCCL_DELAY_US", 0));
    bool done = false;
    while (!done && !atomic_load(&comm->aborted)) {
        bool moved = false, turn = atomic_load(&comm->ended) == work->number;
        bool watches = pthread_equal(work->caller, pthread_self());
        uint64_t gone = watches ? gone_peers(comm) : 0; /* before this look: a peer's last bytes are still taken */
        done = turn && !work->hangs;
        for (size_t i = 0; turn && i < work->count; i++) {
            moved = (is_next(work, i) && advance(work, &work->transfers[i])) || moved;
            done = done && work->transfers[i].done == work->transfers[i].bytes;
        }
        if (moved || done) continue;
        if (waits_for(work, gone)) {
            atomic_store(&comm->state, complain(ZS_NCCL_REMOTE_ERROR, "a peer has gone"));
            break;
        }
        sleep_us(50);
    }
    atomic_fetch_add(&comm->ended, 1);
    free(work->transfers);
    free(work);
}

/* --- jobs --------------------------------------------------------------------------------------------------------- */

static job *new_job(fake *comm, function f, void *stream)
{
    job *work = calloc(1, sizeof *work);
    if (work == NULL) die("out of memory");
    *work = (job){.comm = comm, .called = f, .function = f, .stream = stream};
    return work;
}

static void add_transfer(job *work, transfer t)
{
    if (work->count == work->room) {
        work->room = 2 * work->room + 4;
        work->transfers = realloc(work->transfers, work->room * sizeof t);
        if (work->transfers == NULL) die("out of memory");
    }
    work->transfers[work->count++] = t;
}

static void add_send(job *work, int peer, const void *from, size_t bytes)
{
    add_transfer(work, (transfer){.peer = peer, .ptr = (char *)(uintptr_t)from, .bytes = bytes, .send = true});
}

static void add_receive(job *work, int peer, void *to, size_t bytes)
{
    add_transfer(work, (transfer){.peer = peer, .ptr = to, .bytes = bytes});
}

static void put_on_streams(fake *comm)
{
    for (job *work = comm->pending, *next; work != NULL; work = next) {
        next = work->next;
        work->number = comm->begun++;
        work->caller = pthread_self();
        enqueue_on(work->stream, run, work);
    }
    comm->pending = NULL;
}

static void drop_jobs(job *work)
{
    for (job *next; work != NULL; work = next) {
        next = work->next;
        free(work->transfers);
        free(work);
    }
}

/* From now on the communicator is busy with `f`, for a few looks. */
static int set_busy(fake *comm, function f)
{
    static _Thread_local unsigned seed = 1;
    comm->busy_with = f;
    comm->polls = rand_r(&seed) % (int)(1 + number_of("FAKE_NCCL_POLLS", 20));
    atomic_store(&comm->state, ZS_NCCL_IN_PROGRESS);
    return ZS_NCCL_IN_PROGRESS;
}

/* May this communicator take a call? */
static int ready(fake *comm)
{
    int state = atomic_load(&comm->state);
    if (state == ZS_NCCL_IN_PROGRESS)
        return complain(ZS_NCCL_INVALID_ARGUMENT,
                        "Attempt to use communicator before the previous operation returned ncclSuccess");
    return state;
}

/* Keeps a job until the group ends. Sends and receives are put together: they make progress together. */
static void add_to_group(job *made)
{
    job *pairs = group_pairs;
    if (made->count == 1 && pairs != NULL && pairs->comm == made->comm) {
        add_transfer(pairs, made->transfers[0]);
        pairs->hangs = pairs->hangs || made->hangs;
        drop_jobs(made);
        return;
    }
    if (made->count == 1) group_pairs = made;
    job **end = &group_jobs;
    while (*end != NULL)
        end = &(*end)->next;
    *end = made;
}

/* Logs the memory that an operation will read and write, with the driver's numbers of streams. */
static void log_transfers(const job *made)
{
    if (getenv("FAKE_NCCL_LOG") == NULL) return;
    int stream = number_of_stream(made->stream);
    for (size_t i = 0; i < made->count; i++) {
        const transfer *t = &made->transfers[i];
        write_log("transfer call=%s comm=%p stream=%d %s=%p bytes=%zu peer=%d world=%d\n", names[made->called],
                  (void *)made->comm, stream, t->send ? "src" : "dst", (void *)t->ptr, t->bytes, t->peer,
                  made->comm->world);
    }
}

/* Starts an operation: `made` is the work for the stream. */
static int submit(job *made, size_t size)
{
    fake *comm = made->comm;
    function f = made->called;
    int result = begin_call(f, comm, size, made->stream);
    if (result == 0) result = ready(comm);
    if (result != ZS_NCCL_SUCCESS) {
        drop_jobs(made);
        atomic_store(&comm->state, result);
        if (depth > 0) group_error = result;
        return leave(comm, result);
    }
    log_transfers(made);
    comm->late = planned("FAKE_NCCL_FAIL_LATE", f);
    made->hangs = planned("FAKE_NCCL_HANG", f) != 0;
    pthread_mutex_lock(&lock);
    int number = ++operations, after = 0, then = 0;
    pthread_mutex_unlock(&lock);
    const char *async = getenv("FAKE_NCCL_ASYNC");
    if (async != NULL && sscanf(async, "%d:%d", &after, &then) == 2 && number == after) comm->late = then;
    if (depth > 0)
        add_to_group(made);
    else
        comm->pending = made;
    return leave(comm, depth > 0 ? ZS_NCCL_SUCCESS : set_busy(comm, f));
}

#endif
