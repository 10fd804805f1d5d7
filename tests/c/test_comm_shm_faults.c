/* test_comm_shm_faults.c - failures over the shm transport: no wait hangs, every message names the rank.
 *
 * Ranks wait for a minute, after which the error would be another one.
 */
#include "ranks.h"

#include "comm/shm/shm.h"
#include "comm/where.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

static const char *const unit_name = "blocks.3";

/* Units stay until the process ends, as in a program that fails; reachable, so that no leak is reported. */
static zs_cunit *units[4];
static int n_units;

static zs_cunit *make_unit(rank_env *env, const char *name, size_t shard_bytes)
{
    zs_cunit_spec spec = {.name = name, .n_params = 3, .n_flats = 1, .shard_bytes = {shard_bytes}};
    OK(zs_cunit_new(env->comm, &spec, &units[n_units]));
    return units[n_units++];
}

static zs_status post_empty(rank_env *env, zs_cunit *unit)
{
    return zs_cunit_post(env->comm, unit, NULL);
}

static zs_status collect(rank_env *env, zs_cunit *unit)
{
    bool ready = false;
    zs_sources from;
    zs_status status = zs_cunit_collect(env->comm, unit, true, &ready, &from);
    CHECK(ready == (status == ZS_OK));
    return status;
}

static void run_round(rank_env *env, zs_cunit *unit)
{
    OK(post_empty(env, unit));
    OK(collect(env, unit));
    OK(zs_cunit_release(env->comm, unit));
}

static zs_status meet(rank_env *env)
{
    char mine = 0, all[MAX_RANKS];
    return zs_comm_exchange(env->comm, &mine, 1, all);
}

/* Marks that this rank has seen all that it needs. */
static void arrive(rank_env *env)
{
    atomic_fetch_add(&env->board->step, 1);
}

static void wait_for_arrivals(rank_env *env, int count)
{
    while (atomic_load(&env->board->step) < count)
        sleep_us(1000);
}

static void die_late(void)
{
    sleep_us(100000);
    kill(getpid(), SIGKILL);
}

/* --- peers that have exited --------------------------------------------------------------------------------------- */

static void peer_killed_while_awaited(rank_env *env)
{
    zs_cunit *unit = make_unit(env, unit_name, 64);
    run_round(env, unit);
    if (env->rank == 1) die_late();
    OK(post_empty(env, unit));
    FAILS(collect(env, unit), ZS_ERR_PEER, "rank 1 (pid ");
    zs_clear_error();
    FAILS(collect(env, unit), ZS_ERR_PEER,
          "for it to reduce gradients of unit 'blocks.3' (round 2)"); /* asked again: the same */
}

/* Rank 0 waits for rank 2, and rank 1, which it does not wait for, dies. */
static void peer_killed_while_another_is_awaited(rank_env *env)
{
    zs_cunit *unit = make_unit(env, unit_name, 64);
    OK(meet(env));
    if (env->rank == 2) { /* it leaves once the others have their error, which is not about it */
        wait_for_arrivals(env, env->world - 2);
        return;
    }
    OK(post_empty(env, unit));
    if (env->rank == 1) kill(getpid(), SIGKILL);
    FAILS(collect(env, unit), ZS_ERR_PEER, "waiting for rank 2 to reduce gradients");
    arrive(env);
}

static void memory_of_a_dead_peer_stays_readable(rank_env *env)
{
    zs_cunit *unit = make_unit(env, unit_name, 64);
    OK(post_empty(env, unit));
    if (env->rank == 1) {
        arrive(env);
        kill(getpid(), SIGKILL);
    }
    wait_for_arrivals(env, 1);
    sleep_us(50000);
    OK(collect(env, unit)); /* its contribution before it died is there */
}

/* A rank that dies while it publishes its optimizer state leaves a number that says so for ever. */
static void peer_killed_while_it_posts(rank_env *env)
{
    char *text = NULL;
    size_t bytes = 0;
    const zs_state_ops *state = env->comm->ops->state;
    OK(state->post(env->comm, "state", 5));
    OK(meet(env));
    if (env->rank == 1) {
        atomic_fetch_add(&((zs_shm *)env->comm)->own->post_number, 1);
        arrive(env);
        die_late();
    }
    wait_for_arrivals(env, 1);
    FAILS(state->posted(env->comm, 1, &text, &bytes), ZS_ERR_PEER, "died while it published");
    OK(state->posted(env->comm, 0, &text, &bytes));
    CHECK(bytes == 5 && memcmp(text, "state", 5) == 0);
    free(text);
}

