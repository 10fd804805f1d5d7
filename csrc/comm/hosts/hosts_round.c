/* hosts_round.c - reducing in two levels. See hosts.h, hosts_unit.h.
 *
 * Once all ranks have announced a round, their buckets are packed. So each rank immediately reads those of its host,
 * and sums the shards of its counterparts and its own (hosts_pieces.c); the sums cross the wire. An owner then adds
 * the hosts' sums, in the order of hosts. */
#include "comm/hosts/hosts_unit.h"

#include "base/file.h"

#include <stdlib.h>
#include <string.h>

/* --- sizes -------------------------------------------------------------------------------------------------------- */

/* From one piece to the next: the sums, and the headers of the host's ranks. */
static size_t stride_of(const zs_comm *comm, const zs_cunit_spec *spec, const zs_wire_sums *sums)
{
    return sums->travel + zs_round_up((size_t)comm->per_host * zs_round_header_bytes(spec->n_params), 64);
}

/* The unit's spec on the transport of the host's ranks. That does not decide which rank sums what. */
static zs_cunit_spec local_spec(const zs_comm *comm, const zs_cunit_spec *spec, const int *nowhere)
{
    zs_cunit_spec local = *spec;
    if (spec->mode == ZS_REDUCE_SCATTER) {
        local.shard_of = nowhere;
        if (spec->n_shards == 0) local.n_shards = comm->world;
        return local;
    }
    local.shard_of = NULL; /* rank r sums shard r */
    local.n_shards = comm->per_host;
    for (int f = 0; f < spec->n_flats; f++)
        local.shard_bytes[f] *= (size_t)(comm->world / comm->per_host);
    return local;
}

static const zs_comm_ops *local_ops(const zs_comm *comm)
{
    return comm->per_host > 1 ? &zs_shm_ops : &zs_self_ops;
}

/* Pieces that are summed before they cross: all but this host's, or none, see hosts_pieces.c. */
static size_t pieces_of(const zs_comm *comm, const zs_wire_sums *sums)
{
    bool direct = comm->per_host == 1 && sums->code == ZS_WIRE_EXACT;
    return direct ? 0 : (size_t)(comm->world / comm->per_host) - 1;
}

zs_room zs_hosts_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    zs_room own = zs_c10d_room_without_units(comm);
    if (spec == NULL) {
        own.fixed = local_ops(comm)->rounds->room(comm, NULL).fixed;
        return own;
    }
    zs_cunit_spec local = local_spec(comm, spec, NULL);
    size_t hosts = (size_t)(comm->world / comm->per_host);
    zs_wire_sums sums = zs_wire_sums_of(comm, spec);
    own.record = local_ops(comm)->rounds->room(comm, &local).record + zs_wire_lost_bytes(&sums, (int)hosts);
    own.sent = stride_of(comm, spec, &sums) * pieces_of(comm, &sums);
    own.received = (stride_of(comm, spec, &sums) + sums.room) * hosts;
    return own;
}

/* --- the host's own transport, which the thread of turns uses too ------------------------------------------------- */

/* A forked child lacks that thread, which may have held the lock: it takes no lock. */
static void lock_local(zs_hosts_comm *self)
{
    if (!zs_c10d_is_forked(&self->c10d)) pthread_mutex_lock(&self->local_lock);
}

static void unlock_local(zs_hosts_comm *self)
{
    if (!zs_c10d_is_forked(&self->c10d)) pthread_mutex_unlock(&self->local_lock);
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */

zs_status zs_hosts_bucket_new(zs_comm *comm, size_t bytes, zs_bucket *out)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    lock_local(self);
    zs_status status = zs_comm_bucket_new(self->local, zs_file_bucket_room(bytes), out);
    unlock_local(self);
    return status;
}

void zs_hosts_bucket_free(zs_comm *comm, zs_bucket *bucket)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    lock_local(self);
    zs_comm_bucket_free(self->local, bucket);
    unlock_local(self);
}

/* --- a round ------------------------------------------------------------------------------------------------------ */

static zs_turn turn_of(const hosts_unit *unit, zs_turn_kind kind)
{
    zs_turn turn = zs_turn_of(kind, unit->number, unit->stride, unit->base.spec.name);
    turn.round = unit->base.round;
    return turn;
}

/* An op's `begin`, on either thread. */
static zs_status begin(zs_hosts_comm *self, zs_hosts_op *op)
{
    hosts_unit *unit = ((const hosts_post *)op)->unit;
    lock_local(self);
    zs_status status = zs_hosts_sum_local(self, unit);
    unlock_local(self);
    ZS_THEN(status, zs_hosts_start_pieces(self, unit));
    return status;
}

static void undo(zs_hosts_comm *self, zs_hosts_op *op)
{
    hosts_unit *unit = ((const hosts_post *)op)->unit;
    zs_hosts_lost_drop(self, &unit->sums, unit->lost); /* some of it may have entered this round */
    zs_hosts_moves_leave(self, unit->moves);
    zs_cunit_undo_post(&self->c10d.base, &unit->base);
}

