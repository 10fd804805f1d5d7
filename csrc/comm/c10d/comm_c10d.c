/* comm_c10d.c - the transport over a process group of torch.distributed: anything that gloo or MPI reaches.
 *
 * Everything is a collective, and collectives pair up by order. The schedule makes all ranks gather and reduce their
 * units in one order; comm/turn.c checks it before each. A collective's memory is allocated before ranks agree on it: a
 * rank that fails in between would leave the others in it, paired with its next collective. */
#include "base/file.h"
#include "comm/c10d/c10d.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- flats -------------------------------------------------------------------------------------------------------- */

/* A gather in flight. */
struct zs_gathering {
    zs_turn turn;
    zs_work *work;
    zs_mem *mem, *source; /* counted references */
};

zs_status zs_c10d_gathering_new(const zs_turn *turn, const zs_flat_mem *flat, zs_target to, zs_gathering **out)
{
    *out = malloc(sizeof **out);
    if (*out == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory all-gathering unit '%s'", turn->name);
    **out = (zs_gathering){*turn, NULL, zs_mem_retain(to.mem), zs_mem_retain(flat->mem)};
    return ZS_OK;
}

void zs_c10d_gathering_free(zs_gathering *gathering)
{
    if (gathering == NULL) return;
    zs_mem_release(gathering->mem);
    zs_mem_release(gathering->source);
    free(gathering);
}

zs_status zs_c10d_gather_agreed(zs_c10d_comm *self, const char *shard, char *full, zs_gathering *gathering)
{
    const zs_turn *turn = &gathering->turn;
    zs_status status = zs_group_all_gather(self->group, shard, full, turn->bytes, self->base.world, &gathering->work);
    if (status != ZS_OK) return zs_c10d_fail(self, turn, status);
    zs_traffic_from_each(&self->base, ZS_TRAFFIC_GATHER, turn->bytes);
    return ZS_OK;
}

static zs_status c10d_gather_start(zs_comm *comm, const zs_flat_mem *flat, const char *name, zs_target to,
                                   zs_gathering **out)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    zs_turn turn = zs_gather_turn(comm, flat, name);
    zs_gathering *made = NULL;
    zs_status status = zs_c10d_gathering_new(&turn, flat, to, &made);
    ZS_THEN(status, zs_c10d_agree(self, &turn));
    ZS_THEN(status, zs_c10d_gather_agreed(self, flat->shard, to.full, made));
    if (status == ZS_OK)
        *out = made;
    else
        zs_c10d_gathering_free(made);
    return status;
}

zs_status zs_c10d_gather_finish(zs_comm *comm, zs_gathering *gathering)
{
    zs_status status = zs_c10d_finish((zs_c10d_comm *)comm, &gathering->turn, gathering->work, gathering->mem);
    zs_c10d_leave_source((zs_c10d_comm *)comm, gathering->source);
    zs_c10d_gathering_free(gathering);
    return status;
}

size_t zs_c10d_bytes(const zs_comm *comm)
{
    const zs_c10d_comm *self = (const zs_c10d_comm *)comm;
    return self->areas != NULL ? zs_arena_bytes(self->areas) : 0;
}

zs_status zs_c10d_reserve(zs_comm *comm, const zs_arena *plan)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    pthread_mutex_lock(&self->areas_lock);
    zs_status status = self->areas == NULL ? zs_arena_new(comm->device, &self->areas) : ZS_OK;
    ZS_THEN(status, zs_arena_cover(self->areas, plan));
    pthread_mutex_unlock(&self->areas_lock);
    return status;
}

/* --- small collectives, creation and end
 * ----------------------------------------------------------------------------- */

/* The bytes go through an area: the caller may free its memory when a wait was interrupted, while the collective
 * continues. */
static zs_status exchange_in(zs_c10d_comm *self, const zs_turn *turn, const void *mine, zs_mem *area)
{
    char *all = area->ptr, *own = all + (size_t)self->base.world * turn->bytes;
    zs_work *work = NULL;
    memcpy(own, mine, turn->bytes);
    zs_status status = zs_group_all_gather(self->group, own, all, turn->bytes, self->base.world, &work);
    return status == ZS_OK ? zs_c10d_finish(self, turn, work, NULL) : zs_c10d_fail(self, turn, status);
}