static void exit_is_not_a_failure(rank_env *env)
{
    if (env->rank == 1) {
        zs_comm_close(env->comm);
        FAILS(meet(env), ZS_ERR_STATE, "closed");
        wait_for_arrivals(env, env->world - 1);
        return;
    }
    FAILS(meet(env), ZS_ERR_PEER, "exited while");
    CHECK(strstr(zs_last_message(), "died") == NULL);
    arrive(env);
}

static void peer_killed_in_a_reader_wait(rank_env *env)
{
    zs_reader *reader = NULL;
    OK(zs_comm_reader_new(env->comm, "gpt", &reader));
    if (env->rank == 1) die_late();
    FAILS(zs_comm_read_begin(env->comm, reader, &(zs_reading){.pass = ZS_PASS_TRAIN}), ZS_ERR_PEER,
          "it to begin forward 1 of 'gpt'");
    zs_comm_reader_free(env->comm, reader);
}

/* --- deadlines ---------------------------------------------------------------------------------------------------- */

static void timeout_names_the_late_ranks(rank_env *env)
{
    zs_cunit *unit = make_unit(env, unit_name, 64);
    run_round(env, unit);
    env->comm->timeout = 0.3;
    if (env->rank == 1) {
        wait_for_arrivals(env, env->world - 1);
        return;
    }
    OK(post_empty(env, unit));
    FAILS(collect(env, unit), ZS_ERR_TIMEOUT, "rank 1 to reduce gradients of unit 'blocks.3' (round 2); rank 1 (pid ");
    FAILS(collect(env, unit), ZS_ERR_TIMEOUT, "last operation: release gradients of unit 'blocks.3' (round 1)");
    arrive(env);
}

static void stall_is_reported_once(rank_env *env)
{
    zs_set_report_after(0.6);
    if (env->rank == 1) {
        sleep_us(1200000);
        OK(meet(env));
        return;
    }
    char text[2048] = "";
    int ends[2];
    CHECK(pipe(ends) == 0);
    fflush(stderr);
    int old = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    zs_status status = meet(env);
    fflush(stderr);
    dup2(old, STDERR_FILENO);
    close(ends[1]);
    OK(status);
    CHECK(read(ends[0], text, sizeof text - 1) > 0);
    const char *first = strstr(text, "waiting 1 s for other ranks to all-gather message 1; rank 1 (pid ");
    CHECK(first != NULL && strstr(first, "last operation: connect\n") != NULL && strchr(first, '\n')[1] == 0);
}

static bool interrupt_now(void)
{
    return true;
}

static void waits_can_be_interrupted(rank_env *env)
{
    OK(meet(env));
    if (env->rank == 0) {
        zs_comm_on_wait(interrupt_now);
        FAILS(meet(env), ZS_ERR_TORCH, "interrupted");
        arrive(env);
    }
    wait_for_arrivals(env, 1);
}

/* --- aborts and divergence ---------------------------------------------------------------------------------------- */

static void abort_message_reaches_peers(rank_env *env)
{
    zs_cunit *unit = make_unit(env, unit_name, 64);
    OK(post_empty(env, unit));
    if (env->rank == 1) {
        sleep_us(50000);
        zs_comm_abort(env->comm, "ValueError: bad batch in epoch 3");
        zs_comm_abort(env->comm, "a second reason");
        arrive(env);
    } else {
        FAILS(meet(env), ZS_ERR_PEER, "failed: ValueError: bad batch in epoch 3");
        CHECK(strstr(zs_last_message(), "second") == NULL);
    }
    wait_for_arrivals(env, 1);
    FAILS(meet(env), ZS_ERR_PEER, "rank 1"); /* also for the rank that gave up */
}