static const zs_hosts_acts post_acts = {.begin = begin, .begin_here = begin, .undo = undo};

static void post_free(hosts_unit *unit)
{
    free(unit->post);
    unit->post = NULL;
}

static zs_status post_new(const zs_hosts_comm *self, hosts_unit *unit)
{
    size_t turns = zs_hosts_op_turns(self);
    post_free(unit);
    hosts_post *made = calloc(1, sizeof *made + turns * sizeof(zs_turn));
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory reducing unit '%s'", unit->base.spec.name);
    made->op.acts = &post_acts;
    made->op.ticket.turns = made->turns;
    made->unit = unit;
    unit->post = made;
    return ZS_OK;
}

/* Waits until the queued round has begun. */
static zs_status begun(zs_hosts_comm *self, hosts_unit *unit)
{
    if (unit->post == NULL) return ZS_OK;
    ZS_TRY(zs_hosts_wait_until(self, &unit->post->op));
    ZS_TRY(zs_hosts_op_failure(&unit->post->op));
    post_free(unit);
    return ZS_OK;
}

static zs_status enqueue(zs_hosts_comm *self, hosts_unit *unit)
{
    size_t received = (unit->stride + unit->sums.room) * (size_t)self->hosts;
    size_t sent = unit->stride * pieces_of(&self->c10d.base, &unit->sums);
    zs_turn turn = turn_of(unit, ZS_TURN_POST);
    zs_status status = post_new(self, unit);
    ZS_THEN(status, zs_c10d_borrow_area(&self->c10d, received, &unit->received));
    if (sent > 0) ZS_THEN(status, zs_c10d_borrow_area(&self->c10d, sent, &unit->sent));
    if (status != ZS_OK) return zs_hosts_turns_fail(self, zs_c10d_fail(&self->c10d, &turn, status));
    return zs_hosts_op_enqueue(self, &unit->post->op, &turn);
}

zs_status zs_hosts_send(zs_comm *comm, zs_cunit *cunit)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_unit *unit = (hosts_unit *)cunit;
    zs_status status = enqueue(self, unit);
    if (status == ZS_OK) /* in ZS_REDUCE_ALL another collective follows immediately */
        return cunit->spec.mode == ZS_REDUCE_SCATTER ? ZS_OK : zs_hosts_pass(self, begun(self, unit));
    if (unit->post != NULL) undo(self, &unit->post->op);
    post_free(unit);
    return zs_hosts_pass(self, status);
}

zs_status zs_hosts_begun(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *done)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_unit *unit = (hosts_unit *)cunit;
    *done = unit->post == NULL || wait != ZS_WAIT_NOT || zs_hosts_has_begun(self, &unit->post->op);
    return *done ? zs_hosts_pass(self, begun(self, unit)) : ZS_OK;
}

/* Waits for outstanding moves. */
static zs_status finish(zs_hosts_comm *self, hosts_unit *unit, zs_turn_kind kind)
{
    zs_turn turn = turn_of(unit, kind);
    return zs_hosts_moves_finish(self, &turn, unit->moves);
}

zs_status zs_hosts_arrive(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_unit *unit = (hosts_unit *)cunit;
    *ready = wait != ZS_WAIT_NOT || zs_hosts_moves_done(self, unit->moves);
    if (!*ready) return ZS_OK;
    zs_status status = finish(self, unit, ZS_TURN_POST);
    if (status != ZS_OK) return zs_hosts_pass(self, status);
    zs_c10d_return_area(&self->c10d, &unit->sent);
    zs_hosts_find_sources(self, unit);
    return ZS_OK;
}

/* --- sharing the sums --------------------------------------------------------------------------------------------- */

/* Receives each counterpart's finished shards into their places in the bucket, and sends this rank's. */
static zs_status start_shares(zs_hosts_comm *self, hosts_unit *unit)
{
    const zs_cunit *base = &unit->base;
    for (int h = 0; h < self->hosts; h++) {
        zs_hosts_move *move = &unit->moves[h];
        if (h == self->host) continue;
        move->n_out = move->n_in = base->spec.n_flats;
        for (int f = 0; f < base->spec.n_flats; f++) {
            char *own = base->bucket->ptr + zs_cunit_shard_at(base, f, self->c10d.base.rank);
            char *theirs = base->bucket->ptr + zs_cunit_shard_at(base, f, zs_hosts_rank(self, h, self->lane));
            move->out[f] = (struct iovec){own, base->spec.shard_bytes[f]};
            move->in[f] = (struct iovec){theirs, base->spec.shard_bytes[f]};
        }
        ZS_TRY(zs_hosts_move_begin(self, h, move));
    }
    return ZS_OK;
}

