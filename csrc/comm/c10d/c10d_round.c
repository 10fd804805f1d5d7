/* c10d_round.c - reducing over a process group.
 *
 * A reduction is one all_to_all. Every rank gets all ranks' pieces of its own slice and sums them itself, in
 * rank order and in fp32, so the bits are those of shm. What else the peers must know of a post (the bitmap of
 * used parameters) rides in a tail behind each piece.
 *
 *   piece for rank d:  its slice of flat 0 | its slice of flat 1 | ... | tail
 *
 * post starts it and collect ends it, so bytes travel while the backward computes.
 */
#include "comm/c10d/c10d.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Behind the slices of each piece; the bitmap follows. */
typedef struct c10d_tail {
    uint64_t present; /* 0: the slices are not filled, nothing had a gradient */
} c10d_tail;

typedef struct c10d_unit {
    zs_cunit base;
    uint64_t number;
    size_t tail_bytes;       /* tail and bitmap */
    const zs_bucket *bucket; /* of the round that is out, NULL: it brings nothing; borrowed */
    zs_work *work;           /* the all_to_all that is under way, NULL: none */
    zs_mem *sent, *received; /* areas of that round, NULL: none */
} c10d_unit;

/* --- sizes ---------------------------------------------------------------------------------------------------------------- */

static size_t tail_bytes_of(size_t used_words)
{
    return zs_round_up(sizeof(c10d_tail) + used_words * sizeof(uint64_t), 64);
}

zs_room zs_c10d_room_without_units(const zs_comm *comm)
{
    return (zs_room){.talk = (size_t)(comm->world + 1) * sizeof(zs_c10d_turn), .piece = ZS_C10D_PIECE};
}

zs_room zs_c10d_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    size_t world = (size_t)comm->world;
    zs_room room = zs_c10d_room_without_units(comm);
    if (spec == NULL) return room;
    size_t piece = zs_spec_piece_bytes(spec);
    room.sent = room.received = (piece + tail_bytes_of(zs_spec_used_words(spec))) * world;
    return room;
}

/* --- units ---------------------------------------------------------------------------------------------------------------- */

static void return_all_areas(zs_c10d_comm *comm, c10d_unit *unit)
{
    zs_c10d_return_area(comm, &unit->sent);
    zs_c10d_return_area(comm, &unit->received);
}

/* Packs the piece for rank `r`. */
static void pack_piece(const c10d_unit *unit, int r, const uint64_t *used, char *to)
{
    c10d_tail tail = {.present = unit->bucket != NULL};
    char *at = to;
    for (int f = 0; f < unit->base.spec.n_slices; f++) {
        size_t bytes = unit->base.spec.slice_bytes[f];
        if (unit->bucket != NULL)
            memcpy(at, unit->bucket->ptr + zs_cunit_slice_at(&unit->base, f, unit->base.spec.part_of[r]), bytes);
        at += bytes;
    }
    memcpy(at, &tail, sizeof tail);
    memcpy(at + sizeof tail, used, unit->base.used_words * sizeof *used);
}

/* From one piece to the next. */
static size_t stride_of(const c10d_unit *unit)
{
    return unit->base.piece_bytes + unit->tail_bytes;
}

/* What rank `r` sent in this round. */
static const char *piece_of(const c10d_unit *unit, int r)
{
    return (const char *)unit->received->ptr + (size_t)r * stride_of(unit);
}

static const c10d_tail *tail_of(const c10d_unit *unit, const char *piece)
{
    return (const c10d_tail *)(const void *)(piece + unit->base.piece_bytes);
}

/* Fills the sources from what was received. */
static void find_sources(const zs_c10d_comm *comm, c10d_unit *unit)
{
    zs_cunit *base = &unit->base;
    for (int r = 0; r < comm->base.world; r++) {
        const char *piece = piece_of(unit, r);
        const c10d_tail *tail = tail_of(unit, piece);
        base->used[r] = (const uint64_t *)(const void *)(tail + 1);
        base->data[r] = tail->present ? piece : NULL;
    }
}

static zs_c10d_turn turn_of(const c10d_unit *unit, zs_c10d_kind kind)
{
    zs_c10d_turn turn = zs_c10d_turn_of(kind, unit->number, stride_of(unit), unit->base.spec.name);
    turn.round = unit->base.round;
    return turn;
}

/* Starts the collective of one round: own pieces out, everybody's pieces of the own slice in. */
static zs_status swap_pieces(zs_c10d_comm *comm, c10d_unit *unit, const uint64_t *used)
{
    size_t stride = stride_of(unit), world = (size_t)comm->base.world;
    zs_c10d_turn turn = turn_of(unit, ZS_C10D_POST);
    ZS_TRY(zs_c10d_agree(comm, &turn));
    ZS_TRY(zs_c10d_borrow_area(comm, stride * world, &unit->received));
    ZS_TRY(zs_c10d_borrow_area(comm, stride * world, &unit->sent));
    char *sent = unit->sent->ptr;
    for (size_t r = 0; r < world; r++)
        pack_piece(unit, (int)r, used, sent + r * stride);
    zs_status status = zs_group_all_to_all(comm->group, sent, unit->received->ptr, stride, (int)world, &unit->work);
    return status == ZS_OK ? ZS_OK : zs_c10d_fail(comm, &turn, status);
}

/* What failed on all ranks has not been a round: they may stand at different ones when they go on. */
static void take_round_back(zs_c10d_comm *comm, c10d_unit *unit)
{
    unit->base.round--;
    return_all_areas(comm, unit);
}

