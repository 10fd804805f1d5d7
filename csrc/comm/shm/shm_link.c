/* shm_link.c - see shm_link.h. */
#define _GNU_SOURCE 1 /* struct ucred, accept4 */
#include "comm/shm/shm_link.h"

#include "base/clock.h"

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

static const char magic[8] = "zshard2";

/* The message; it carries the descriptors. */
typedef struct hello {
    char magic[8];
    uint64_t layout;
    int32_t rank, world, pid;
    unsigned char token[ZS_LINK_TOKEN];
} hello;

/* One rank's connections to all others. */
typedef struct meeting {
    const zs_link *link;
    bool *known;     /* [world] is connected */
    double deadline; /* for the next of them */
} meeting;

/* Control data of one message. */
typedef union ancillary {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(ZS_LINK_FDS * sizeof(int))];
} ancillary;

static socklen_t abstract_name(const char *address, struct sockaddr_un *name)
{
    size_t length = strnlen(address, sizeof name->sun_path - 1);
    *name = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(name->sun_path + 1, address,
           length); /* a leading zero byte makes it abstract: no file, freed with the process */
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

/* --- one connection ----------------------------------------------------------------------------------------------- */

/* Waits until `fd` can be read; false at `deadline`. */
static bool readable(int fd, double deadline)
{
    for (;;) {
        double left = deadline - zs_clock();
        struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
        int got = poll(&poll_fd, 1, left <= 0 ? 0 : (int)(left * 1e3) + 1);
        if (got > 0) return true;
        if (got == 0 || errno != EINTR) return false;
    }
}

/* Accepts only processes of our own user: they get descriptors of our memory. */
static bool same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

/* Number of descriptors that rank `rank` sends. */
static size_t given_by(int rank)
{
    return rank == 0 ? ZS_LINK_FDS : ZS_LINK_FLATS;
}

/* Sends; waits while the user has too many descriptors in flight. errno: why it failed. */
static bool send_out(int fd, const struct msghdr *header, double deadline)
{
    while (sendmsg(fd, header, MSG_NOSIGNAL) < 0) {
        int err = errno;
        bool later = err == ETOOMANYREFS || err == EINTR;
        if (!later || zs_clock() > deadline) {
            errno = err;
            return false;
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return true;
}

static zs_status fail_to_send(const zs_link *link)
{
    if (errno == ETOOMANYREFS)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "rank %d cannot share its memory with another rank within %.0f s: processes of this user have "
                       "sent more file "
                       "descriptors to each other than one may have open; raise the limit (ulimit -n), or run fewer "
                       "jobs at a time",
                       link->rank, link->seconds);
    return ZS_FAIL(
        ZS_ERR_UNSUPPORTED,
        "rank %d cannot share its memory with another rank (%s): the peer closed the connection; run all ranks "
        "of a group as one user with one build of zshard",
        link->rank, strerror(errno));
}

/* Identifies this rank; with its descriptors, or as a greeting without. */
static zs_status send_hello(const meeting *here, bool with_descriptors, int fd)
{
    const zs_link *link = here->link;
    const zs_link_party *self = &link->party;
    hello message = {.layout = link->layout, .rank = link->rank, .world = link->world, .pid = (int32_t)self->pid};
    memcpy(message.magic, magic, sizeof magic);
    memcpy(message.token, link->token, sizeof message.token);
    struct iovec data = {&message, sizeof message};
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1};
    ancillary control;
    memset(&control, 0, sizeof control);
    if (with_descriptors) {
        size_t bytes = given_by(link->rank) * sizeof(int);
        header.msg_control = control.bytes;
        header.msg_controllen = CMSG_SPACE(bytes);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(bytes);
        memcpy(CMSG_DATA(rights), self->fds, bytes);
    }
    return send_out(fd, &header, here->deadline) ? ZS_OK : fail_to_send(link);
}

static void close_party(zs_link_party *party)
{
    for (int i = 0; i < ZS_LINK_FDS; i++) {
        if (party->fds[i] >= 0) close(party->fds[i]);
        party->fds[i] = -1;
    }
}

/* Takes the descriptors out of a received message; returns how many there were. */
static size_t take_descriptors(struct msghdr *header, zs_link_party *party)
{
    for (int i = 0; i < ZS_LINK_FDS; i++)
        party->fds[i] = -1;
    struct cmsghdr *rights = CMSG_FIRSTHDR(header);
    if (rights == NULL || rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) return 0;
    size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    if (count > ZS_LINK_FDS) count = ZS_LINK_FDS; /* the buffer holds no more: the kernel dropped the rest */
    memcpy(party->fds, CMSG_DATA(rights), count * sizeof(int));
    return count;
}

/* A line's message. */
typedef enum received { STRANGER, CUT_SHORT, GREETING, PARTY } received;

static bool is_ours(const zs_link *link, const hello *message)
{
    return memcmp(message->magic, magic, sizeof magic) == 0 &&
           memcmp(message->token, link->token, sizeof message->token) == 0 && message->world == link->world &&
           message->layout == link->layout && message->rank >= 0 && message->rank < link->world;
}

/* Receives one hello. Only a PARTY leaves anything open. CUT_SHORT: this process cannot have that many descriptors. */
static received receive_hello(const zs_link *link, int fd, int *rank, zs_link_party *party)
{
    hello message = {.rank = -1};
    struct iovec data = {&message, sizeof message};
    ancillary control;
    struct msghdr header = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t length = recvmsg(fd, &header, MSG_CMSG_CLOEXEC);
    if (length <= 0) return STRANGER;
    size_t count = take_descriptors(&header, party);
    bool ours = length == (ssize_t)sizeof message && same_user(fd) && is_ours(link, &message);
    bool complete = ours && count == given_by(message.rank);
    if (!complete) close_party(party);
    *rank = message.rank;
    party->pid = message.pid;
    if (!ours) return STRANGER;
    if (complete) return PARTY;
    return header.msg_flags & MSG_CTRUNC ? CUT_SHORT : count == 0 ? GREETING : STRANGER;
}

/* --- the meeting -------------------------------------------------------------------------------------------------- */

/* One more is connected: restarts the deadline for the others. */
static zs_status met(meeting *here, int rank, const zs_link_party *party)
{
    here->known[rank] = true;
    here->deadline = zs_clock() + here->link->seconds;
    return here->link->adopt(here->link->arg, rank, party);
}

static zs_status fail_short_of_descriptors(const zs_link *link, int rank)
{
    return ZS_FAIL(
        ZS_ERR_UNSUPPORTED,
        "rank %d cannot receive the file descriptors of rank %d: it has as many open as the limit allows; raise "
        "it (ulimit -n)",
        link->rank, rank);
}

static zs_status call_rank(const meeting *here, int rank, int *fd)
{
    const zs_link *link = here->link;
    int line = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (line < 0) return ZS_FAIL_ERRNO("socket");
    struct sockaddr_un name;
    socklen_t bytes = abstract_name(link->addresses[rank], &name);
    while (connect(line, (struct sockaddr *)&name, bytes) != 0) {
        bool busy = errno == EAGAIN || errno == EINTR; /* the other's queue is full: it will reach us */
        if (busy && zs_clock() < here->deadline) {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            continue;
        }
        zs_status status =
            ZS_FAIL(ZS_ERR_UNSUPPORTED,
                    "rank %d cannot connect to rank %d over shared memory (%s): they run on different hosts "
                    "or in different network namespaces (start them in one container), or rank %d failed",
                    link->rank, rank, strerror(errno), rank);
        close(line);
        return status;
    }
    *fd = line;
    return ZS_OK;
}

/* The caller's part, on a line to rank `rank`. */
static zs_status introduce(meeting *here, int line, int rank)
{
    const zs_link *link = here->link;
    zs_link_party party;
    int who = -1;
    if (!same_user(line))
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "ranks %d and %d cannot share memory: they run as different users; start them as one", rank,
                       link->rank);
    ZS_TRY(send_hello(here, false, line));
    received what = readable(line, here->deadline) ? receive_hello(link, line, &who, &party) : STRANGER;
    if (what == CUT_SHORT) return fail_short_of_descriptors(link, rank);
    if (what != PARTY || who != rank) {
        if (what == PARTY) close_party(&party);
        return ZS_FAIL(
            ZS_ERR_UNSUPPORTED,
            "rank %d got no answer from rank %d over the shared-memory socket within %.0f s: rank %d failed, "
            "runs as another user, or uses another build of zshard",
            link->rank, rank, link->seconds, rank);
    }
    zs_status status = send_hello(here, true, line); /* first: the other waits for it */
    zs_status adopted = met(here, rank, &party);
    return status == ZS_OK ? adopted : status;
}