zs_status zs_c10d_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    ZS_TRY(zs_check_exchange(bytes));
    ZS_TRY(zs_c10d_check_usable(comm));
    zs_turn turn = zs_talk_turn(comm, ZS_TURN_EXCHANGE, bytes);
    zs_mem *area = NULL;
    if (bytes > 0) ZS_TRY(zs_c10d_borrow_area(self, (size_t)(comm->world + 1) * bytes, &area));
    zs_status status = zs_c10d_agree(self, &turn); /* a barrier already */
    if (status == ZS_OK) self->turns.n_talks++;
    if (area != NULL) ZS_THEN(status, exchange_in(self, &turn, mine, area));
    if (status == ZS_OK && area != NULL) memcpy(all, area->ptr, (size_t)comm->world * bytes);
    zs_c10d_return_area(self, &area);
    return status;
}

static zs_status broadcast_in(zs_c10d_comm *self, const zs_turn *turn, char *data, zs_mem *area)
{
    int root = (int)turn->round;
    for (size_t at = 0; at < turn->bytes; at += ZS_C10D_PIECE) {
        size_t bytes = turn->bytes - at < ZS_C10D_PIECE ? turn->bytes - at : ZS_C10D_PIECE;
        zs_work *work = NULL;
        if (self->base.rank == root) memcpy(area->ptr, data + at, bytes);
        zs_status status = zs_group_broadcast(self->group, area->ptr, bytes, root, &work);
        if (status != ZS_OK) return zs_c10d_fail(self, turn, status);
        ZS_TRY(zs_c10d_finish(self, turn, work, NULL));
        if (self->base.rank != root) memcpy(data + at, area->ptr, bytes);
    }
    return ZS_OK;
}

zs_status zs_c10d_broadcast(zs_comm *comm, void *data, size_t bytes, int root)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    ZS_TRY(zs_check_root(comm, root));
    if (bytes == 0) return ZS_OK;
    ZS_TRY(zs_c10d_check_usable(comm));
    zs_turn turn = zs_talk_turn(comm, ZS_TURN_BROADCAST, bytes);
    turn.round = (uint64_t)root;
    zs_mem *area = NULL;
    ZS_TRY(zs_c10d_borrow_area(self, bytes < ZS_C10D_PIECE ? bytes : ZS_C10D_PIECE, &area));
    zs_status status = zs_c10d_agree(self, &turn);
    if (status == ZS_OK) self->turns.n_talks++;
    ZS_THEN(status, broadcast_in(self, &turn, data, area));
    zs_c10d_return_area(self, &area);
    return status;
}

zs_status zs_c10d_give_up(zs_comm *comm)
{
    zs_turn turn = zs_turn_of(ZS_TURN_GIVE_UP, 0, 0, NULL);
    return zs_c10d_agree((zs_c10d_comm *)comm, &turn);
}

/* A rank's entry in the group's store when it ends. */
typedef struct last_page {
    zs_fingerprint fingerprint;
    zs_diagnostics texts;
} last_page;

zs_status zs_c10d_end(zs_comm *comm, zs_fingerprint *fingerprints, bool *all)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    if (zs_c10d_is_forked(self)) return ZS_OK;
    size_t world = (size_t)comm->world;
    last_page *pages = calloc(world, sizeof *pages);
    zs_diagnostics *texts = calloc(world, sizeof *texts);
    bool good = pages != NULL && texts != NULL;
    if (good) {
        pages[comm->rank] = (last_page){comm->fingerprint, comm->texts};
        *all = zs_group_leave_page(self->group, comm->rank, comm->world, pages, sizeof *pages);
        for (int r = 0; r < comm->world && *all; r++) {
            fingerprints[r] = pages[r].fingerprint;
            texts[r] = pages[r].texts;
        }
    }
    free(pages);
    zs_comm_set_others(comm, texts);
    return good ? ZS_OK : ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' last steps");
}

