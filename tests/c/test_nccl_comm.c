/* test_nccl_comm.c - communicators (csrc/comm/nccl/) over the fake of NCCL, fake_nccl.c.
 *
 * The fake runs work on a stream late and on another thread, and ends the process on undefined behavior of the real
 * library; so a test that passes has made all waits, kept the monitor out of calls, and has touched nothing after an
 * abort. Here are successful and refused calls; failures are in nccl_failures.c.
 */
#include "nccl_tests.h"

#include <pthread.h>

/* --- what moves bytes --------------------------------------------------------------------------------------------- */

static const size_t sizes[] = {1, 7, 64, 4096, 3 * 16384 + 5};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void bytes_get_where_they_belong(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "300", 1);
    zs_nccl_comm *comm = make(env, "all");
    for (int s = 0; s < SIZES; s++) {
        gather(env, comm, sizes[s], false);
        gather(env, comm, sizes[s], true);
        swap_all(env, comm, sizes[s]);
        for (int root = 0; root < env->world; root++) {
            char *data = calloc(1, sizes[s]);
            if (root == env->rank) fill(data, sizes[s], root, 2);
            OK(zs_nccl_broadcast(comm, data, sizes[s], root, STREAM_A));
            synchronize(STREAM_A);
            check_filled(data, sizes[s], root, 2);
            free(data);
        }
    }
    zs_nccl_comm_free(comm);
}

/* A message to each rank and one from it, of other lengths for each pair, in one launch; two to oneself. */
static void messages_go_in_one_launch(rank_env *env)
{
    enum { MOST = 40000 };
    zs_nccl_comm *comm = make(env, "all");
    zs_message list[MAX_RANKS + 1];
    char *send = malloc(MOST), *receive = calloc(MAX_RANKS + 1, MOST);
    fill(send, MOST, env->rank, 5);
    for (int i = 0; i <= env->world; i++) {
        int peer = i % env->world;
        size_t bytes = (size_t)(peer + 1) * (size_t)(env->rank + 1) * 1001; /* equal on both sides */
        list[i] = (zs_message){send + i, receive + i * MOST, bytes, peer};
    }
    list[env->world] = (zs_message){send, receive + env->world * MOST, 3, env->rank};
    OK(zs_nccl_messages(comm, list, (size_t)env->world + 1, STREAM_A));
    synchronize(STREAM_A);
    for (int i = 0; i < env->world; i++) { /* this rank's was the rank-th of the sender's list */
        const char *at = receive + i * MOST;
        for (size_t b = 0; b < list[i].bytes; b++)
            CHECK((unsigned char)at[b] == byte_of(i, b + (size_t)env->rank, 5));
    }
    check_filled(receive + env->world * MOST, 3, env->rank, 5);
    zs_message odd = {send, receive, 8, env->world}, none = {send, receive, 0, 0}, null = {NULL, receive, 8, 0};
    FAILS(zs_nccl_messages(comm, &odd, 1, NULL), ZS_ERR_VALUE, "out of range for world size");
    FAILS(zs_nccl_messages(comm, &none, 1, NULL), ZS_ERR_VALUE, "0 bytes");
    FAILS(zs_nccl_messages(comm, &null, 1, NULL), ZS_ERR_VALUE, "send buffer of");
    OK(zs_nccl_messages(comm, NULL, 0, NULL));
    zs_nccl_comm_free(comm);
    free(send);
    free(receive);
}

/* The last reference is dropped while an operation is under way: its result still arrives. */
static void ending_waits_for_what_is_under_way(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "200000", 1);
    zs_nccl_comm *comm = make(env, "all");
    char ranks[MAX_RANKS] = {0};
    ranks[env->rank] = (char)(env->rank + 1);
    OK(zs_nccl_all_gather(comm, &ranks[env->rank], ranks, 1, STREAM_A));
    zs_nccl_comm_free(comm);
    synchronize(STREAM_A);
    for (int r = 0; r < env->world; r++)
        CHECK(ranks[r] == r + 1);
}

/* --- order -------------------------------------------------------------------------------------------------------- */

/* Each operation of one communicator works on the previous one's result; the other communicator's operations continue
 * meanwhile. */
static void two_communicators_keep_their_orders(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "200", 1);
    enum { ROUNDS = 12 };
    zs_nccl_comm *a = make(env, "gathers"), *b = make(env, "broadcasts");
    char x[ROUNDS + 1] = {(char)(env->rank == 0)}, y[MAX_RANKS] = {0};
    for (int i = 0; i < ROUNDS; i++) {
        jitter(env);
        y[env->rank] = (char)(env->rank + i);
        /* The next operation forwards the bytes of the previous one, from another rank. */
        zs_message message = {&x[i], &x[i + 1], 1, env->rank};
        OK(zs_nccl_broadcast(b, &x[i], 1, i % env->world, STREAM_B));
        OK(zs_nccl_messages(b, &message, 1, STREAM_B));
        OK(zs_nccl_all_gather(a, &y[env->rank], y, sizeof *y, STREAM_A));
        synchronize(STREAM_A);
        for (int r = 0; r < env->world; r++)
            CHECK(y[r] == r + i);
    }
    synchronize(STREAM_B);
    CHECK(x[ROUNDS] == 1);
    zs_nccl_comm_free(a);
    zs_nccl_comm_free(b);
}

