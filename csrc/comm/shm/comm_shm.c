/* comm_shm.c - the transport for ranks on one host: all ranks map all ranks' memory.
 *
 * A gather moves nothing. In one file of memory that all ranks share, the shards of a flat are side by side, and the
 * mapping of that file is the full buffer. A reduction reads the peers' buckets in place. Only the time of reading must
 * be agreed on: shm_reader.c (shards), shm_round.c (gradients).
 *
 *   shm_needs.c    a rank's needs of the system    shm_missing.c  which ranks a wait still misses
 *   shm_link.c     connections between ranks       shm_wake.c     sleeping, and waking others
 *   shm.c          published words and texts       shm_wait.c     deadlines, dead peers
 *   shm_place.c    places of the ranks' scripts    shm_report.c   the texts of messages
 */
#define _GNU_SOURCE 1 /* sched_getaffinity, syscall */
#include "comm/shm/shm.h"
#include "comm/shm/shm_link.h"
#include "comm/shm/shm_place.h"
#include "comm/shm/shm_reader.h"
#include "comm/where.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* the same on all architectures; older kernel headers lack it */
#endif

/* Raised when zs_shm_control or its protocol changes: ranks of different builds must not connect. */
static const uint64_t protocol = 8;

/* A rank's patience with each next peer; it connects to them one after the other. */
static const double meeting_seconds = 10.0, meeting_seconds_per_rank = 0.1;

/* --- memory ------------------------------------------------------------------------------------------------------- */

static zs_status shm_bucket_new(zs_comm *comm, size_t bytes, zs_bucket *out)
{
    zs_shm *shm = (zs_shm *)comm;
    zs_region region;
    ZS_TRY(zs_shm_usable(shm));
    ZS_TRY(zs_file_map_bucket(shm->buckets, bytes, &region, &out->mem));
    out->ptr = out->mem->ptr;
    out->bytes = region.bytes;
    out->key = region.index;
    return ZS_OK;
}

static zs_status shm_usable(zs_comm *comm)
{
    return zs_shm_usable((zs_shm *)comm);
}

/* The control block, including the records in its heap. (Mappings of the peers' memory count as theirs.) */
static size_t shm_bytes(const zs_comm *comm)
{
    return offsetof(zs_shm_control, heap) + ((const zs_shm *)comm)->heap_used;
}

static zs_room shm_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    (void)comm;
    if (spec == NULL)
        return (zs_room){.fixed =
                             offsetof(zs_shm_control, heap) + zs_round_up(sizeof(zs_shm_reader_record), ZS_SHM_LINE)};
    return (zs_room){.record =
                         zs_round_up(zs_shm_unit_record_bytes(zs_round_header_bytes(spec->n_params)), ZS_SHM_LINE)};
}

/* --- small collectives -------------------------------------------------------------------------------------------- */

/* For the peers' messages. */
static void name_call(zs_shm *shm)
{
    snprintf(shm->own->doing, sizeof shm->own->doing, "%s", zs_call_name());
}

/* A rank has left out a broadcast, perhaps because it failed before. From here on all have the same number of pieces: a
 * rank would take an old piece for the next one. */
static void catch_up(zs_shm *shm, zs_shm_act act)
{
    for (int r = 0; r < shm->base.world; r++) {
        const zs_shm_mailbox *from = &shm->peers[r].control->mail[act.number % 2];
        if (from->pieces > shm->pieces) shm->pieces = from->pieces;
    }
    zs_shm_set(shm, &shm->own->taken, shm->pieces);
}

static zs_status shm_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    ZS_TRY(zs_check_exchange(bytes));
    /* Two boxes suffice: to reach exchange n + 2 a peer needs our n + 1, which we send after reading its n. */
    zs_shm_act act = zs_shm_act_make(ZS_SHM_EXCHANGED, 0, ++shm->exchanges);
    zs_shm_mailbox *box = &shm->own->mail[act.number % 2];
    box->bytes = bytes;
    box->pieces = shm->pieces;
    snprintf(box->call, sizeof box->call, "%s", zs_call_name());
    memcpy(box->data, mine, bytes);
    name_call(shm);
    zs_shm_note(shm, act);
    zs_shm_set(shm, &shm->own->exchanged, act.number);
    ZS_TRY(zs_shm_wait(shm, act));
    int apart = -1;
    for (int r = 0; r < comm->world; r++) {
        const zs_shm_mailbox *from = &shm->peers[r].control->mail[act.number % 2];
        bool same = from->bytes == bytes && from->pieces == box->pieces && strcmp(from->call, box->call) == 0;
        if (!same && apart < 0) apart = r;
        if (apart < 0) memcpy((char *)all + (size_t)r * bytes, from->data, bytes);
    }
    if (apart < 0) return ZS_OK;
    catch_up(shm, act);
    return zs_comm_locate(comm, zs_shm_fail_apart(shm, act, apart));
}

