/* nccl_processes.c - communicators and what is around them: forks, the end of the process, threads, others (test_nccl_comm.c).
 *
 * A communicator belongs to the process that has made it, and may be there when that ends.
 */
#include "nccl_tests.h"

#include <pthread.h>

/* --- processes ------------------------------------------------------------------------------------------------------------ */

void a_forked_child_touches_nothing(rank_env *env)
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
void exit_without_close_is_no_hang(rank_env *env)
{
    if (env->rank % 2 == 0) atexit(abort_at_exit);
    setenv("FAKE_NCCL_HANG", "AllGather:2", 1);
    zs_nccl_comm *comm = make(env, "all");
    gather(env, comm, 100, true);
    static char full[MAX_RANKS];
    OK(zs_nccl_all_gather(comm, full + env->rank, full, 1, &stream_a));
    double start = now();
    if (env->rank == 0) {
        zs_nccl_abort_all("the interpreter ends");
        synchronize(&stream_a);
        FAILS(zs_nccl_comm_check(comm), ZS_ERR_STATE, "the interpreter ends");
    }
    CHECK(now() < start + 5.0);
    exit(0);
}

/* The monitor comes and goes with the communicators. */
void communicators_come_and_go(rank_env *env)
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
typedef struct caller {
    rank_env *env;
    zs_nccl_comm *comm;
} caller;

static void *call_for_a_while(void *arg)
{
    caller *c = arg;
    double start = now();
    char over = 0;
    while (!over) {
        char stop = (char)(now() > start + 1.0); /* rank 0's */
        OK(zs_nccl_broadcast(c->comm, &stop, 1, 0, &stream_a));
        event *done = calloc(1, sizeof *done);
        record(done, &stream_a);
        OK(zs_nccl_comm_watch(c->comm, (zs_nccl_work){has_happened, done, "a broadcast"}));
        synchronize(&stream_a);
        zs_nccl_comm_forget(c->comm, done);
        free(done);
        over = stop;
    }
    return NULL;
}

void calls_and_the_monitors_thread(rank_env *env)
{
    caller c = {env, make(env, "all")};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, call_for_a_while, &c) == 0);
        pthread_join(thread, NULL);
    }
    zs_nccl_comm_free(c.comm);
}