/* --- options and versions ----------------------------------------------------------------------------------------- */

static void all_options_are_taken(rank_env *env)
{
    for (int ctas = ZS_NCCL_CTAS_DEFAULT; ctas <= ZS_NCCL_CTAS_EFFICIENCY; ctas++)
        for (int least = 0; least <= 4; least += 4)
            for (int most = 0; most <= 8; most += 8) {
                zs_nccl_options options = {
                    .name = "all", .timeout = 30.0, .ctas = (zs_nccl_ctas)ctas, .min_ctas = least, .max_ctas = most};
                zs_nccl_comm *comm = make_with(env, options);
                gather(env, comm, 100, true);
                zs_nccl_comm_free(comm);
            }
}

/* A fault of the last rank is an error on all, and the next attempt is a new one. */
static void senseless_options_are_refused_on_all_ranks(rank_env *env)
{
    bool odd = env->rank == env->world - 1;
    zs_nccl_options good = {.name = "all", .timeout = 30.0}, bad = good;
    bad.timeout = -1.0;
    refuse(env, odd ? bad : good, ZS_ERR_VALUE, "must be positive, got -1 s");
    bad = good;
    bad.min_ctas = 9;
    bad.max_ctas = 8;
    refuse(env, odd ? bad : good, ZS_ERR_VALUE, "got 9 and 8");
    bad = good;
    bad.max_ctas = 8;
    refuse(env, odd ? bad : good, ZS_ERR_DIVERGED, "options differ between ranks");
    zs_nccl_comm *comm = make(env, "all");
    gather(env, comm, 10, true);
    zs_nccl_comm_free(comm);
}

static void another_version_is_told(rank_env *env)
{
    if (env->rank == env->world - 1) setenv("FAKE_NCCL_VERSION", "23007", 1);
    refuse(env, (zs_nccl_options){.name = "all", .timeout = 30.0}, ZS_ERR_DIVERGED,
           "NCCL is 2.28.9 on rank 0, but 2.30.7");
}

static void no_library_is_told_on_all_ranks(rank_env *env)
{
    if (env->rank == env->world - 1) setenv("ZSHARD_NCCL_LIB", "/nowhere/libnccl.so.2", 1);
    char part[96];
    snprintf(part, sizeof part, "rank %d: NCCL: cannot load ZSHARD_NCCL_LIB: /nowhere", env->world - 1);
    refuse(env, (zs_nccl_options){.name = "all", .timeout = 30.0}, ZS_ERR_UNSUPPORTED, part);
}

/* A library that is something else: libc has no ncclGetVersion. */
static void another_library_is_told(rank_env *env)
{
    setenv("ZSHARD_NCCL_LIB", "libc.so.6", 1);
    refuse(env, (zs_nccl_options){.name = "all", .timeout = 30.0}, ZS_ERR_UNSUPPORTED, "lacks ncclGetVersion");
}

/* Runs with 2.21.5 (see test_nccl.py). */
static void an_old_library_does_without(rank_env *env)
{
    zs_nccl_options options = {.name = "all", .timeout = 30.0, .ctas = ZS_NCCL_CTAS_EFFICIENCY};
    refuse(env, options, ZS_ERR_UNSUPPORTED, "does not support CTA policy 'efficiency'");
    zs_nccl_comm *comm = make(env, "all");
    for (int s = 0; s < SIZES; s++)
        swap_all(env, comm, sizes[s]);
    gather(env, comm, 100, true);
    zs_nccl_comm_free(comm);
}

static void bad_arguments_poison_nothing(rank_env *env)
{
    zs_nccl_comm *comm = make(env, "all");
    char full[MAX_RANKS * 64] = {0}, other[MAX_RANKS * 64] = {0};
    size_t huge = SIZE_MAX / 2;
    FAILS(zs_nccl_all_gather(comm, NULL, full, 64, NULL), ZS_ERR_VALUE, "send buffer of");
    FAILS(zs_nccl_all_gather(comm, full, NULL, 64, NULL), ZS_ERR_VALUE, "receive buffer of");
    FAILS(zs_nccl_all_gather(comm, full + 32, full, 64, NULL), ZS_ERR_VALUE, "not at the offset of rank");
    FAILS(zs_nccl_all_gather(comm, other, full, huge, NULL), ZS_ERR_VALUE, "is too large");
    FAILS(zs_nccl_broadcast(comm, full, 64, env->world, NULL), ZS_ERR_VALUE, "out of range for world size");
    FAILS(zs_nccl_broadcast(comm, full, 64, -1, NULL), ZS_ERR_VALUE, "rank -1 is out of range");
    OK(zs_nccl_all_gather(comm, NULL, NULL, 0, NULL));
    OK(zs_nccl_comm_check(comm));
    gather(env, comm, 64, true);
    zs_nccl_comm_free(comm);
}

/* --- processes ---------------------------------------------------------------------------------------------------- */

