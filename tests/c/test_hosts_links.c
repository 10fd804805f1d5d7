/* test_hosts_links.c - connections between hosts (hosts_links.c), where this program is the other host.
 *
 * The transport that they belong to is played here. What hosts send each other over them is tested from Python
 * (tests/ranks).
 */
#include "comm/hosts/hosts.h"
#include "one_test.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { LARGE = 32 << 20 }; /* more than a connection holds */

static bool forked, hasty;

bool zs_c10d_is_forked(const zs_c10d_comm *comm)
{
    (void)comm;
    return forked;
}

zs_status zs_c10d_check_usable(zs_comm *comm)
{
    (void)comm;
    return ZS_FAIL(ZS_ERR_STATE, "forked");
}

zs_status zs_c10d_fail(zs_c10d_comm *comm, const zs_turn *turn, zs_status status)
{
    (void)comm, (void)turn;
    return status;
}

zs_status zs_c10d_watch(zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_arrival *until)
{
    (void)comm, (void)turn;
    while (!until->arrived(until->arg, 0.01))
        if (hasty) return ZS_FAIL(ZS_ERR_TIMEOUT, "%s", until->late);
    return ZS_OK;
}

/* Two hosts: this is the first. With the other's ends of the connections. */
typedef struct pair {
    zs_hosts_comm comm;
    zs_hosts_move moves[2];
    int from, to; /* this host's bytes come out of `from`; it receives those written to `to` */
} pair;

static pair connected(void)
{
    int out[2], in[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, out) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, in) == 0);
    pair made = {.comm = {.hosts = 2}, .from = out[1], .to = in[1]};
    OK(zs_hosts_links_new(&made.comm, (int[]){-1, -1, out[0], in[0]}));
    close(out[0]); /* it keeps copies */
    close(in[0]);
    return made;
}

static void disconnect(pair *it)
{
    zs_hosts_links_free(&it->comm);
    close(it->from);
    close(it->to);
}

static _Atomic int calls, good_calls;

static void count_call(void *arg, bool good)
{
    (void)arg;
    if (good) good_calls++;
    calls++;
}

/* A move that sends `out` and receives `in`. */
static void begin(pair *it, char *out, size_t n_out, char *in, size_t n_in)
{
    zs_hosts_move *move = &it->moves[1];
    *move = (zs_hosts_move){.out = {{out, n_out}}, .in = {{in, n_in}}, .n_out = 1, .n_in = 1, .arrived = count_call};
    OK(zs_hosts_move_begin(&it->comm, 1, move));
}

static void moves_by_threads_keep_their_order(void)
{
    pair it = connected();
    for (int i = 0; i < 100; i++) {
        char mine[3] = {(char)i, 1, 2}, theirs[3] = {0}, seen[3];
        begin(&it, mine, 3, theirs, 3);
        CHECK(write(it.to, (char[]){3, (char)i}, 2) == 2);
        CHECK(recv(it.from, seen, 3, MSG_WAITALL) == 3 && memcmp(seen, mine, 3) == 0);
        CHECK(!zs_hosts_moves_done(&it.comm, it.moves));
        CHECK(write(it.to, "x", 1) == 1);
        OK(zs_hosts_moves_finish(&it.comm, NULL, it.moves));
        CHECK(theirs[0] == 3 && theirs[1] == (char)i && theirs[2] == 'x' && good_calls == i + 1 && calls == i + 1);
    }
    disconnect(&it);
}

/* All was received, but not all sent. */
static void an_arrival_is_reported_once(void)
{
    pair it = connected();
    char *large = calloc(1, LARGE), in[1];
    CHECK(large != NULL);
    begin(&it, large, LARGE, in, 1);
    CHECK(write(it.to, "x", 1) == 1);
    while (calls == 0)
        sched_yield();
    hasty = true;
    FAILS(zs_hosts_moves_finish(&it.comm, NULL, it.moves), ZS_ERR_TIMEOUT, "or gone there");
    free(large); /* no thread reads it any more */
    CHECK(calls == 1 && good_calls == 1);
    disconnect(&it);
}

static void abandoned_memory_is_left_alone_by_threads(void)
{
    pair it = connected();
    char *large = calloc(1, LARGE);
    CHECK(large != NULL && write(it.to, large, 100) == 100);
    begin(&it, large, 1, large + 1, LARGE - 1);
    zs_hosts_moves_leave(&it.comm, it.moves);
    free(large);
    CHECK(calls == 1 && good_calls == 0);
    FAILS(zs_hosts_move_begin(&it.comm, 1, it.moves), ZS_ERR_PEER, "abandoned");
    disconnect(&it);
}

static void closed_connection_is_an_error(void)
{
    pair it = connected();
    char out[1] = {0}, in[2];
    begin(&it, out, 1, in, 2);
    CHECK(write(it.to, "x", 1) == 1);
    shutdown(it.to, SHUT_RDWR);
    FAILS(zs_hosts_moves_finish(&it.comm, NULL, it.moves), ZS_ERR_PEER, "closed by peer");
    CHECK(calls == 1 && good_calls == 0);
    disconnect(&it);
}

static void connection_that_cannot_be_kept(void)
{
    int ends[2];
    zs_hosts_comm comm = {.hosts = 3};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    FAILS(zs_hosts_links_new(&comm, (int[]){-1, -1, ends[0], 1 << 20, ends[1], ends[1]}), ZS_ERR_SYSTEM,
          "cannot keep a connection");
    zs_hosts_links_free(&comm);
    CHECK(comm.links == NULL);
    for (int fd = 0; fd < 3; fd++)
        CHECK(fcntl(fd, F_GETFD) >= 0); /* not closed in place of one that was not made */
    CHECK(fcntl(ends[0], F_GETFD) >= 0 && fcntl(ends[1], F_GETFD) >= 0);
}

/* It has no threads; its parent keeps its own. */
static void forked_child_leaves_connections_alone(void)
{
    pair it = connected();
    char out[1] = {7}, in[1], seen[1];
    begin(&it, out, 1, in, 1);
    CHECK(recv(it.from, seen, 1, 0) == 1 && seen[0] == 7);
    pid_t child = fork();
    if (child == 0) {
        forked = true;
        CHECK(zs_hosts_moves_done(&it.comm, it.moves));
        FAILS(zs_hosts_moves_finish(&it.comm, NULL, it.moves), ZS_ERR_STATE, "forked");
        zs_hosts_moves_leave(&it.comm, it.moves);
        zs_hosts_links_free(&it.comm);
        _exit(calls);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(write(it.to, "x", 1) == 1);
    OK(zs_hosts_moves_finish(&it.comm, NULL, it.moves));
    CHECK(in[0] == 'x' && calls == 1);
    disconnect(&it);
}

static const one_test tests[] = {
    TEST(moves_by_threads_keep_their_order, ),
    TEST(an_arrival_is_reported_once, ),
    TEST(abandoned_memory_is_left_alone_by_threads, ),
    TEST(closed_connection_is_an_error, ),
    TEST(connection_that_cannot_be_kept, ),
    TEST(forked_child_leaves_connections_alone, ),
};

int main(int argc, char **argv)
{
    return run_one_test(tests, COUNT(tests), argc, argv);
}
