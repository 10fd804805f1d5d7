/* ranks.h - runs a test's body in forked processes, one per rank, each with a connected shm transport.
 *
 * A failing CHECK ends its process with status 1, which fails the test; nothing else is needed.
 */
#ifndef ZS_TEST_RANKS_H
#define ZS_TEST_RANKS_H

#define _GNU_SOURCE 1
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "comm/comm.h"
#include "one_test.h"

enum { MAX_RANKS = 4 };

/* Memory that all ranks of a test share, besides the transport's own. */
typedef struct board {
    char addresses[MAX_RANKS][128];
    _Atomic int listening;
    _Atomic int step; /* for tests: the progress of the rank that leads the test */
} board;

typedef struct rank_env {
    int rank, world;
    zs_comm *comm;
    board *board;
    unsigned seed;
} rank_env;

typedef void (*rank_body)(rank_env *);

static void (*around_each)(rank_env *, rank_body); /* what runs a body, over another transport; NULL: itself */

static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void sleep_us(long us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

static inline unsigned draw(rank_env *env, unsigned below)
{
    return (unsigned)rand_r(&env->seed) % below;
}

/* Sometimes yields, sometimes sleeps a little: shakes the order of things. */
static inline void jitter(rank_env *env)
{
    unsigned dice = draw(env, 16);
    if (dice == 0) sleep_us((long)draw(env, 300));
    if (dice == 1) sleep_us(0);
}

static inline zs_comm *join_ranks(rank_env *env, double timeout)
{
    static const unsigned char token[16] = "0123456789abcdef";
    zs_comm *comm = NULL;
    OK(zs_comm_shm_new(env->rank, env->world, timeout, env->board->addresses[env->rank], 128, &comm));
    atomic_fetch_add(&env->board->listening, 1);
    while (atomic_load(&env->board->listening) < env->world)
        sleep_us(200);
    const char *addresses[MAX_RANKS];
    for (int r = 0; r < env->world; r++)
        addresses[r] = env->board->addresses[r];
    OK(zs_comm_shm_connect(comm, addresses, token));
    return comm;
}

/* Runs `body` on `world` ranks; true if all ended well (or, for a rank the test kills, by that signal). */
static inline bool run_ranks(int world, double timeout, int killed, rank_body body)
{
    board *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    pid_t pids[MAX_RANKS];
    fflush(NULL);
    for (int r = 0; r < world; r++) {
        pids[r] = fork();
        CHECK(pids[r] >= 0);
        if (pids[r] > 0) continue;
        rank_env env = {.rank = r, .world = world, .board = shared, .seed = (unsigned)(1000 * world + r)};
        if (timeout > 0) env.comm = join_ranks(&env, timeout);
        if (around_each != NULL)
            around_each(&env, body);
        else
            body(&env);
        zs_comm_release(env.comm);
        exit(0);
    }
    bool good = true;
    for (int r = 0; r < world; r++) {
        int status = 0;
        waitpid(pids[r], &status, 0);
        bool as_planned = r > 0 && r == killed ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!as_planned) fprintf(stderr, "    rank %d of %d ended with wait status %d\n", r, world, status);
        good = good && as_planned;
    }
    munmap(shared, sizeof *shared);
    return good;
}

typedef struct rank_test {
    const char *name;
    rank_body body;
    int least;         /* ranks; runs with each number from there to MAX_RANKS */
    int killed;        /* the rank that the test kills, 0: none */
    bool joins_itself; /* the body makes the transport */
} rank_test;

static inline bool run_test(const rank_test *test, int world)
{
    double start = now();
    bool passed = run_ranks(world, test->joins_itself ? 0.0 : 60.0, test->killed, test->body);
    printf("%-36s %d ranks  %s  %.2f s\n", test->name, world, passed ? "ok" : "FAILED", now() - start);
    return passed;
}

/* main() of a test program: runs all tests, or the one named by the first argument. 0: all passed. */
static inline int run_tests(const rank_test *tests, size_t count, int argc, char **argv)
{
    bool good = true, any = false;
    for (size_t i = 0; i < count; i++) {
        const rank_test *test = &tests[i];
        bool named = argc > 1 && strcmp(argv[1], test->name) == 0;
        if (argc > 1 && !named) continue;
        for (int world = test->least; world <= MAX_RANKS; world++)
            good = run_test(test, world) && good;
        any = true;
    }
    if (!any) fprintf(stderr, "there is no test '%s'\n", argv[1]);
    return !any ? 2 : good ? 0 : 1;
}

#endif
