/* hosts_links.c - the connections to a rank's counterparts, and the moves over them. See hosts.h.
 *
 * All ranks begin the same moves in the same order (hosts_turns.c), so bytes need no header: moves arrive in the order
 * in which they began. To each counterpart there are two connections, one to send over and one to receive from, and a
 * thread for each, which sleeps in the kernel until a large piece is done. So bytes go from where they lie to where
 * they belong, in few system calls, and no thread polls. */
#define _GNU_SOURCE 1 /* pthread_setname_np */
#include "comm/hosts/hosts.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    OUT,
    IN,
    AT_ONCE = 256 << 10, /* bytes that a receiver sleeps for: fewer wake it too often, more leave the wire idle */
};

/* One connection, in one direction. */
typedef struct lane {
    struct links *all;
    int fd, way;    /* OUT or IN */
    int sleeps_for; /* bytes */
    bool runs;
    pthread_t thread;
    zs_hosts_move *first, *last; /* to do; borrowed */
} lane;

struct links {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* on the monotonic clock */
    bool ends;
    char why[256]; /* the reason why moves have stopped; "": they have not */
    int n;
    lane lanes[]; /* [2 * hosts] for each host OUT and IN; fd -1: this host's */
};

/* --- moving, on a lane's thread ----------------------------------------------------------------------------------- */

/* Moves past the bytes that are done. */
static void advance(struct msghdr *message, size_t done)
{
    while (message->msg_iovlen > 0 && done >= message->msg_iov->iov_len) {
        done -= message->msg_iov->iov_len;
        message->msg_iov++;
        message->msg_iovlen--;
    }
    if (message->msg_iovlen == 0) return;
    message->msg_iov->iov_base = (char *)message->msg_iov->iov_base + done;
    message->msg_iov->iov_len -= done;
}