/* The process group is torch's. */
static void c10d_close(zs_comm *comm)
{
    (void)comm;
}

/* Transports with collectives that never ended, or (in forked children) whose threads are the parent's. */
static _Atomic(zs_c10d_comm *) kept;

static void keep(zs_c10d_comm *self)
{
    self->next = atomic_load(&kept);
    while (!atomic_compare_exchange_weak(&kept, &self->next, self)) {}
}

bool zs_c10d_clear(zs_c10d_comm *self)
{
    if (self->has_strays || zs_c10d_is_forked(self)) {
        keep(self);
        return false;
    }
    zs_c10d_free_areas(self);
    zs_c10d_free_lost(self);
    zs_process_watch_free(self->peers);
    zs_group_free(self->group);
    return true;
}

static void c10d_destroy(zs_comm *comm)
{
    if (zs_c10d_clear((zs_c10d_comm *)comm)) free((zs_c10d_comm *)comm);
}

static const zs_flat_ops c10d_flats = {
    .flat_new = zs_turns_flat_new,
    .flat_free = zs_turns_flat_free,
    .gather_start = c10d_gather_start,
    .gather_finish = zs_c10d_gather_finish,
    .numbers = zs_turns_numbers,
    .continue_from = zs_turns_continue_from,
};

static const zs_round_ops c10d_rounds = {
    .bucket_new = zs_local_bucket_new,
    .bucket_free = zs_local_bucket_free,
    .bucket_room = zs_local_bucket_room,
    .unit_bytes = sizeof(zs_c10d_unit),
    .unit_init = zs_c10d_unit_init,
    .unit_clear = zs_c10d_unit_clear,
    .send = zs_c10d_send,
    .arrive = zs_c10d_arrive,
    .share = zs_c10d_share,
    .drop = zs_c10d_drop,
    .finish = zs_c10d_finish_round,
    .give_up = zs_c10d_give_up,
    .room = zs_c10d_room,
    .reserve = zs_c10d_reserve,
};

static const zs_talk_ops c10d_talk = {
    .exchange = zs_c10d_exchange,
    .broadcast = zs_c10d_broadcast,
    .end = zs_c10d_end,
    .abort = zs_c10d_abort,
    .check_peers = zs_c10d_check_peers,
};

const zs_comm_ops zs_c10d_ops = {
    .name = "c10d",
    .shard_align = 64,
    .mapped = false,
    .flats = &c10d_flats,
    .rounds = &c10d_rounds,
    .readers = &zs_turns_reader_ops,
    .talk = &c10d_talk,
    .bytes = zs_c10d_bytes,
    .close = c10d_close,
    .destroy = c10d_destroy,
};

zs_status zs_c10d_init(zs_c10d_comm *comm, const char *group_name, const zs_ranks_of_hosts *ranks, double timeout)
{
    comm->base.rank = ranks->rank;
    comm->base.world = ranks->world;
    comm->base.per_host = ranks->per_host;
    comm->base.device = zs_device_cpu();
    comm->base.timeout = timeout;
    comm->base.turns = &comm->turns;
    comm->turns.ops = &zs_c10d_turns_ops;
    comm->gone = -1;
    comm->lifetime = zs_lifetime();
    pthread_mutex_init(&comm->areas_lock, NULL);
    zs_refs_init(&comm->base.refs);
    ZS_TRY(zs_group_new(group_name, &comm->group));
    return zs_c10d_peers_connect(comm);
}

zs_status zs_comm_c10d_new(const char *group_name, const zs_ranks_of_hosts *ranks, double timeout, zs_comm **out)
{
    ZS_TRY(zs_check_ranks_of_hosts(ranks));
    zs_c10d_comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the c10d transport");
    comm->base.ops = &zs_c10d_ops;
    zs_status status = zs_c10d_init(comm, group_name, ranks, timeout);
    if (status != ZS_OK) {
        c10d_destroy(&comm->base);
        return status;
    }
    *out = &comm->base;
    return ZS_OK;
}