/* The root's part of one piece: fills a free half of its stage while the peers empty the other. */
static zs_status send_piece(zs_shm *shm, const char *data, size_t bytes, size_t left)
{
    uint64_t piece = shm->pieces;
    if (piece > 2) ZS_TRY(zs_shm_wait(shm, zs_shm_act_make(ZS_SHM_TAKEN, 0, piece - 2)));
    memcpy(shm->own->stage[piece % 2], data, bytes);
    shm->own->sent_bytes[piece % 2] = left;
    snprintf(shm->own->sent_call[piece % 2], ZS_CALL, "%s", zs_call_name());
    zs_shm_note(shm, zs_shm_act_make(ZS_SHM_SENT, (uint32_t)shm->base.rank, piece));
    zs_shm_set(shm, &shm->own->sent, piece);
    zs_shm_set(shm, &shm->own->taken, piece); /* so that the next root, whichever it is, does not miss us */
    return ZS_OK;
}

static zs_status take_piece(zs_shm *shm, char *data, size_t bytes, size_t left, int root)
{
    zs_shm_act act = zs_shm_act_make(ZS_SHM_SENT, (uint32_t)root, shm->pieces);
    const zs_shm_control *from = shm->peers[root].control;
    ZS_TRY(zs_shm_wait(shm, act));
    const char *call = from->sent_call[act.number % 2];
    if (strcmp(call, zs_call_name()) != 0) return zs_shm_fail_calls(shm, zs_call_name(), root, call);
    if (from->sent_bytes[act.number % 2] != left)
        return ZS_FAIL(
            ZS_ERR_DIVERGED,
            "ranks diverged in a broadcast: rank %d expected %zu more bytes, but root %d sent %llu; run the same "
            "collectives on all ranks",
            shm->base.rank, left, root, (unsigned long long)from->sent_bytes[act.number % 2]);
    memcpy(data, from->stage[act.number % 2], bytes);
    zs_shm_note(shm, zs_shm_act_make(ZS_SHM_TAKEN, 0, act.number));
    zs_shm_set(shm, &shm->own->taken, act.number);
    return ZS_OK;
}

static zs_status shm_broadcast(zs_comm *comm, void *data, size_t bytes, int root)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    ZS_TRY(zs_check_root(comm, root));
    name_call(shm);
    for (size_t at = 0; at < bytes; at += ZS_SHM_STAGE) {
        size_t left = bytes - at, piece = left < ZS_SHM_STAGE ? left : (size_t)ZS_SHM_STAGE;
        shm->pieces++;
        if (root == comm->rank)
            ZS_TRY(send_piece(shm, (char *)data + at, piece, left));
        else
            ZS_TRY(zs_comm_locate(comm, take_piece(shm, (char *)data + at, piece, left, root)));
    }
    return ZS_OK;
}

/* --- birth and end ------------------------------------------------------------------------------------------------ */

static void shm_abort(zs_comm *comm, const char *reason)
{
    zs_shm *shm = (zs_shm *)comm;
    if (zs_shm_live(shm)) zs_shm_stop(shm, ZS_ERR_PEER, reason);
}

static zs_status shm_check_peers(zs_comm *comm)
{
    zs_shm *shm = (zs_shm *)comm;
    return zs_shm_live(shm) ? zs_shm_check_stop(shm) : ZS_OK;
}

static bool shm_is_stopped(const zs_comm *comm)
{
    const zs_shm *shm = (const zs_shm *)comm;
    bool any = false;
    for (int r = 0; zs_shm_live(shm) && r < comm->world; r++) {
        const zs_shm_control *peer = shm->peers[r].control;
        bool stopped = atomic_load(&peer->stopped) != 0;
        if (stopped && (atomic_load(&peer->left) != 0 || shm->peers[r].dead)) return false;
        any |= stopped;
    }
    return any;
}

static zs_status shm_end(zs_comm *comm, zs_fingerprint *fingerprints, bool *all)
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm)) return ZS_OK;
    shm->own->fingerprint = comm->fingerprint;
    atomic_store(&shm->own->ended, 1);
    *all = true;
    for (int r = 0; r < comm->world && *all; r++) {
        *all = atomic_load(&shm->peers[r].control->ended) != 0;
        if (*all) fingerprints[r] = shm->peers[r].control->fingerprint;
    }
    return ZS_OK;
}

