/* shm_state.c - optimizer state that peers may read: it lies in the file of this rank's buckets.
 *
 * A rank posts a text (optim/shared_state.py) that says where each tensor lies, and replaces it as a whole. Texts
 * and tensors are copied out of the file by pread, so no mapping is needed, and a rank that has exited is read like any
 * other. See shm.h. */
#define _GNU_SOURCE 1 /* fallocate, pread */
#include "comm/shm/shm.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static zs_status state_new(zs_comm *comm, size_t bytes, zs_mem **out)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    return zs_file_map_own(shm->buckets, zs_round_up(bytes ? bytes : 1, ZS_PAGE), out);
}

static bool state_offset(const zs_comm *comm, const zs_mem *mem, uint64_t *offset)
{
    const zs_shm *shm = (const zs_shm *)comm;
    if (!zs_file_holds(shm->buckets, mem)) return false;
    *offset = zs_file_offset_of(mem);
    return true;
}

static int file_of(const zs_shm *shm, int rank)
{
    return rank == shm->base.rank ? zs_file_fd(shm->buckets) : shm->peers[rank].buckets;
}

static zs_status read_at(const zs_shm *shm, int rank, uint64_t offset, char *to, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        ssize_t got = pread(file_of(shm, rank), to + at, bytes - at, (off_t)(offset + at));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return ZS_FAIL_ERRNO("cannot read the memory of another rank");
        if (got == 0)
            return ZS_FAIL(ZS_ERR_STATE, "the memory of rank %d ends before what it posted; please report this", rank);
        at += (size_t)got;
    }
    return ZS_OK;
}

static zs_status state_read(zs_comm *comm, int rank, uint64_t offset, void *to, size_t bytes)
{
    ZS_TRY(zs_check_root(comm, rank));
    return read_at((const zs_shm *)comm, rank, offset, to, bytes);
}

static bool left(const zs_comm *comm, int rank)
{
    return atomic_load(&((const zs_shm *)comm)->peers[rank].control->left) != 0;
}

/* --- the text ----------------------------------------------------------------------------------------------------- */

static zs_status write_at(int fd, uint64_t offset, const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        ssize_t put = pwrite(fd, from + at, bytes - at, (off_t)(offset + at));
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return ZS_FAIL_ERRNO("cannot write to shared memory");
        at += (size_t)put;
    }
    return ZS_OK;
}

/* The text never lies where another one did, as a file only grows: a reader that was overtaken finds another number
 * than before. */
static zs_status post(zs_comm *comm, const void *text, size_t bytes)
{
    zs_shm *shm = (zs_shm *)comm;
    zs_shm_control *own = shm->own;
    ZS_TRY(zs_shm_usable(shm));
    uint64_t offset = 0, before = atomic_load(&own->post_at), number = atomic_load(&own->post_number);
    size_t room = zs_round_up(bytes ? bytes : 1, ZS_PAGE);
    size_t old = zs_round_up((size_t)atomic_load(&own->post_bytes), ZS_PAGE);
    int fd = zs_file_fd(shm->buckets);
    ZS_TRY(zs_file_append(shm->buckets, room, room, &offset));
    ZS_TRY(write_at(fd, offset, text, bytes));
    atomic_store(&own->post_number, number + 1); /* odd: it changes */
    atomic_store(&own->post_at, offset);
    atomic_store(&own->post_bytes, bytes);
    atomic_store(&own->post_number, number + 2);
    if (old > 0) fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)before, (off_t)old);
    return ZS_OK;
}

/* Will it post no more? */
static bool has_ended(const zs_shm *shm, int rank)
{
    struct pollfd process = {.fd = shm->peers[rank].pidfd, .events = POLLIN}; /* -1, of this rank, never is ready */
    return poll(&process, 1, 0) > 0;
}

static zs_status posted(zs_comm *comm, int rank, char **text, size_t *bytes)
{
    const zs_shm *shm = (const zs_shm *)comm;
    ZS_TRY(zs_check_root(comm, rank));
    const zs_shm_control *from = shm->peers[rank].control;
    for (;;) {
        bool ended = has_ended(shm, rank); /* before the number, which then is the last one */
        uint64_t number = atomic_load(&from->post_number);
        uint64_t at = atomic_load(&from->post_at);
        *bytes = (size_t)atomic_load(&from->post_bytes);
        if (number % 2 == 0 && number == atomic_load(&from->post_number)) {
            *text = malloc(*bytes + 1);
            if (*text == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory reading what rank %d posted", rank);
            zs_status status = read_at(shm, rank, at, *text, *bytes);
            bool current = number == atomic_load(&from->post_number);
            if (status == ZS_OK && current) return ZS_OK;
            free(*text);
            if (current) return status;
        } else if (ended) {
            return ZS_FAIL(ZS_ERR_PEER,
                           "rank %d (pid %d) died while it published its optimizer state, which is lost: load a "
                           "checkpoint; see the output of rank %d for the cause",
                           rank, (int)shm->peers[rank].pid, rank);
        }
    }
}

const zs_state_ops zs_shm_state = {
    .state_new = state_new,
    .state_offset = state_offset,
    .post = post,
    .posted = posted,
    .left = left,
    .read = state_read,
};
