/* nccl_tests.h - shared by the tests of communicators: streams and events of the fake of NCCL, patterns, gathers.
 *
 * The tests are one program, test_nccl_comm.c, of two files; bodies that are not in that one are declared here.
 */
#ifndef ZS_TEST_NCCL_TESTS_H
#define ZS_TEST_NCCL_TESTS_H

#include "ranks.h"

#include <dlfcn.h>

#include "comm/nccl/nccl_comm.h"

/* A function of the fake of the CUDA driver, whose streams the one for NCCL uses. */
static inline void *drivers_function(const char *name)
{
    void *library = dlopen(getenv("ZSHARD_CUDA_LIB"), RTLD_NOW);
    CHECK(library != NULL && dlsym(library, name) != NULL);
    return dlsym(library, name);
}

/* One of two streams. */
static inline void *stream_at(int i)
{
    static void *made[2];
    void *(*make)(void) = NULL, *symbol = drivers_function("fake_cuda_new_stream");
    memcpy(&make, &symbol, sizeof symbol);
    if (made[i] == NULL) made[i] = make();
    return made[i];
}

#define STREAM_A stream_at(0)
#define STREAM_B stream_at(1)

/* Something recorded on a stream. */
typedef struct event {
    _Atomic int happened;
} event;

/* The stream's work for an event. */
static inline void happen(void *arg)
{
    atomic_store(&((event *)arg)->happened, 1);
}

/* The event happens when all that is on the stream now is done. */
static inline void record(event *e, void *stream)
{
    void (*enqueue)(void *stream, void (*run)(void *), void *arg) = NULL;
    void *symbol = drivers_function("fake_cuda_enqueue");
    memcpy(&enqueue, &symbol, sizeof symbol);
    atomic_store(&e->happened, 0);
    enqueue(stream, happen, e);
}

/* As zs_nccl_work asks. */
static inline bool has_happened(void *e)
{
    return atomic_load(&((event *)e)->happened) != 0;
}

/* Waits until all that is on the stream is done. */
static inline void synchronize(void *stream)
{
    event *e = calloc(1, sizeof *e);
    record(e, stream);
    for (double start = now(); !has_happened(e); sleep_us(100))
        CHECK(now() < start + 30.0);
    free(e);
}

/* A communicator of all ranks, with options. */
static inline zs_nccl_comm *make_with(rank_env *env, zs_nccl_options options)
{
    zs_nccl_comm *comm = NULL;
    OK(zs_nccl_comm_new(env->comm, &options, &comm));
    return comm;
}

static inline zs_nccl_comm *make(rank_env *env, const char *name)
{
    return make_with(env, (zs_nccl_options){.name = name, .timeout = 30.0});
}

/* Makes the communicator watch that it reaches this point of the stream. */
static inline void watch(zs_nccl_comm *comm, event *e, const char *what)
{
    record(e, STREAM_A);
    OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, e, what}));
}

/* A rank's i-th byte; `salt` distinguishes uses. */
static inline unsigned char byte_of(int rank, size_t i, unsigned salt)
{
    return (unsigned char)((unsigned)rank * 37u + (unsigned)i * 11u + (unsigned)(i >> 8) + salt);
}

/* Writes those bytes, and looks for them. */
static inline void fill(char *at, size_t bytes, int rank, unsigned salt)
{
    for (size_t i = 0; i < bytes; i++)
        at[i] = (char)byte_of(rank, i, salt);
}

static inline void check_filled(const char *at, size_t bytes, int rank, unsigned salt)
{
    for (size_t i = 0; i < bytes; i++)
        CHECK((unsigned char)at[i] == byte_of(rank, i, salt));
}

/* Gathers that many bytes of each rank, and checks them all. `in_place`: from where they go to. */
static inline void gather(rank_env *env, zs_nccl_comm *comm, size_t bytes, bool in_place)
{
    char *full = calloc((size_t)env->world, bytes), *shard = malloc(bytes);
    char *from = in_place ? full + (size_t)env->rank * bytes : shard;
    fill(from, bytes, env->rank, 1);
    OK(zs_nccl_all_gather(comm, from, full, bytes, STREAM_A));
    synchronize(STREAM_A);
    for (int r = 0; r < env->world; r++)
        check_filled(full + (size_t)r * bytes, bytes, r, 1);
    free(full);
    free(shard);
}

/* Sends each rank its own bytes, and checks those from each. */
static inline void swap_all(rank_env *env, zs_nccl_comm *comm, size_t bytes)
{
    size_t whole = (size_t)env->world * bytes;
    char *send = malloc(whole), *receive = calloc(1, whole);
    for (int r = 0; r < env->world; r++)
        fill(send + (size_t)r * bytes, bytes, env->rank, (unsigned)r);
    zs_message messages[MAX_RANKS];
    for (int r = 0; r < env->world; r++)
        messages[r] = (zs_message){send + (size_t)r * bytes, receive + (size_t)r * bytes, bytes, r};
    OK(zs_nccl_messages(comm, messages, (size_t)env->world, STREAM_A));
    synchronize(STREAM_A);
    for (int r = 0; r < env->world; r++)
        check_filled(receive + (size_t)r * bytes, bytes, r, (unsigned)env->rank);
    free(send);
    free(receive);
}

/* No communicator is made with these options, on any rank; the error has `part`. */
static inline void refuse(rank_env *env, zs_nccl_options options, zs_status kind, const char *part)
{
    zs_nccl_comm *comm = NULL;
    FAILS(zs_nccl_comm_new(env->comm, &options, &comm), kind, part);
    CHECK(comm == NULL);
}

/* Of nccl_failures.c. */
void a_failing_call_is_an_error_and_no_more(rank_env *env);
void one_rank_fails_and_the_others_hear(rank_env *env);
void a_rank_that_cannot_make_it_is_told_on_all(rank_env *env);
void a_killed_rank_is_reported_within_seconds(rank_env *env);
void a_peer_that_has_left_breaks_nothing_off(rank_env *env);
void work_that_does_not_end_is_broken_off(rank_env *env);
void progress_is_no_timeout(rank_env *env);

#endif