zs_status zs_c10d_post(zs_comm *comm, zs_cunit *cunit, const zs_bucket *bucket, const uint64_t *used)
{
    c10d_unit *unit = (c10d_unit *)cunit;
    ZS_TRY(zs_cunit_may_post(cunit, bucket));
    cunit->round++;
    unit->bucket = bucket;
    zs_status status = swap_pieces((zs_c10d_comm *)comm, unit, used);
    if (status == ZS_OK)
        cunit->state = ZS_ROUND_POSTED;
    else
        take_round_back((zs_c10d_comm *)comm, unit);
    return status;
}

/* Waits for the round's collective and looks at what came. */
static zs_status end_swap(zs_c10d_comm *comm, c10d_unit *unit)
{
    zs_c10d_turn turn = turn_of(unit, ZS_C10D_POST);
    zs_work *work = unit->work;
    unit->work = NULL;
    ZS_TRY(zs_c10d_finish(comm, &turn, work, NULL));
    zs_c10d_return_area(comm, &unit->sent);
    find_sources(comm, unit);
    return ZS_OK;
}

zs_status zs_c10d_collect(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    c10d_unit *unit = (c10d_unit *)cunit;
    *ready = false;
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_POSTED, "collect"));
    /* In ZS_REDUCE_ALL a collective follows, so the ranks must come through here in one order: no looking first. */
    bool only_look = wait == ZS_WAIT_NOT && cunit->spec.mode == ZS_REDUCE_SCATTER;
    if (only_look && !zs_work_done(unit->work)) return ZS_OK;
    zs_status status = end_swap((zs_c10d_comm *)comm, unit);
    *ready = status == ZS_OK;
    cunit->state = *ready ? ZS_ROUND_COLLECTED : ZS_ROUND_NONE; /* a failed collective cannot be had again */
    if (*ready)
        zs_cunit_sources(cunit, out);
    else
        return_all_areas((zs_c10d_comm *)comm, unit);
    return status;
}

/* The rank's own slice is its place in the bucket already. */
static zs_status share_flat(zs_c10d_comm *comm, const c10d_unit *unit, int f)
{
    const zs_cunit *base = &unit->base;
    char *flat = unit->bucket->ptr;
    int rank = comm->base.rank, world = comm->base.world;
    zs_c10d_turn turn = turn_of(unit, ZS_C10D_SHARE);
    zs_work *work = NULL;
    char *own = flat + zs_cunit_slice_at(base, f, rank), *all = flat + zs_cunit_slice_at(base, f, 0);
    zs_status status = zs_group_all_gather(comm->group, own, all, base->spec.slice_bytes[f], world, &work);
    return status == ZS_OK ? zs_c10d_finish(comm, &turn, work, unit->bucket->mem) : zs_c10d_fail(comm, &turn, status);
}

zs_status zs_c10d_share(zs_comm *comm, zs_cunit *cunit)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    c10d_unit *unit = (c10d_unit *)cunit;
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_COLLECTED, "share"));
    zs_c10d_turn turn = turn_of(unit, ZS_C10D_SHARE);
    ZS_TRY(zs_c10d_agree(self, &turn));
    for (int f = 0; f < cunit->spec.n_slices; f++)
        ZS_TRY(share_flat(self, unit, f));
    for (int r = 0; r < comm->world; r++)
        cunit->data[r] = unit->bucket->ptr;
    cunit->state = ZS_ROUND_SHARED;
    return ZS_OK;
}

zs_status zs_c10d_collect_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    (void)comm;
    (void)wait; /* share has waited */
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_SHARED, "collect_shared"));
    cunit->state = ZS_ROUND_GATHERED;
    zs_cunit_sources(cunit, out);
    *ready = true;
    return ZS_OK;
}

zs_status zs_c10d_release(zs_comm *comm, zs_cunit *cunit)
{
    c10d_unit *unit = (c10d_unit *)cunit;
    ZS_TRY(zs_cunit_may_release(cunit));
    return_all_areas((zs_c10d_comm *)comm, unit);
    cunit->state = ZS_ROUND_NONE;
    return ZS_OK;
}

zs_status zs_c10d_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    (void)comm;
    (void)wait;
    /* Peers have copies of their own; only the sum that share() gathers lands in the bucket. */
    *ready = cunit->spec.mode == ZS_REDUCE_SCATTER || cunit->state == ZS_ROUND_NONE;
    return ZS_OK;
}

/* --- birth and end ----------------------------------------------------------------------------------------------------- */

void zs_c10d_cunit_free(zs_comm *comm, zs_cunit *cunit)
{
    if (cunit == NULL) return;
    c10d_unit *unit = (c10d_unit *)cunit;
    bool failed = zs_last_status() != ZS_OK;                            /* of the caller, who is on the way out */
    if (unit->work != NULL) (void)end_swap((zs_c10d_comm *)comm, unit); /* it writes into our memory until then */
    if (!failed) zs_clear_error();
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    return_all_areas(self, unit);
    zs_cunit_clear(cunit);
    free(cunit);
    if (--self->living == 0) zs_c10d_free_areas(self); /* the transport lives as long as the process group */
}

zs_status zs_c10d_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out)
{
    c10d_unit *unit = calloc(1, sizeof *unit);
    if (unit == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec->name);
    ((zs_c10d_comm *)comm)->living++;
    zs_status status = zs_cunit_init(&unit->base, spec, comm);
    if (status != ZS_OK) {
        zs_c10d_cunit_free(comm, &unit->base);
        return status;
    }
    unit->number = ((zs_c10d_comm *)comm)->units++;
    unit->tail_bytes = tail_bytes_of(unit->base.used_words);
    zs_cunit_lay_side_by_side(&unit->base);
    *out = &unit->base;
    return ZS_OK;
}