static void shm_close(zs_comm *comm)
{
    zs_shm *shm = (zs_shm *)comm;
    if (shm->closed || shm->lifetime != zs_lifetime()) return; /* a forked child leaves no group */
    shm->closed = true;
    zs_shm_flats_end(shm);
    if (!shm->connected) return;
    zs_file_keep(shm->buckets); /* peers may read optimizer state that this rank frees from now on, as it exits */
    atomic_store(&shm->own->left, 1);
    zs_shm_wake_all(shm);
}

static void close_fd(int fd)
{
    if (fd >= 0) close(fd);
}

static void forget_peer(zs_shm_peer *peer)
{
    for (size_t i = 0; i < peer->n_views; i++)
        if (peer->views[i].ptr != NULL) munmap(peer->views[i].ptr, peer->views[i].bytes);
    free(peer->views);
    if (peer->control != NULL) munmap(peer->control, sizeof *peer->control);
    close_fd(peer->pidfd);
    close_fd(peer->buckets);
}

static void shm_destroy(zs_comm *comm)
{
    zs_shm *shm = (zs_shm *)comm;
    zs_shm_flats_end(shm); /* a flat that another thread frees meanwhile reads what peers publish */
    for (int r = 0; r < comm->world && shm->peers != NULL; r++)
        forget_peer(&shm->peers[r]);
    close_fd(shm->listener);
    close_fd(shm->control_fd);
    close_fd(shm->pidfd);
    close_fd(shm->flats_fd);
    zs_file_release(shm->flats);
    zs_file_release(shm->buckets);
    free(shm->flat_offsets);
    free(shm->peers);
    free(shm->polls);
    free(shm);
}

static const zs_flat_ops shm_flats = {
    .flat_new = zs_shm_flat_new,
    .flat_free = zs_local_flat_free,
    .numbers = zs_shm_numbers,
    .continue_from = zs_shm_continue_from,
};

static const zs_round_ops shm_rounds = {
    .bucket_new = shm_bucket_new,
    .bucket_free = zs_local_bucket_free,
    .bucket_room = zs_file_bucket_room,
    .unit_bytes = sizeof(zs_shm_unit),
    .unit_init = zs_shm_unit_init,
    .renamed = zs_shm_renamed,
    .usable = shm_usable,
    .send = zs_shm_send,
    .arrive = zs_shm_arrive,
    .share = zs_shm_share,
    .arrive_shared = zs_shm_arrive_shared,
    .release = zs_shm_release,
    .reusable = zs_shm_reusable,
    .room = shm_room,
};

static const zs_reader_ops shm_readers = {
    .reader_new = zs_shm_reader_new,
    .reader_free = zs_shm_reader_free,
    .read_begin = zs_shm_read_begin,
    .read_end = zs_shm_read_end,
    .write_begin = zs_shm_write_begin,
    .write_end = zs_shm_write_end,
    .write_complete = zs_shm_write_complete,
    .meet = zs_shm_readers_barrier,
    .publish_fingerprint = zs_shm_publish_fingerprint,
};

static const zs_talk_ops shm_talk = {
    .exchange = shm_exchange,
    .broadcast = shm_broadcast,
    .publish = zs_shm_publish_text,
    .published = zs_shm_published_text,
    .locate = zs_shm_locate,
    .asked = zs_shm_asked,
    .answer = zs_shm_answer_with,
    .is_stopped = shm_is_stopped,
    .outlive = zs_shm_outlive,
    .end = shm_end,
    .abort = shm_abort,
    .check_peers = shm_check_peers,
};

const zs_comm_ops zs_shm_ops = {
    .name = "shm",
    .shard_align = ZS_PAGE,
    .mapped = true,
    .flats = &shm_flats,
    .rounds = &shm_rounds,
    .readers = &shm_readers,
    .talk = &shm_talk,
    .state = &zs_shm_state,
    .bytes = shm_bytes,
    .close = shm_close,
    .destroy = shm_destroy,
};

/* Checks before a wait sleeps: none if ranks share cores, since checking would keep the other rank from working. */
static int choose_spins(int world)
{
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) return 0;
    return CPU_COUNT(&cpus) >= world ? 2000 : 0;
}

