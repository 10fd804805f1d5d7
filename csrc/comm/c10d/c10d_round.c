/* c10d_round.c - reducing over a process group.
 *
 * A reduction is one all_to_all. Every rank receives all ranks' pieces of its shard and sums them, in rank order and in
 * fp32, so the result is bit-identical to that of shm.
 *
 *   piece for rank d:  its shard of flat 0 | its shard of flat 1 | ... (for each section) | this rank's header
 *
 * post starts it and collect ends it, so bytes travel while the backward computes. */
#include "comm/c10d/c10d.h"

#include <string.h>

/* --- sizes -------------------------------------------------------------------------------------------------------- */

/* From one piece to the next. */
static size_t stride_of(const zs_cunit_spec *spec)
{
    return zs_spec_shards_bytes(spec) + zs_round_up(zs_round_header_bytes(spec->n_params), 64);
}

zs_room zs_c10d_room_without_units(const zs_comm *comm)
{
    return (zs_room){.talk = (size_t)(comm->world + 1) * sizeof(zs_turn), .piece = ZS_C10D_PIECE};
}

zs_room zs_c10d_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    size_t world = (size_t)comm->world;
    zs_room room = zs_c10d_room_without_units(comm);
    if (spec == NULL) return room;
    room.sent = room.received = stride_of(spec) * world;
    return room;
}

/* --- a round ------------------------------------------------------------------------------------------------------ */

/* Packs the piece for rank `r`. */
static void pack_piece(const zs_cunit *unit, int r, char *to)
{
    const size_t section = zs_cunit_shard_at(unit, unit->spec.n_flats, 0);
    for (int i = 0; i < unit->spec.sections * unit->spec.n_flats; i++) {
        int f = i % unit->spec.n_flats;
        size_t at = (size_t)(i / unit->spec.n_flats) * section + zs_cunit_shard_at(unit, f, unit->spec.shard_of[r]);
        if (unit->bucket != NULL) memcpy(to, unit->bucket->ptr + at, unit->spec.shard_bytes[f]);
        to += unit->spec.shard_bytes[f];
    }
    memcpy(to, unit->header, unit->header_bytes);
}

static zs_turn turn_of(const zs_c10d_unit *unit, zs_turn_kind kind)
{
    const zs_cunit *base = &unit->base;
    zs_turn turn = zs_turn_of(kind, unit->number, stride_of(&base->spec), base->spec.name);
    turn.round = base->round;
    return turn;
}

/* Starts the collective of one round: sends this rank's pieces, and receives all ranks' pieces of its shard. */
zs_status zs_c10d_send(zs_comm *comm, zs_cunit *cunit)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    zs_c10d_unit *unit = (zs_c10d_unit *)cunit;
    size_t stride = stride_of(&cunit->spec), world = (size_t)comm->world;
    zs_turn turn = turn_of(unit, ZS_TURN_POST);
    ZS_TRY(zs_c10d_check_usable(comm));
    ZS_TRY(zs_c10d_borrow_area(self, stride * world, &unit->received)); /* zs_c10d_drop returns them */
    ZS_TRY(zs_c10d_borrow_area(self, stride * world, &unit->sent));
    ZS_TRY(zs_c10d_agree(self, &turn));
    char *sent = unit->sent->ptr;
    for (size_t r = 0; r < world; r++)
        pack_piece(cunit, (int)r, sent + r * stride);
    zs_traffic_from_each(comm, ZS_TRAFFIC_REDUCE, cunit->shards_bytes);
    zs_status status = zs_group_all_to_all(self->group, sent, unit->received->ptr, stride, (int)world, &unit->work);
    return status == ZS_OK ? ZS_OK : zs_c10d_fail(self, &turn, status);
}

/* Waits for the round's collective. */
static zs_status end_swap(zs_c10d_comm *comm, zs_c10d_unit *unit)
{
    zs_turn turn = turn_of(unit, ZS_TURN_POST);
    zs_work *work = unit->work;
    unit->work = NULL;
    return zs_c10d_finish(comm, &turn, work, NULL);
}

zs_status zs_c10d_arrive(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    zs_c10d_unit *unit = (zs_c10d_unit *)cunit;
    *ready = wait != ZS_WAIT_NOT || zs_work_done(unit->work);
    if (!*ready) return ZS_OK;
    ZS_TRY(end_swap((zs_c10d_comm *)comm, unit));
    zs_c10d_return_area((zs_c10d_comm *)comm, &unit->sent);
    for (int r = 0; r < comm->world; r++) {
        const char *piece = (const char *)unit->received->ptr + (size_t)r * stride_of(&cunit->spec);
        const zs_round_header *header = (const zs_round_header *)(const void *)(piece + cunit->shards_bytes);
        cunit->headers[r] = header;
        cunit->data[r] = (header->flags & ZS_ROUND_BUCKET) != 0 ? piece : NULL;
    }
    return ZS_OK;
}

/* This rank's shard already is at its place in the bucket. */
static zs_status share_flat(zs_c10d_comm *comm, const zs_c10d_unit *unit, const zs_turn *turn, int f)
{
    const zs_cunit *base = &unit->base;
    char *flat = base->bucket->ptr;
    zs_work *work = NULL;
    char *own = flat + zs_cunit_shard_at(base, f, comm->base.rank), *all = flat + zs_cunit_shard_at(base, f, 0);
    zs_status status = zs_group_all_gather(comm->group, own, all, base->spec.shard_bytes[f], comm->base.world, &work);
    return status == ZS_OK ? zs_c10d_finish(comm, turn, work, base->bucket->mem) : zs_c10d_fail(comm, turn, status);
}

zs_status zs_c10d_share(zs_comm *comm, zs_cunit *cunit)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    const zs_c10d_unit *unit = (const zs_c10d_unit *)cunit;
    zs_turn turn = turn_of(unit, ZS_TURN_SHARE);
    ZS_TRY(zs_c10d_agree(self, &turn));
    zs_traffic_from_each(comm, ZS_TRAFFIC_REDUCE, cunit->shards_bytes);
    for (int f = 0; f < cunit->spec.n_flats; f++)
        ZS_TRY(share_flat(self, unit, &turn, f));
    return ZS_OK;
}

void zs_c10d_drop(zs_comm *comm, zs_cunit *cunit)
{
    zs_c10d_unit *unit = (zs_c10d_unit *)cunit;
    zs_c10d_return_area((zs_c10d_comm *)comm, &unit->sent);
    zs_c10d_return_area((zs_c10d_comm *)comm, &unit->received);
}

/* --- birth and end ------------------------------------------------------------------------------------------------ */

void zs_c10d_finish_round(zs_comm *comm, zs_cunit *cunit)
{
    zs_c10d_unit *unit = (zs_c10d_unit *)cunit;
    if (unit->work != NULL) (void)end_swap((zs_c10d_comm *)comm, unit); /* it writes to our memory until then */
}

void zs_c10d_unit_clear(zs_comm *comm, zs_cunit *cunit)
{
    (void)cunit;
    zs_c10d_let_areas_go((zs_c10d_comm *)comm); /* the transport lives as long as the process group */
}

zs_status zs_c10d_unit_init(zs_comm *comm, zs_cunit *cunit)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    zs_c10d_keep_areas(self);
    ((zs_c10d_unit *)cunit)->number = self->turns.n_units++;
    zs_cunit_lay_side_by_side(cunit);
    return ZS_OK;
}
