/* nccl_failures.c - communicators whose calls fail, whose peers have exited, or whose work does not end
 * (test_nccl_comm.c).
 *
 * A failure in the library or on another rank is one error, which every later call returns, and no hang.
 */
#include "nccl_tests.h"

#include <poll.h>
#include <sys/syscall.h>

/* --- failures ----------------------------------------------------------------------------------------------------- */

static void count_lost(void *arg, zs_status failure, const char *why)
{
    CHECK(failure != ZS_OK && strlen(why) > 0);
    atomic_fetch_add((_Atomic int *)arg, 1);
}

/* All that a communicator can be asked to do, until something fails. */
static zs_status do_everything(rank_env *env, zs_nccl_comm *comm)
{
    static char full[MAX_RANKS * 64], other[MAX_RANKS * 64];
    char *mine = full + env->rank * 64;
    for (int i = 0; i < 3; i++) {
        ZS_TRY(zs_nccl_all_gather(comm, mine, full, 64, STREAM_A));
        ZS_TRY(zs_nccl_messages(comm, &(zs_message){full, other, 64, env->rank}, 1, STREAM_A));
        ZS_TRY(zs_nccl_broadcast(comm, full, 64, 0, STREAM_A));
        ZS_TRY(zs_nccl_comm_check(comm));
    }
    return ZS_OK;
}

/* FAKE_NCCL_FAIL or FAKE_NCCL_FAIL_LATE or FAKE_NCCL_ASYNC is set by test_nccl.py, and ZS_TEST_WORDS has the words of
 * the message; without ZS_TEST_WORDS the failure comes at the end, and is not reported. */
void a_failing_call_is_an_error_and_no_more(rank_env *env)
{
    const char *words = getenv("ZS_TEST_WORDS");
    _Atomic int lost = 0;
    zs_nccl_options options = {.name = "all", .timeout = 30.0, .lost = count_lost, .arg = &lost};
    zs_nccl_comm *comm = NULL;
    zs_clear_error();
    zs_status status = zs_nccl_comm_new(env->comm, &options, &comm);
    bool made = status == ZS_OK;
    if (made) status = do_everything(env, comm);
    for (double start = now(); made && words != NULL && status == ZS_OK && now() < start + 5.0; sleep_us(1000))
        status = zs_nccl_comm_check(comm); /* the monitor finds it */
    CHECK(status == (words != NULL ? ZS_ERR_NCCL : ZS_OK));
    if (words != NULL && strstr(zs_last_message(), words) == NULL) fprintf(stderr, "expected: %s\n", words);
    CHECK(words == NULL || strstr(zs_last_message(), words) != NULL);
    char first[1024];
    snprintf(first, sizeof first, "%s", zs_last_message());
    if (made && words != NULL) {
        FAILS(do_everything(env, comm), ZS_ERR_NCCL, first);
        FAILS(zs_nccl_comm_check(comm), ZS_ERR_NCCL, first);
        CHECK(atomic_load(&lost) == 1);
    }
    if (made) synchronize(STREAM_A);
    zs_nccl_comm_free(comm);
}

/* --- peers that have exited --------------------------------------------------------------------------------------- */

/* Word of a failure travels over the board, as it does over a transport. */
static void tell_board(void *arg, zs_status failure, const char *why)
{
    (void)failure;
    (void)why;
    atomic_store(&((board *)arg)->step, 1);
}

static bool ask_board(void *arg, char *sentence, size_t size)
{
    if (atomic_load(&((board *)arg)->step) != 1) return false;
    snprintf(sentence, size, "another rank gave up");
    return true;
}

static zs_nccl_options over_board(rank_env *env, double timeout)
{
    return (zs_nccl_options){
        .name = "all", .timeout = timeout, .gone = ask_board, .lost = tell_board, .arg = env->board};
}

/* Only the last rank fails; the others, whose kernels would wait forever, learn of it. */
void one_rank_fails_and_the_others_hear(rank_env *env)
{
    bool last = env->rank == env->world - 1;
    if (last) setenv("FAKE_NCCL_FAIL", "AllGather:2:2", 1);
    zs_nccl_comm *comm = make_with(env, over_board(env, 60.0));
    gather(env, comm, 100, true);
    char full[MAX_RANKS] = {0}, bytes[MAX_RANKS] = {0}, mine = 0;
    if (!last) OK(zs_nccl_all_gather(comm, full + env->rank, full, 1, STREAM_A));
    OK(zs_comm_exchange(env->comm, &mine, 1,
                        bytes)); /* all others wait in the second gather, and none is in the first */
    double start = now();
    if (last)
        FAILS(zs_nccl_all_gather(comm, full + env->rank, full, 1, STREAM_A), ZS_ERR_NCCL, "unhandled system error");
    zs_clear_error();
    if (!last) synchronize(STREAM_A); /* the user's loss.item() */
    CHECK(now() < start + 30.0);      /* half of the timeout */
    if (!last) FAILS(zs_nccl_comm_check(comm), ZS_ERR_PEER, "another rank gave up");
    zs_nccl_comm_free(comm);
}