static zs_status map_control(int fd, zs_shm_control **out)
{
    void *ptr = mmap(NULL, sizeof(zs_shm_control), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (ptr == MAP_FAILED) return ZS_FAIL(ZS_ERR_MEMORY, "cannot map a shared control block: %s", strerror(errno));
    madvise(ptr, sizeof(zs_shm_control), MADV_DONTDUMP);
    *out = ptr;
    return ZS_OK;
}

static zs_status allocate(zs_shm *shm)
{
    size_t world = (size_t)shm->base.world;
    shm->peers = calloc(world, sizeof *shm->peers);
    shm->polls = calloc(world, sizeof *shm->polls);
    shm->flat_offsets = calloc(ZS_SHM_FLATS, sizeof *shm->flat_offsets);
    for (size_t r = 0; r < world && shm->peers != NULL; r++) {
        shm->peers[r].pidfd = -1;
        shm->peers[r].buckets = -1;
    }
    if (shm->peers == NULL || shm->polls == NULL || shm->flat_offsets == NULL)
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the state of %zu ranks", world);
    return ZS_OK;
}

static zs_status make_own(zs_shm *shm, char *address, size_t size)
{
    ZS_TRY(allocate(shm));
    ZS_TRY(zs_file_memory("zshard-control", sizeof(zs_shm_control), &shm->control_fd));
    if (shm->base.rank == 0) ZS_TRY(zs_file_memory("zshard-flats", 0, &shm->flats_fd));
    ZS_TRY(zs_file_new("zshard-buckets", &shm->buckets));
    shm->pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (shm->pidfd < 0)
        return ZS_FAIL_ERRNO(
            "cannot watch processes (pidfd_open needs Linux 5.3 or later, and a sandbox that allows it)");
    zs_shm_peer *self = &shm->peers[shm->base.rank];
    self->pid = getpid();
    ZS_TRY(map_control(shm->control_fd, &self->control));
    shm->own = self->control;
    return zs_link_listen(address, size, &shm->listener);
}

zs_status zs_comm_shm_new(int rank, int world, double timeout, char *address, size_t size, zs_comm **out)
{
    if (world < 1 || rank < 0 || rank >= world)
        return ZS_FAIL(ZS_ERR_VALUE, "rank %d is out of range for world size %d", rank, world);
    if (size < 108) return ZS_FAIL(ZS_ERR_VALUE, "a buffer of %zu bytes is too small for an address (needs 108)", size);
    ZS_TRY(zs_shm_check_limits(rank, world));
    zs_shm *shm = calloc(1, sizeof *shm);
    if (shm == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the shm transport");
    shm->base.ops = &zs_shm_ops;
    shm->base.rank = rank;
    shm->base.world = world;
    shm->base.device = zs_device_cpu();
    shm->base.timeout = timeout;
    zs_refs_init(&shm->base.refs);
    shm->lifetime = zs_lifetime();
    shm->listener = shm->control_fd = shm->pidfd = shm->flats_fd = -1;
    shm->spins = choose_spins(world);
    zs_status status = make_own(shm, address, size);
    if (status != ZS_OK) {
        shm_destroy(&shm->base);
        return status;
    }
    *out = &shm->base;
    return ZS_OK;
}

/* Takes the descriptors of a connected party, and maps its control block. */
static zs_status adopt(void *arg, int r, const zs_link_party *party)
{
    zs_shm *shm = arg;
    zs_shm_peer *peer = &shm->peers[r];
    peer->pid = party->pid;
    peer->pidfd = party->fds[ZS_LINK_PIDFD];
    peer->buckets = party->fds[ZS_LINK_BUCKETS];
    if (r == 0) shm->flats_fd = party->fds[ZS_LINK_FLATS];
    zs_status status = map_control(party->fds[ZS_LINK_CONTROL], &peer->control);
    close(party->fds[ZS_LINK_CONTROL]); /* the mapping stays */
    return status;
}

/* All are connected: opens the shared files. */
static zs_status open_flats(zs_shm *shm)
{
    int flats = shm->flats_fd;
    shm->flats_fd = -1; /* the handle now owns it */
    return zs_file_common(flats, &shm->flats);
}

zs_status zs_comm_shm_connect(zs_comm *comm, const char *const *addresses, const unsigned char token[16])
{
    zs_shm *shm = (zs_shm *)comm;
    if (shm->connected) return ZS_FAIL(ZS_ERR_STATE, "rank %d is already connected", comm->rank);
    zs_link link = {.listener = shm->listener, .rank = comm->rank, .world = comm->world, .addresses = addresses};
    memcpy(link.token, token, sizeof link.token);
    link.seconds = meeting_seconds + meeting_seconds_per_rank * comm->world;
    if (comm->timeout < link.seconds) link.seconds = comm->timeout;
    link.layout = (uint64_t)sizeof(zs_shm_control) << 16 | protocol;
    link.party = (zs_link_party){shm->peers[comm->rank].pid,
                                 {shm->control_fd, zs_file_fd(shm->buckets), shm->pidfd, shm->flats_fd}};
    link.adopt = adopt;
    link.arg = shm;
    zs_status status = zs_link_connect(&link);
    close_fd(shm->listener);
    close_fd(shm->control_fd);
    close_fd(shm->pidfd);
    shm->listener = shm->control_fd = shm->pidfd = -1;
    ZS_THEN(status, open_flats(shm));
    shm->connected = status == ZS_OK;
    return status;
}
