/* shm_link.c - see shm_link.h. */
#define _GNU_SOURCE 1 /* struct ucred, accept4 */
#include "comm/shm/shm_link.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static const char magic[8] = "zshard1";

/* The message; the descriptors ride beside it. */
typedef struct hello {
    char magic[8];
    uint64_t layout;
    int32_t rank, world, pid;
    unsigned char token[ZS_LINK_TOKEN];
} hello;

/* Control data of one message. */
typedef union ancillary {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(ZS_LINK_FDS * sizeof(int))];
} ancillary;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static socklen_t abstract_name(const char *address, struct sockaddr_un *name)
{
    size_t length = strnlen(address, sizeof name->sun_path - 1);
    *name = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(name->sun_path + 1, address, length); /* a leading zero byte makes it abstract: no file, gone with us */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

zs_status zs_link_listen(char *address, size_t size, int *fd)
{
    unsigned char random[12];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) return ZS_FAIL_ERRNO("getrandom");
    int length = snprintf(address, size, "zshard-");
    for (size_t i = 0; i < sizeof random; i++)
        length += snprintf(address + length, size - (size_t)length, "%02x", random[i]);

    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0) return ZS_FAIL_ERRNO("socket");
    struct sockaddr_un name;
    socklen_t bytes = abstract_name(address, &name);
    if (bind(listener, (struct sockaddr *)&name, bytes) != 0 || listen(listener, SOMAXCONN) != 0) {
        zs_status status = ZS_FAIL_ERRNO("cannot listen on an abstract Unix socket");
        close(listener);
        return status;
    }
    *fd = listener;
    return ZS_OK;
}

/* --- one connection --------------------------------------------------------------------------------------------------- */

/* Waits until `fd` can be read; false at `deadline`. */
static bool readable(int fd, double deadline)
{
    for (;;) {
        double left = deadline - now();
        struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
        int got = poll(&poll_fd, 1, left <= 0 ? 0 : (int)(left * 1e3) + 1);
        if (got > 0) return true;
        if (got == 0 || errno != EINTR) return false;
    }
}

/* Only processes of our own user are let in: they get descriptors of our memory. */
static bool same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

static zs_status send_hello(const zs_link *link, const zs_link_party *self, int fd)
{
    hello message = {.layout = link->layout, .rank = link->rank, .world = link->world, .pid = (int32_t)self->pid};
    memcpy(message.magic, magic, sizeof magic);
    memcpy(message.token, link->token, sizeof message.token);
    struct iovec data = {&message, sizeof message};
    ancillary control;
    memset(&control, 0, sizeof control);
    struct msghdr header = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof self->fds);
    memcpy(CMSG_DATA(rights), self->fds, sizeof self->fds);
    if (sendmsg(fd, &header, MSG_NOSIGNAL) < 0)
        return ZS_FAIL(
            ZS_ERR_UNSUPPORTED,
            "rank %d cannot share its memory with another rank (%s): the peer closed the connection; run all ranks "
            "of a group as one user with one build of zshard",
            link->rank, strerror(errno));
    return ZS_OK;
}

static void close_party(zs_link_party *party)
{
    for (int i = 0; i < ZS_LINK_FDS; i++) {
        if (party->fds[i] >= 0) close(party->fds[i]);
        party->fds[i] = -1;
    }
}

/* Takes the descriptors out of a received message; false (and all closed) unless there are exactly ours. */
static bool take_descriptors(struct msghdr *header, zs_link_party *party)
{
    struct cmsghdr *rights = CMSG_FIRSTHDR(header);
    if (rights == NULL || rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) return false;
    size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    int got[ZS_LINK_FDS];
    if (count > ZS_LINK_FDS) count = ZS_LINK_FDS; /* the buffer holds no more: the kernel has dropped the rest */
    memcpy(got, CMSG_DATA(rights), count * sizeof(int));
    for (size_t i = 0; i < count; i++)
        party->fds[i] = got[i];
    if (count == ZS_LINK_FDS) return true;
    close_party(party);
    return false;
}

/* Receives one hello. False for whatever is not one of ours; then nothing is left open. */
static bool receive_hello(const zs_link *link, int fd, int *rank, zs_link_party *party)
{
    hello message = {.rank = -1};
    struct iovec data = {&message, sizeof message};
    ancillary control;
    struct msghdr header = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    for (int i = 0; i < ZS_LINK_FDS; i++)
        party->fds[i] = -1;
    ssize_t length = recvmsg(fd, &header, MSG_CMSG_CLOEXEC);
    if (length <= 0 || !take_descriptors(&header, party)) return false;
    bool ours = length == (ssize_t)sizeof message && same_user(fd) && memcmp(message.magic, magic, sizeof magic) == 0 &&
                memcmp(message.token, link->token, sizeof message.token) == 0 && message.world == link->world &&
                message.layout == link->layout && message.rank >= 0 && message.rank < link->world;
    if (!ours) {
        close_party(party);
        return false;
    }
    *rank = message.rank;
    party->pid = message.pid;
    return true;
}

