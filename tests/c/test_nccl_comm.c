/* test_nccl_comm.c - communicators (csrc/comm/nccl/) over the stand-in for NCCL, fake_nccl.c.
 *
 * The stand-in runs work on a stream late and on another thread, and ends the process on what the real library
 * leaves undefined; so a test that passes has waited for what has to be waited for, kept the monitor out of calls, and has
 * touched nothing after an abort. Here is what works, and what is refused; the rest is in nccl_failures.c and nccl_processes.c.
 */
#include "nccl_tests.h"

static char stream_b; /* its address is a stream */

/* --- what moves bytes ---------------------------------------------------------------------------------------------------- */

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
            OK(zs_nccl_broadcast(comm, data, sizes[s], root, &stream_a));
            synchronize(&stream_a);
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
    OK(zs_nccl_messages(comm, list, (size_t)env->world + 1, &stream_a));
    synchronize(&stream_a);
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

/* The last reference goes while an operation is under way: what it writes is there all the same. */
static void ending_waits_for_what_is_under_way(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "200000", 1);
    zs_nccl_comm *comm = make(env, "all");
    char ranks[MAX_RANKS] = {0};
    ranks[env->rank] = (char)(env->rank + 1);
    OK(zs_nccl_all_gather(comm, &ranks[env->rank], ranks, 1, &stream_a));
    zs_nccl_comm_free(comm);
    synchronize(&stream_a);
    for (int r = 0; r < env->world; r++)
        CHECK(ranks[r] == r + 1);
}

/* --- order ------------------------------------------------------------------------------------------------------------------ */

/* Each operation of one communicator works on what the one before has made; the other one's go on meanwhile. */
static void two_communicators_keep_their_orders(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "200", 1);
    enum { ROUNDS = 12 };
    zs_nccl_comm *a = make(env, "gathers"), *b = make(env, "broadcasts");
    char x[ROUNDS + 1] = {(char)(env->rank == 0)}, y[MAX_RANKS] = {0};
    for (int i = 0; i < ROUNDS; i++) {
        jitter(env);
        y[env->rank] = (char)(env->rank + i);
        /* What one has brought is sent on by the next, from another rank. */
        zs_message message = {&x[i], &x[i + 1], 1, env->rank};
        OK(zs_nccl_broadcast(b, &x[i], 1, i % env->world, &stream_b));
        OK(zs_nccl_messages(b, &message, 1, &stream_b));
        OK(zs_nccl_all_gather(a, &y[env->rank], y, sizeof *y, &stream_a));
        synchronize(&stream_a);
        for (int r = 0; r < env->world; r++)
            CHECK(y[r] == r + i);
    }
    synchronize(&stream_b);
    CHECK(x[ROUNDS] == 1);
    zs_nccl_comm_free(a);
    zs_nccl_comm_free(b);
}

/* What torch does on the NULL stream is done at once, here too. */
static void null_stream_is_at_once(rank_env *env)
{
    zs_nccl_comm *comm = make(env, "all");
    char x = (char)(env->rank == 0);
    OK(zs_nccl_broadcast(comm, &x, 1, 0, NULL));
    CHECK(x == 1);
    zs_nccl_comm_free(comm);
}

/* --- options and versions -------------------------------------------------------------------------------------------------- */

static void all_options_are_taken(rank_env *env)
{
    for (int ctas = ZS_NCCL_CTAS_DEFAULT; ctas <= ZS_NCCL_CTAS_EFFICIENCY; ctas++)
        for (int least = 0; least <= 4; least += 4)
            for (int most = 0; most <= 8; most += 8) {
                zs_nccl_options options = {
                    .name = "all", .timeout = 30.0, .ctas = (zs_nccl_ctas)ctas, .min_ctas = least, .max_ctas = most};
                zs_nccl_comm *comm = NULL;
                OK(zs_nccl_comm_new(env->comm, &options, &comm));
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

static const rank_test tests[] = {
    TEST(bytes_get_where_they_belong, .least = 1),
    TEST(messages_go_in_one_launch, .least = 1),
    TEST(ending_waits_for_what_is_under_way, .least = 1),
    TEST(two_communicators_keep_their_orders, .least = 2),
    TEST(null_stream_is_at_once, .least = 1),
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