/* A poll that is not ready also detects an abort, though it does not wait. */
static void abort_ends_polling(rank_env *env)
{
    zs_cunit *unit = make_unit(env, unit_name, 64);
    if (env->rank == 1) {
        zs_comm_abort(env->comm, "no more");
        return;
    }
    OK(post_empty(env, unit));
    zs_status status = ZS_OK;
    bool ready = false;
    zs_sources from;
    for (double start = now(); status == ZS_OK && now() - start < 5.0;)
        status = zs_cunit_collect(env->comm, unit, false, &ready, &from);
    CHECK(status == ZS_ERR_PEER && !ready);
}

/* Each waits for something that the others will never do: proven at once, long before the deadline, and on all ranks. */
static void deadlock_is_found(rank_env *env)
{
    zs_cunit *unit = make_unit(env, unit_name, 64);
    zs_cunit *other = make_unit(env, "blocks.4", 64);
    zs_status status = ZS_OK;
    if (env->rank == 0) {
        OK(post_empty(env, unit));
        status = collect(env, unit);
    } else if (env->rank == 1) {
        status = meet(env);
    } else {
        OK(post_empty(env, other));
        status = collect(env, other);
    }
    CHECK(status == ZS_ERR_DIVERGED);
    CHECK(strstr(zs_last_message(), "is waiting for rank 1 to reduce gradients of unit 'blocks.3' (round 1)") != NULL);
    CHECK(strstr(zs_last_message(), "is waiting for rank 0 to all-gather message 1") != NULL);
}

/* All wait for a rank that is busy: slow is no fault. */
static void slow_rank_is_no_deadlock(rank_env *env)
{
    if (env->rank == 1) sleep_us(1000000);
    OK(meet(env));
}

static void different_models_diverge(rank_env *env)
{
    zs_cunit *unit = make_unit(env, env->rank == 0 ? "encoder" : "decoder", 64);
    OK(post_empty(env, unit));
    FAILS(collect(env, unit), ZS_ERR_DIVERGED, env->rank == 0 ? "has 'decoder'" : "has 'encoder'");
    OK(meet(env));
    unit = make_unit(env, "head", env->rank == 0 ? 64 : 128);
    OK(post_empty(env, unit));
    FAILS(collect(env, unit), ZS_ERR_DIVERGED, "128 bytes");
    OK(meet(env));
}

static void different_exchanges_diverge(rank_env *env)
{
    char data[16 * MAX_RANKS] = "";
    size_t bytes = env->rank == 0 ? 8 : 16;
    FAILS(zs_comm_exchange(env->comm, data, bytes, data), ZS_ERR_DIVERGED, "rank 0");
    if (env->rank == 0) OK(zs_comm_broadcast(env->comm, data, 8, 0));
    if (env->rank != 0) FAILS(zs_comm_broadcast(env->comm, data, 16, 0), ZS_ERR_DIVERGED, "16 more bytes");
    OK(meet(env)); /* so that rank 0 stays until all have taken */
}

static void *meet_beside(void *env)
{
    OK(meet(env));
    return NULL;
}