/* --- the meeting ------------------------------------------------------------------------------------------------------ */

static zs_status call_rank(const zs_link *link, int rank, double deadline, int *fd)
{
    int line = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (line < 0) return ZS_FAIL_ERRNO("socket");
    struct sockaddr_un name;
    socklen_t bytes = abstract_name(link->addresses[rank], &name);
    while (connect(line, (struct sockaddr *)&name, bytes) != 0) {
        bool busy = errno == EAGAIN || errno == EINTR; /* the other's queue is full: it will get to us */
        if (busy && now() < deadline) {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            continue;
        }
        zs_status status =
            ZS_FAIL(ZS_ERR_UNSUPPORTED,
                    "rank %d cannot connect to rank %d over shared memory (%s): they run on different hosts "
                    "or in different network namespaces",
                    link->rank, rank, strerror(errno));
        close(line);
        return status;
    }
    *fd = line;
    return ZS_OK;
}

/* Accepts one connection and answers it, if it is a peer's; strangers are hung up on. */
static zs_status answer_one(const zs_link *link, zs_link_party *parties, double deadline, int *answered)
{
    if (!readable(link->listener, deadline))
        return ZS_FAIL(
            ZS_ERR_UNSUPPORTED,
            "rank %d got a connection from %d of %d higher ranks within %.0f s: the others failed to start or "
            "cannot reach it over shared memory",
            link->rank, *answered, link->world - 1 - link->rank, link->seconds);
    int line = accept4(link->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (line < 0) return ZS_OK; /* it hung up meanwhile */
    double patience = now() + 2.0;
    int rank = -1;
    zs_link_party party = {0};
    zs_status status = ZS_OK;
    if (same_user(line) && readable(line, patience < deadline ? patience : deadline) &&
        receive_hello(link, line, &rank, &party)) {
        if (rank > link->rank && parties[rank].fds[0] < 0) {
            parties[rank] = party;
            (*answered)++;
            status = send_hello(link, &parties[link->rank], line);
        } else {
            close_party(&party);
        }
    }
    close(line);
    return status;
}

/* The answers of the ranks that were called. */
static zs_status hear_answers(const zs_link *link, zs_link_party *parties, const int *lines, double deadline)
{
    for (int r = 0; r < link->rank; r++) {
        int rank = -1;
        if (!readable(lines[r], deadline) || !receive_hello(link, lines[r], &rank, &parties[r]) || rank != r) {
            close_party(&parties[r]);
            return ZS_FAIL(
                ZS_ERR_UNSUPPORTED,
                "rank %d got no answer from rank %d over the shared-memory socket within %.0f s: rank %d failed, "
                "runs as another user, or uses another build of zshard",
                link->rank, r, link->seconds, r);
        }
    }
    return ZS_OK;
}

static zs_status meet(const zs_link *link, zs_link_party *parties, int *lines, double deadline)
{
    for (int r = 0; r < link->rank; r++) {
        ZS_TRY(call_rank(link, r, deadline, &lines[r]));
        if (!same_user(lines[r]))
            return ZS_FAIL(ZS_ERR_UNSUPPORTED, "ranks %d and %d cannot share memory: they run as different users", r,
                           link->rank);
        ZS_TRY(send_hello(link, &parties[link->rank], lines[r]));
    }
    /* Everybody calls before answering, so nobody waits in a circle. */
    for (int answered = 0; answered < link->world - 1 - link->rank;)
        ZS_TRY(answer_one(link, parties, deadline, &answered));
    return hear_answers(link, parties, lines, deadline);
}

zs_status zs_link_meet(const zs_link *link, zs_link_party *parties)
{
    int *lines = malloc((size_t)link->world * sizeof *lines);
    if (lines == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating %d connections", link->world);
    for (int r = 0; r < link->world; r++) {
        lines[r] = -1;
        if (r == link->rank) continue;
        for (int i = 0; i < ZS_LINK_FDS; i++)
            parties[r].fds[i] = -1;
    }
    zs_status status = meet(link, parties, lines, now() + link->seconds);
    for (int r = 0; r < link->world; r++) {
        if (lines[r] >= 0) close(lines[r]);
        if (status != ZS_OK && r != link->rank) close_party(&parties[r]);
    }
    free(lines);
    return status;
}