/* Sleeps until a large piece, or all that is left, has come. (recv alone would then sleep for as much once more.) */
static void sleep_for(lane *on, size_t left)
{
    int bytes = (int)(left < AT_ONCE ? left : AT_ONCE);
    if (bytes != on->sleeps_for) (void)setsockopt(on->fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
    on->sleeps_for = bytes;
    (void)poll(&(struct pollfd){.fd = on->fd, .events = POLLIN}, 1, -1);
}

/* 0, or what failed. */
static int transfer(lane *on, struct iovec *parts, int n)
{
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n};
    size_t left = 0;
    for (int i = 0; i < n; i++)
        left += parts[i].iov_len;
    while (left > 0) {
        if (on->way == IN) sleep_for(on, left);
        ssize_t done =
            on->way == OUT ? sendmsg(on->fd, &message, MSG_NOSIGNAL) : recvmsg(on->fd, &message, MSG_DONTWAIT);
        if (done < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (done <= 0) return done == 0 ? ECONNRESET : errno;
        left -= (size_t)done;
        advance(&message, (size_t)done);
    }
    return 0;
}

/* With the lock. */
static void fail(struct links *links, const char *why)
{
    if (links->why[0] == '\0') snprintf(links->why, sizeof links->why, "%s", why);
    links->ends = true;
    for (int i = 0; i < links->n; i++)
        if (links->lanes[i].fd >= 0) (void)shutdown(links->lanes[i].fd, SHUT_RDWR);
    pthread_cond_broadcast(&links->changed);
}

static zs_hosts_move *next_move(lane *on)
{
    struct links *links = on->all;
    pthread_mutex_lock(&links->lock);
    while (!links->ends && on->first == NULL)
        pthread_cond_wait(&links->changed, &links->lock);
    zs_hosts_move *move = links->ends ? NULL : on->first;
    pthread_mutex_unlock(&links->lock);
    return move;
}

static void *run(void *arg)
{
    lane *it = arg;
    struct links *links = it->all;
    zs_hosts_move *move;
    zs_clear_error();
    while ((move = next_move(it)) != NULL) {
        int error = it->way == OUT ? transfer(it, move->out, move->n_out) : transfer(it, move->in, move->n_in);
        if (it->way == IN && move->arrived != NULL) move->arrived(move->arg, error == 0);
        pthread_mutex_lock(&links->lock);
        if (it->way == IN) move->arrived = NULL; /* called once, even if the other direction fails */
        if (error == 0) {
            it->first = move->next[it->way];
            move->left--;
            pthread_cond_broadcast(&links->changed);
        } else {
            fail(links, error == ECONNRESET || error == EPIPE ? "Connection closed by peer" : strerror(error));
        }
        pthread_mutex_unlock(&links->lock);
    }
    return NULL;
}

/* --- on the threads that begin and wait --------------------------------------------------------------------------- */

static void push(lane *on, zs_hosts_move *move)
{
    move->next[on->way] = NULL;
    if (on->first == NULL)
        on->first = move;
    else
        on->last->next[on->way] = move;
    on->last = move;
}

zs_status zs_hosts_move_begin(zs_hosts_comm *self, int host, zs_hosts_move *move)
{
    struct links *links = self->links;
    pthread_mutex_lock(&links->lock);
    bool good = !links->ends;
    if (good) {
        move->left = 2;
        push(&links->lanes[2 * host + OUT], move);
        push(&links->lanes[2 * host + IN], move);
        pthread_cond_broadcast(&links->changed);
    }
    pthread_mutex_unlock(&links->lock);
    return good ? ZS_OK : ZS_FAIL(ZS_ERR_PEER, "%s", links->why);
}

typedef struct awaited {
    struct links *links;
    const zs_hosts_move *moves;
    int n;
} awaited;

static bool all_done(const awaited *it)
{
    for (int i = 0; i < it->n; i++)
        if (it->moves[i].left > 0) return false;
    return true;
}

static bool look(void *arg, double seconds)
{
    const awaited *it = arg;
    const struct timespec until = zs_clock_in(seconds);
    pthread_mutex_lock(&it->links->lock);
    bool late = seconds <= 0;
    while (!all_done(it) && !it->links->ends && !late)
        late = pthread_cond_timedwait(&it->links->changed, &it->links->lock, &until) != 0;
    bool over = all_done(it) || it->links->ends;
    pthread_mutex_unlock(&it->links->lock);
    return over;
}

bool zs_hosts_moves_done(zs_hosts_comm *self, const zs_hosts_move *moves)
{
    awaited it = {self->links, moves, self->hosts};
    return zs_c10d_is_forked(&self->c10d) || look(&it, 0);
}

zs_status zs_hosts_moves_finish(zs_hosts_comm *self, const zs_turn *turn, zs_hosts_move *moves)
{
    awaited it = {self->links, moves, self->hosts};
    zs_c10d_arrival until = {look, &it, "not all has come from other hosts, or gone there", false};
    if (zs_c10d_is_forked(&self->c10d))
        return zs_c10d_check_usable(&self->c10d.base); /* the threads and their lock belong to the parent */
    zs_status status = zs_c10d_watch(&self->c10d, turn, &until);
    if (status == ZS_OK && !all_done(&it))
        status = zs_c10d_fail(&self->c10d, turn, ZS_FAIL(ZS_ERR_PEER, "%s", self->links->why));
    if (status != ZS_OK) zs_hosts_moves_leave(self, moves);
    return status;
}

void zs_hosts_moves_leave(zs_hosts_comm *self, zs_hosts_move *moves)
{
    const awaited it = {self->links, moves, self->hosts};
    if (all_done(&it) || zs_c10d_is_forked(&self->c10d)) return; /* a child may have a copy of a half-done one */
    zs_hosts_links_stop(self, self->c10d.base.lost != NULL ? self->c10d.base.lost : "abandoned");
    for (int h = 0; h < self->hosts; h++) {
        if (moves[h].left > 0 && moves[h].arrived != NULL) moves[h].arrived(moves[h].arg, false);
        moves[h].left = 0;
    }
}

/* --- birth and end ------------------------------------------------------------------------------------------------ */

void zs_hosts_links_stop(zs_hosts_comm *self, const char *why)
{
    struct links *links = self->links;
    if (links == NULL || zs_c10d_is_forked(&self->c10d)) return;
    pthread_mutex_lock(&links->lock);
    fail(links, why);
    pthread_mutex_unlock(&links->lock);
    for (int i = 0; i < links->n; i++) {
        if (links->lanes[i].runs) pthread_join(links->lanes[i].thread, NULL);
        links->lanes[i].runs = false;
    }
}

void zs_hosts_links_free(zs_hosts_comm *self)
{
    struct links *links = self->links;
    if (links == NULL || zs_c10d_is_forked(&self->c10d)) return; /* waits for the parent's threads would not end */
    zs_hosts_links_stop(self, "the transport has ended");
    for (int i = 0; i < links->n; i++)
        if (links->lanes[i].fd >= 0) close(links->lanes[i].fd);
    pthread_mutex_destroy(&links->lock);
    pthread_cond_destroy(&links->changed);
    free(links);
    self->links = NULL;
}

static zs_status start_thread(lane *it)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the script's threads */
    int error = pthread_create(&it->thread, NULL, run, it);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    it->runs = error == 0;
    if (it->runs) (void)pthread_setname_np(it->thread, it->way == OUT ? "zshard_send" : "zshard_receive");
    return error == 0 ? ZS_OK
                      : ZS_FAIL(ZS_ERR_MEMORY, "cannot start a thread that sends to other hosts (%s)", strerror(error));
}

/* A copy of the socket, whose owner closes its own. */
static zs_status start_lane(lane *it, int fd)
{
    it->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (it->fd < 0) return ZS_FAIL(ZS_ERR_SYSTEM, "cannot keep a connection to another host (%s)", strerror(errno));
    int on = 1;
    (void)setsockopt(it->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return start_thread(it);
}

zs_status zs_hosts_links_new(zs_hosts_comm *self, const int *fds)
{
    size_t lanes = 2 * (size_t)self->hosts;
    struct links *links = calloc(1, sizeof *links + lanes * sizeof(lane));
    if (links == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the hosts transport");
    zs_clock_condition(&links->changed);
    pthread_mutex_init(&links->lock, NULL);
    links->n = (int)lanes;
    self->links = links;
    for (size_t i = 0; i < lanes; i++)
        links->lanes[i] = (lane){.all = links, .fd = -1, .way = (int)(i % 2)};
    for (size_t i = 0; i < lanes; i++)
        if (fds[i] >= 0) ZS_TRY(start_lane(&links->lanes[i], fds[i]));
    return ZS_OK;
}