/* A rank waits for one thing at a time: the others read there whether it can ever continue. */
static void two_threads_do_not_wait_at_a_time(rank_env *env)
{
    pthread_t thread;
    zs_cunit *unit = make_unit(env, unit_name, 64);
    if (env->rank == 1) {
        wait_for_arrivals(env, env->world - 1);
        OK(post_empty(env, unit));
        OK(meet(env));
    } else {
        OK(post_empty(env, unit));
        CHECK(pthread_create(&thread, NULL, meet_beside, env) == 0);
        while (atomic_load(&((zs_shm *)env->comm)->own->wait_id) % 2 == 0)
            sleep_us(1000);
        FAILS(collect(env, unit), ZS_ERR_STATE, "two threads of rank");
        arrive(env);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    OK(collect(env, unit));
    OK(meet(env));
}

/* --- joining ------------------------------------------------------------------------------------------------------ */

static zs_status try_to_join(rank_env *env, const char *token, bool unknown, zs_comm **comm)
{
    char own[128];
    const char *addresses[MAX_RANKS];
    OK(zs_comm_shm_new(env->rank, env->world, 0.5, own, sizeof own, comm));
    CHECK(strlen(own) < 108);
    strcpy(env->board->addresses[env->rank], unknown && env->rank == 0 ? "zshard-nobody" : own);
    arrive(env);
    wait_for_arrivals(env, env->world);
    for (int r = 0; r < env->world; r++)
        addresses[r] = env->board->addresses[r];
    return zs_comm_shm_connect(*comm, addresses, (const unsigned char *)token);
}

static void unreachable_peers(rank_env *env)
{
    zs_comm *comm = NULL;
    zs_status status = try_to_join(env, "0123456789abcdef", true, &comm);
    CHECK(status == ZS_ERR_UNSUPPORTED);
    const char *words =
        env->rank == 0 ? "rank 0 got a connection from 0 of" : "cannot connect to rank 0 over shared memory";
    CHECK(strstr(zs_last_message(), words) != NULL);
    zs_flat_mem flat;
    FAILS(zs_comm_flat_new(comm, 4096, &flat), ZS_ERR_STATE, "not connected");
    zs_comm_release(comm);
}

static void wrong_token_is_refused(rank_env *env)
{
    zs_comm *comm = NULL;
    zs_status status = try_to_join(env, env->rank == 0 ? "0123456789abcdef" : "0123456789abcdeX", false, &comm);
    CHECK(env->rank != 0 || status == ZS_ERR_UNSUPPORTED);
    CHECK(env->rank != 1 || status == ZS_ERR_UNSUPPORTED);
    zs_comm_release(comm);
}

/* Processes that have nothing to say, one after the other, in place of rank 1: rank 0 waits no longer for that. */
static void strangers_end_no_deadline(rank_env *env)
{
    if (env->rank == 0) {
        zs_comm *comm = NULL;
        CHECK(try_to_join(env, "0123456789abcdef", false, &comm) == ZS_ERR_UNSUPPORTED);
        atomic_store(&env->board->step, 100);
        zs_comm_release(comm);
        return;
    }
    arrive(env);
    wait_for_arrivals(env, env->world);
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    size_t length = strlen(env->board->addresses[0]);
    memcpy(name.sun_path + 1, env->board->addresses[0], length);
    while (atomic_load(&env->board->step) < 100) {
        int line = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
        (void)!connect(line, (struct sockaddr *)&name,
                       (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length));
        close(line);
    }
}

static int open_descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < 256; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static void no_descriptor_is_left_open(rank_env *env)
{
    int before = open_descriptors();
    zs_comm *comm = join_ranks(env, 5.0);
    CHECK(open_descriptors() == before + 2 + 2 * (env->world - 1));
    zs_comm_release(comm);
    CHECK(open_descriptors() == before);
}

/* --- the list ----------------------------------------------------------------------------------------------------- */

static const rank_test tests[] = {
    TEST(peer_killed_while_awaited, .least = 2, .killed = 1),
    TEST(peer_killed_while_another_is_awaited, .least = 3, .killed = 1),
    TEST(memory_of_a_dead_peer_stays_readable, .least = 2, .killed = 1),
    TEST(peer_killed_while_it_posts, .least = 2, .killed = 1),
    TEST(exit_is_not_a_failure, .least = 2),
    TEST(peer_killed_in_a_reader_wait, .least = 2, .killed = 1),
    TEST(timeout_names_the_late_ranks, .least = 2),
    TEST(stall_is_reported_once, .least = 2),
    TEST(waits_can_be_interrupted, .least = 2),
    TEST(abort_message_reaches_peers, .least = 2),
    TEST(abort_ends_polling, .least = 2),
    TEST(deadlock_is_found, .least = 2),
    TEST(slow_rank_is_no_deadlock, .least = 2),
    TEST(different_models_diverge, .least = 2),
    TEST(different_exchanges_diverge, .least = 2),
    TEST(two_threads_do_not_wait_at_a_time, .least = 2),
    TEST(unreachable_peers, .least = 2, .joins_itself = true),
    TEST(wrong_token_is_refused, .least = 2, .joins_itself = true),
    TEST(strangers_end_no_deadline, .least = 2, .joins_itself = true),
    TEST(no_descriptor_is_left_open, .least = 2, .joins_itself = true),
};

int main(int argc, char **argv)
{
    return run_tests(tests, COUNT(tests), argc, argv);
}