/* The answerer's part, on a line that another process has opened; closes it for strangers. */
static zs_status answer(meeting *here, int line, int *answered)
{
    const zs_link *link = here->link;
    double patience = zs_clock() + 2.0;
    if (patience > here->deadline) patience = here->deadline;
    zs_link_party party;
    int rank = -1, again = -1;
    if (!same_user(line) || !readable(line, patience)) return ZS_OK;
    received what = receive_hello(link, line, &rank, &party);
    if (what == PARTY) close_party(&party);
    if (what != GREETING || rank <= link->rank || here->known[rank]) return ZS_OK;
    ZS_TRY(send_hello(here, true, line));
    what = readable(line, here->deadline) ? receive_hello(link, line, &again, &party) : STRANGER;
    if (what == CUT_SHORT) return fail_short_of_descriptors(link, rank);
    if (what != PARTY || again != rank) {
        if (what == PARTY) close_party(&party);
        return ZS_FAIL(ZS_ERR_UNSUPPORTED, "rank %d got no file descriptors from rank %d: rank %d failed", link->rank,
                       rank, rank);
    }
    (*answered)++;
    return met(here, rank, &party);
}

static zs_status answer_one(meeting *here, int *answered)
{
    const zs_link *link = here->link;
    if (!readable(link->listener, here->deadline) || zs_clock() > here->deadline)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "rank %d got a connection from %d of %d higher ranks, and from no other within %.0f s: the "
                       "others failed to "
                       "start or cannot reach it over shared memory",
                       link->rank, *answered, link->world - 1 - link->rank, link->seconds);
    int line = accept4(link->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (line < 0)
        return errno == EMFILE || errno == ENFILE ? ZS_FAIL_ERRNO("accept") : ZS_OK; /* it hung up meanwhile */
    zs_status status = answer(here, line, answered);
    close(line);
    return status;
}

static zs_status meet(meeting *here)
{
    const zs_link *link = here->link;
    for (int r = 0; r < link->rank; r++) {
        int line = -1;
        ZS_TRY(call_rank(here, r, &line));
        zs_status status = introduce(here, line, r);
        close(line);
        if (status != ZS_OK) return status;
    }
    for (int answered = 0; answered < link->world - 1 - link->rank;)
        ZS_TRY(answer_one(here, &answered));
    return ZS_OK;
}

zs_status zs_link_connect(const zs_link *link)
{
    bool *known = calloc((size_t)link->world, sizeof *known);
    if (known == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating connections to %d ranks", link->world);
    meeting here = {link, known, zs_clock() + link->seconds};
    zs_status status = meet(&here);
    free(known);
    return status;
}