static void a_forked_child_touches_nothing(rank_env *env)
{
    zs_nccl_comm *comm = make(env, "all");
    char data = 0;
    event done = {0};
    OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &done, "something"}));
    pid_t child = fork();
    if (child == 0) {
        zs_nccl_options options = {.name = "all", .timeout = 1.0};
        zs_comm *alone = NULL;
        zs_nccl_comm *another = NULL;
        FAILS(zs_nccl_broadcast(comm, &data, 1, 0, NULL), ZS_ERR_STATE, "forked");
        FAILS(zs_nccl_comm_check(comm), ZS_ERR_STATE, "forked");
        OK(zs_comm_self_new(zs_device_cpu(), &alone));
        FAILS(zs_nccl_comm_new(alone, &options, &another), ZS_ERR_STATE, "forked");
        zs_comm_release(alone);
        zs_nccl_comm_forget(comm, &done);
        zs_nccl_abort_all("the end");
        zs_nccl_comm_free(comm);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    gather(env, comm, 100, true);
    zs_nccl_comm_forget(comm, &done);
    zs_nccl_comm_free(comm);
}

static void abort_at_exit(void)
{
    zs_nccl_abort_all("the interpreter ends");
}

/* The process ends in the middle of things: no hang, no crash. (The harness waits for status 0.) */
static void exit_without_close_is_no_hang(rank_env *env)
{
    if (env->rank % 2 == 0) atexit(abort_at_exit);
    setenv("FAKE_NCCL_HANG", "AllGather:2", 1);
    zs_nccl_comm *comm = make(env, "all");
    gather(env, comm, 100, true);
    static char full[MAX_RANKS];
    OK(zs_nccl_all_gather(comm, full + env->rank, full, 1, STREAM_A));
    double start = now();
    if (env->rank == 0) {
        zs_nccl_abort_all("the interpreter ends");
        synchronize(STREAM_A);
        FAILS(zs_nccl_comm_check(comm), ZS_ERR_STATE, "the interpreter ends");
    }
    CHECK(now() < start + 5.0);
    exit(0);
}

/* The monitor comes and goes with the communicators. */
static void communicators_come_and_go(rank_env *env)
{
    for (int i = 0; i < 20; i++) {
        zs_nccl_comm *comm = make(env, "first"), *other = i % 3 == 0 ? make(env, "second") : NULL;
        gather(env, comm, 10, true);
        zs_nccl_comm_free(comm);
        if (other != NULL) gather(env, other, 10, false);
        zs_nccl_comm_free(other);
    }
}

/* For ThreadSanitizer: calls from two threads in turn, and the monitor in between. */
static void *call_for_a_while(void *arg)
{
    zs_nccl_comm *comm = arg;
    double start = now();
    char over = 0;
    while (!over) {
        char stop = (char)(now() > start + 1.0); /* rank 0's */
        OK(zs_nccl_broadcast(comm, &stop, 1, 0, STREAM_A));
        event *done = calloc(1, sizeof *done);
        watch(comm, done, "a broadcast");
        synchronize(STREAM_A);
        zs_nccl_comm_forget(comm, done);
        free(done);
        over = stop;
    }
    return NULL;
}

static void calls_and_the_monitors_thread(rank_env *env)
{
    zs_nccl_comm *comm = make(env, "all");
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, call_for_a_while, comm) == 0);
        pthread_join(thread, NULL);
    }
    zs_nccl_comm_free(comm);
}

static const rank_test tests[] = {
    TEST(bytes_get_where_they_belong, .least = 1),
    TEST(messages_go_in_one_launch, .least = 1),
    TEST(ending_waits_for_what_is_under_way, .least = 1),
    TEST(two_communicators_keep_their_orders, .least = 2),
    TEST(all_options_are_taken, .least = 2),
    TEST(senseless_options_are_refused_on_all_ranks, .least = 2),
    TEST(another_version_is_told, .least = 2),
    TEST(no_library_is_told_on_all_ranks, .least = 1),
    TEST(another_library_is_told, .least = 1),
    TEST(an_old_library_does_without, .least = 2),
    TEST(bad_arguments_poison_nothing, .least = 2),
    TEST(a_failing_call_is_an_error_and_no_more, .least = 2),
    TEST(one_rank_fails_and_the_others_hear, .least = 2),
    TEST(a_rank_that_cannot_make_it_is_told_on_all, .least = 2),
    TEST(a_killed_rank_is_reported_within_seconds, .least = 2, .killed = 1),
    TEST(a_peer_that_has_left_breaks_nothing_off, .least = 2, .killed = 1),
    TEST(work_that_does_not_end_is_broken_off, .least = 2),
    TEST(progress_is_no_timeout, .least = 2),
    TEST(a_forked_child_touches_nothing, .least = 2),
    TEST(exit_without_close_is_no_hang, .least = 2),
    TEST(communicators_come_and_go, .least = 2),
    TEST(calls_and_the_monitors_thread, .least = 2),
};

int main(int argc, char **argv)
{
    return run_tests(tests, COUNT(tests), argc, argv);
}