zs_status zs_hosts_share(zs_comm *comm, zs_cunit *cunit)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_unit *unit = (hosts_unit *)cunit;
    zs_turn turn = turn_of(unit, ZS_TURN_SHARE);
    ZS_TRY(zs_c10d_agree(&self->c10d, &turn));
    zs_traffic_count(ZS_TRAFFIC_REDUCE, zs_hosts_read_bytes(self, unit),
                     (size_t)(self->hosts - 1) * cunit->shards_bytes);
    zs_status status = start_shares(self, unit);
    if (status != ZS_OK) status = zs_c10d_fail(&self->c10d, &turn, status);
    ZS_THEN(status, finish(self, unit, ZS_TURN_SHARE));
    ZS_THEN(status, zs_cunit_share(self->local, unit->local));
    if (status != ZS_OK) zs_hosts_moves_leave(self, unit->moves);
    return zs_hosts_pass(self, status);
}

zs_status zs_hosts_arrive_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_unit *unit = (hosts_unit *)cunit;
    zs_sources local = {0};
    ZS_TRY(zs_cunit_collect_shared(self->local, unit->local, wait, ready, &local));
    for (int r = 0; r < comm->world && *ready; r++)
        cunit->data[r] = local.data[r % comm->per_host];
    return ZS_OK;
}

zs_status zs_hosts_release(zs_comm *comm, zs_cunit *cunit)
{
    zs_comm *local = ((zs_hosts_comm *)comm)->local;
    return cunit->spec.mode == ZS_REDUCE_ALL ? zs_cunit_release(local, ((hosts_unit *)cunit)->local) : ZS_OK;
}

void zs_hosts_drop(zs_comm *comm, zs_cunit *cunit)
{
    hosts_unit *unit = (hosts_unit *)cunit;
    zs_c10d_return_area((zs_c10d_comm *)comm, &unit->sent);
    zs_c10d_return_area((zs_c10d_comm *)comm, &unit->received);
}

zs_status zs_hosts_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_unit *unit = (hosts_unit *)cunit;
    *ready = false;
    if (unit->post != NULL) {
        if (wait == ZS_WAIT_NOT && !zs_hosts_has_begun(self, &unit->post->op)) return ZS_OK;
        zs_status status = zs_hosts_wait_until(self, &unit->post->op);
        if (status != ZS_OK) return zs_hosts_pass(self, status);
    }
    lock_local(self);
    zs_status status = zs_cunit_reusable(self->local, unit->local, wait, ready);
    unlock_local(self);
    return status;
}

void zs_hosts_rescale(zs_comm *comm, zs_cunit *cunit, double factor)
{
    const hosts_unit *unit = (const hosts_unit *)cunit;
    zs_hosts_lost_scale((zs_hosts_comm *)comm, &unit->sums, unit->lost, factor);
}

/* --- birth and end ------------------------------------------------------------------------------------------------ */

void zs_hosts_renamed(zs_comm *comm, zs_cunit *cunit)
{
    const hosts_unit *unit = (const hosts_unit *)cunit;
    (void)zs_cunit_rename(((zs_hosts_comm *)comm)->local, unit->local, cunit->spec.name);
}

void zs_hosts_finish_round(zs_comm *comm, zs_cunit *cunit)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_unit *unit = (hosts_unit *)cunit;
    (void)begun(self, unit);
    if (unit->moves != NULL) (void)finish(self, unit, ZS_TURN_POST); /* it writes to our memory until then */
}

void zs_hosts_unit_clear(zs_comm *comm, zs_cunit *cunit)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_unit *unit = (hosts_unit *)cunit;
    zs_cunit_free(self->local, unit->local);
    zs_hosts_lost_free(self, &unit->sums, unit->lost);
    post_free(unit);
    free(unit->moves);
    zs_c10d_unit_clear(comm, cunit);
}

zs_status zs_hosts_unit_init(zs_comm *comm, zs_cunit *cunit)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_unit *unit = (hosts_unit *)cunit;
    const zs_cunit_spec *spec = &cunit->spec;
    zs_c10d_keep_areas(&self->c10d);
    unit->number = self->c10d.turns.n_units++;
    (void)zs_wire_lay_out(comm, spec, cunit->at);
    unit->sums = zs_wire_sums_of(comm, spec);
    unit->stride = stride_of(comm, spec, &unit->sums);
    cunit->partial = comm->per_host > 1 || unit->sums.code != ZS_WIRE_EXACT;
    ZS_TRY(zs_hosts_lost_new(self, &unit->sums, &unit->lost));
    unit->moves = calloc((size_t)self->hosts, sizeof *unit->moves);
    if (unit->moves == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec->name);
    int nowhere[comm->per_host];
    memset(nowhere, 0, sizeof nowhere);
    zs_cunit_spec local = local_spec(comm, spec, nowhere);
    return zs_cunit_new(self->local, &local, &unit->local);
}
