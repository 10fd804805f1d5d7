/* comm_hosts.c - the table of the two-level transport, its creation and its end. See hosts.h. */
#include "comm/hosts/hosts_unit.h"

#include "base/file.h"

#include <stdlib.h>

/* --- numbers ------------------------------------------------------------------------------------------------------ */

enum { SLOTS = ZS_NUMBERS - 1 }; /* after those of c10d */

static void hosts_numbers(const zs_comm *comm, uint64_t *out)
{
    zs_turns_numbers(comm, out);
    out[SLOTS] = ((const zs_hosts_comm *)comm)->slots;
}

static void hosts_continue_from(zs_comm *comm, const uint64_t *numbers)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    zs_turns_continue_from(comm, numbers);
    self->slots = numbers[SLOTS];
    if (zs_comm_align(self->local) != ZS_OK) zs_clear_error(); /* its next collective fails too */
}

/* --- birth and end ------------------------------------------------------------------------------------------------ */

static size_t hosts_bytes(const zs_comm *comm)
{
    const zs_hosts_comm *self = (const zs_hosts_comm *)comm;
    return zs_c10d_bytes(comm) + zs_comm_bytes(self->local) + self->lost_bytes;
}

static void hosts_abort(zs_comm *comm, const char *reason)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    zs_c10d_abort(comm, reason);
    if (!zs_c10d_is_forked(&self->c10d)) zs_hosts_break_off(self, reason);
}

/* The process groups are torch's. */
static void hosts_close(zs_comm *comm)
{
    zs_hosts_turns_stop((zs_hosts_comm *)comm);
    zs_hosts_links_stop((zs_hosts_comm *)comm, "the transport has ended");
    zs_comm_close(((zs_hosts_comm *)comm)->local);
}

static void hosts_destroy(zs_comm *comm)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    zs_hosts_turns_free(self);
    zs_hosts_links_free(self);
    if (!zs_c10d_clear(&self->c10d)) return;
    zs_mem_release(self->bells.mem);
    pthread_mutex_destroy(&self->local_lock);
    zs_comm_release(self->local);
    free(self);
}

static const zs_flat_ops hosts_flats = {
    .flat_new = zs_turns_flat_new,
    .flat_free = zs_turns_flat_free,
    .slot_new = zs_hosts_slot_new,
    .gather_start = zs_hosts_gather_start,
    .gather_finish = zs_hosts_gather_finish,
    .numbers = hosts_numbers,
    .continue_from = hosts_continue_from,
};

static const zs_round_ops hosts_rounds = {
    .bucket_new = zs_hosts_bucket_new,
    .bucket_free = zs_hosts_bucket_free,
    .bucket_room = zs_file_bucket_room,
    .unit_bytes = sizeof(hosts_unit),
    .unit_init = zs_hosts_unit_init,
    .unit_clear = zs_hosts_unit_clear,
    .renamed = zs_hosts_renamed,
    .send = zs_hosts_send,
    .begun = zs_hosts_begun,
    .arrive = zs_hosts_arrive,
    .share = zs_hosts_share,
    .arrive_shared = zs_hosts_arrive_shared,
    .release = zs_hosts_release,
    .drop = zs_hosts_drop,
    .finish = zs_hosts_finish_round,
    .reusable = zs_hosts_reusable,
    .rescale = zs_hosts_rescale,
    .give_up = zs_c10d_give_up,
    .room = zs_hosts_room,
    .reserve = zs_c10d_reserve,
};

static const zs_talk_ops hosts_talk = {
    .exchange = zs_c10d_exchange,
    .broadcast = zs_c10d_broadcast,
    .end = zs_c10d_end,
    .abort = hosts_abort,
    .check_peers = zs_c10d_check_peers,
};

const zs_comm_ops zs_hosts_ops = {
    .name = "hosts",
    .shard_align = 64,
    .mapped = false,
    .shares_slots = true,
    .flats = &hosts_flats,
    .rounds = &hosts_rounds,
    .readers = &zs_turns_reader_ops,
    .talk = &hosts_talk,
    .code_room = zs_hosts_code_room,
    .bytes = hosts_bytes,
    .close = hosts_close,
    .destroy = hosts_destroy,
};

static zs_status check(const zs_comm *local, const zs_ranks_of_hosts *ranks)
{
    ZS_TRY(zs_check_ranks_of_hosts(ranks));
    if (ranks->per_host > 0 && local->world == ranks->per_host && local->rank == ranks->rank % ranks->per_host)
        return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE, "rank %d of %d is not rank %d of the %d on its host", ranks->rank, ranks->world,
                   local->rank, local->world);
}

zs_status zs_comm_hosts_new(const char *group, const int *fds, zs_comm *local, const zs_ranks_of_hosts *ranks,
                            double timeout, zs_comm **out)
{
    ZS_TRY(check(local, ranks));
    zs_hosts_comm *self = calloc(1, sizeof *self);
    if (self == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the hosts transport");
    self->c10d.base.ops = &zs_hosts_ops;
    pthread_mutex_init(&self->local_lock, NULL);
    self->c10d.wait_queued = zs_hosts_wait_queued;
    self->local = zs_comm_retain(local);
    self->hosts = ranks->world / ranks->per_host;
    self->host = ranks->rank / ranks->per_host;
    self->lane = local->rank;
    zs_status status = zs_c10d_init(&self->c10d, group, ranks, timeout);
    ZS_THEN(status, zs_hosts_links_new(self, fds));
    ZS_THEN(status, zs_hosts_signals_new(self));
    ZS_THEN(status, zs_hosts_turns_new(self));
    if (status != ZS_OK) {
        hosts_destroy(&self->c10d.base);
        return status;
    }
    *out = &self->c10d.base;
    return ZS_OK;
}