/* Making it fails on the last rank: all say so, in the words of that rank. */
void a_rank_that_cannot_make_it_is_told_on_all(rank_env *env)
{
    if (env->rank == env->world - 1) setenv("FAKE_NCCL_FAIL", "CommInitRankConfig:1:1", 1);
    char part[64];
    snprintf(part, sizeof part, "rank %d: NCCL, communicator 'all'", env->world - 1);
    refuse(env, over_board(env, 60.0), ZS_ERR_NCCL, part);
}

static int rank_1; /* a descriptor of its process */

static bool has_ended(void *arg, char *sentence, size_t size)
{
    struct pollfd look = {.fd = *(int *)arg, .events = POLLIN};
    if (poll(&look, 1, 0) <= 0) return false;
    snprintf(sentence, size, "rank 1 has ended");
    return true;
}

/* A communicator whose ranks look for the end of rank 1. */
static zs_nccl_comm *make_watching(rank_env *env)
{
    pid_t pid = getpid(), pids[MAX_RANKS];
    OK(zs_comm_exchange(env->comm, &pid, sizeof pid, pids));
    rank_1 = (int)syscall(SYS_pidfd_open, pids[1], 0);
    zs_nccl_options options = {.name = "all", .timeout = 60.0, .gone = has_ended, .arg = &rank_1};
    if (env->rank == 1) options.gone = NULL;
    return make_with(env, options);
}

/* A rank that has done its part and left: operations still under way here may end well. */
void a_peer_that_has_left_breaks_nothing_off(rank_env *env)
{
    if (env->rank != 1) setenv("FAKE_NCCL_DELAY_US", "500000", 1);
    zs_nccl_comm *comm = make_watching(env);
    char data[8] = {0};
    if (env->rank == 1) fill(data, 8, 1, 7);
    event done = {0};
    OK(zs_nccl_broadcast(comm, data, 8, 1, STREAM_A));
    watch(comm, &done, "the last");
    synchronize(STREAM_A);
    if (env->rank == 1) raise(SIGKILL);
    check_filled(data, 8, 1, 7);
    for (double start = now(); zs_nccl_comm_check(comm) == ZS_OK; sleep_us(1000))
        CHECK(now() < start + 10.0);
    FAILS(zs_nccl_comm_check(comm), ZS_ERR_PEER, "rank 1 has ended");
    zs_nccl_comm_free(comm);
}

void a_killed_rank_is_reported_within_seconds(rank_env *env)
{
    zs_nccl_comm *comm = make_watching(env);
    gather(env, comm, 100, true);
    if (env->rank == 1) raise(SIGKILL);
    char full[MAX_RANKS] = {0};
    zs_nccl_all_gather(comm, full + env->rank, full, 1, STREAM_A);
    synchronize(STREAM_A);
    FAILS(zs_nccl_all_gather(comm, full + env->rank, full, 1, STREAM_A), ZS_ERR_PEER, "rank 1 has ended");
    zs_nccl_comm_free(comm);
}

/* --- what does not end -------------------------------------------------------------------------------------------- */

void work_that_does_not_end_is_broken_off(rank_env *env)
{
    setenv("FAKE_NCCL_HANG", "AllGather:2", 1);
    zs_nccl_comm *comm = make_with(env, (zs_nccl_options){.name = "all", .timeout = 1.0});
    gather(env, comm, 100, true);
    event done[3] = {{0}};
    char full[MAX_RANKS] = {0};
    for (int i = 0; i < 3; i++) { /* the second one hangs, the third waits behind it */
        if (i > 0) OK(zs_nccl_all_gather(comm, full + env->rank, full, 1, STREAM_A));
        watch(comm, &done[i], i == 1 ? "the second" : "another");
    }
    synchronize(STREAM_A);
    FAILS(zs_nccl_comm_check(comm), ZS_ERR_TIMEOUT, "the second did not finish within 1 s");
    FAILS(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &done[0], "more"}), ZS_ERR_TIMEOUT, "the second");
    zs_nccl_comm_free(comm);
}

/* Work that makes progress, for any total time, and work that was forgotten, is not a failure. */
void progress_is_no_timeout(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "40000", 1);
    /* Fifty delays: a loaded machine keeps it. */
    zs_nccl_comm *comm = make_with(env, (zs_nccl_options){.name = "all", .timeout = 2.0});
    enum { N = 80 };
    event done[N] = {{0}}, never = {0}, nor_this = {0};
    char full[MAX_RANKS] = {0};
    OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &never, "never"}));
    for (int i = 0; i < N; i++) {
        OK(zs_nccl_all_gather(comm, full + env->rank, full, 1, STREAM_A));
        watch(comm, &done[i], "a gather");
        if (i == N / 2) OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &nor_this, "nor this"}));
    }
    zs_nccl_comm_forget(comm, &never);
    zs_nccl_comm_forget(comm, &nor_this);
    zs_nccl_comm_forget(comm, &nor_this);
    synchronize(STREAM_A);
    OK(zs_nccl_comm_check(comm));
    zs_nccl_comm_free(comm);
}
