/* hosts_pieces.c - the part of a round that crosses hosts. See hosts_unit.h.
 *
 * A piece is the host's sum of the shards of one counterpart. With one rank per host, that is this rank's packed
 * gradients, in their dtype. Sums may be coded (hosts_coded.c): they are then decoded after the received pieces. */
#include "comm/hosts/hosts_unit.h"

#include <string.h>

/* Does a piece cross from where it was packed? */
static bool is_direct(const zs_hosts_comm *self, const hosts_unit *unit)
{
    return zs_hosts_per_host(self) == 1 && unit->sums.code == ZS_WIRE_EXACT;
}

/* The host's sum of shard `shard` of flat `f`, to `dst`. */
static zs_status sum_shard(const zs_hosts_comm *self, const hosts_unit *unit, const char *const *buckets, int f,
                           int shard, char *dst)
{
    const zs_comm *comm = &self->c10d.base;
    const zs_cunit_spec *spec = &unit->base.spec;
    size_t at = zs_cunit_shard_at(&unit->base, f, shard);
    const void *src[comm->per_host];
    for (int lane = 0; lane < comm->per_host; lane++)
        src[lane] = buckets[lane] != NULL ? buckets[lane] + at : NULL;
    zs_sum sum = {.src = src, .world = comm->per_host, .dst = dst, .dtype = spec->wire[f], .scale = 1.0};
    sum.to = zs_dtype_of_partial_sum(spec->wire[f]);
    sum.numel = (int64_t)(spec->shard_bytes[f] / zs_dtype_size(spec->wire[f]));
    return zs_device_sum(comm->device, ZS_STREAM_REDUCE, &sum);
}

size_t zs_hosts_read_bytes(const zs_hosts_comm *self, const hosts_unit *unit)
{
    return (size_t)(zs_hosts_per_host(self) - 1) * (size_t)self->hosts * unit->base.shards_bytes;
}

/* (coded) Where the sums of host `h` are decoded once they have arrived; until then, where those for it are
 * computed. */
static char *decoded_of(const zs_hosts_comm *self, const hosts_unit *unit, int h)
{
    return (char *)unit->received->ptr + (size_t)self->hosts * unit->stride + (size_t)h * unit->sums.room;
}

/* The shard that the counterpart on host `h` sums. */
static int shard_for(const zs_hosts_comm *self, const hosts_unit *unit, int h)
{
    return unit->base.spec.shard_of[zs_hosts_rank(self, h, self->lane)];
}

/* The piece from host `h`. */
static char *received_of(const hosts_unit *unit, int h)
{
    return (char *)unit->received->ptr + (size_t)h * unit->stride;
}

/* (not direct) The piece for host `h`; its own arrives at once. */
static char *piece_for(const zs_hosts_comm *self, const hosts_unit *unit, int h)
{
    if (h == self->host) return received_of(unit, h);
    return (char *)unit->sent->ptr + (size_t)(h < self->host ? h : h - 1) * unit->stride;
}

/* (not direct) Fills the piece for the counterpart on host `h`. */
static zs_status fill_piece(const zs_hosts_comm *self, const hosts_unit *unit, const zs_sources *local, int h)
{
    char *piece = piece_for(self, unit, h);
    char *headers = piece + unit->sums.travel;
    bool coded = unit->sums.code != ZS_WIRE_EXACT;
    char *sums = coded ? decoded_of(self, unit, h) : piece;
    int per_host = zs_hosts_per_host(self);
    bool present = false;
    for (int lane = 0; lane < per_host; lane++) {
        present = present || local->data[lane] != NULL;
        memcpy(headers + (size_t)lane * unit->base.header_bytes, local->headers[lane], unit->base.header_bytes);
    }
    for (int f = 0; f < unit->base.spec.n_flats && present; f++)
        ZS_TRY(sum_shard(self, unit, local->data, f, shard_for(self, unit, h), sums + unit->base.at[f]));
    if (coded && present) {
        const size_t numel = unit->sums.bytes / sizeof *unit->lost;
        float *lost = unit->lost + (size_t)h * numel;
        zs_hosts_encode(&unit->sums, lost, (const float *)(const void *)sums, (zs_bf16 *)(void *)piece);
    }
    return ZS_OK;
}

zs_status zs_hosts_sum_local(zs_hosts_comm *self, hosts_unit *unit)
{
    bool ready = false;
    zs_sources local = {0};
    memcpy(zs_cunit_header(unit->local), unit->base.header, unit->base.header_bytes);
    ZS_TRY(zs_cunit_post(self->local, unit->local, unit->base.bucket));
    /* All have posted, or are about to. */
    ZS_TRY(zs_cunit_collect(self->local, unit->local, ZS_WAIT, &ready, &local));
    for (int h = 0; h < self->hosts && !is_direct(self, unit); h++)
        ZS_TRY(fill_piece(self, unit, &local, h));
    zs_traffic_count(ZS_TRAFFIC_REDUCE, zs_hosts_read_bytes(self, unit), (size_t)(self->hosts - 1) * unit->sums.travel);
    if (unit->base.spec.mode == ZS_REDUCE_ALL) return ZS_OK; /* until the sum is shared */
    return zs_cunit_release(self->local, unit->local);
}

/* Sets the bytes to send to host `h`. (direct) A rank without a bucket sends bytes that its header marks as void. */
static void set_out(const zs_hosts_comm *self, const hosts_unit *unit, int h, zs_hosts_move *move)
{
    const zs_cunit *base = &unit->base;
    move->n_out = 0;
    if (!is_direct(self, unit)) {
        move->out[move->n_out++] = (struct iovec){piece_for(self, unit, h), unit->stride};
        return;
    }
    for (int f = 0; f < base->spec.n_flats; f++) {
        char *shard = base->bucket == NULL ? received_of(unit, self->host) + base->at[f]
                                           : base->bucket->ptr + zs_cunit_shard_at(base, f, shard_for(self, unit, h));
        move->out[move->n_out++] = (struct iovec){shard, base->spec.shard_bytes[f]};
    }
    move->out[move->n_out++] = (struct iovec){base->header, base->header_bytes};
}

zs_status zs_hosts_start_pieces(zs_hosts_comm *self, hosts_unit *unit)
{
    for (int h = 0; h < self->hosts; h++) {
        zs_hosts_move *move = &unit->moves[h];
        if (h == self->host) continue;
        set_out(self, unit, h, move);
        size_t bytes = is_direct(self, unit) ? unit->sums.travel + unit->base.header_bytes : unit->stride;
        move->in[0] = (struct iovec){received_of(unit, h), bytes};
        move->n_in = 1;
        ZS_TRY(zs_hosts_move_begin(self, h, move));
    }
    return ZS_OK;
}

/* The header of the rank at place `lane` of a piece's host. */
static const zs_round_header *header_of(const hosts_unit *unit, const char *piece, int lane)
{
    const char *headers = piece + unit->sums.travel;
    return (const zs_round_header *)(const void *)(headers + (size_t)lane * unit->base.header_bytes);
}

/* (direct) This rank's own summand: in the bucket, or (several flats) copied to the layout of the pieces. */
static const char *own_shard(const zs_hosts_comm *self, const hosts_unit *unit)
{
    const zs_cunit *base = &unit->base;
    const char *bucket = base->bucket->ptr;
    int shard = shard_for(self, unit, self->host);
    if (base->spec.n_flats == 1) return bucket + zs_cunit_shard_at(base, 0, shard);
    char *piece = received_of(unit, self->host);
    for (int f = 0; f < base->spec.n_flats; f++)
        memcpy(piece + base->at[f], bucket + zs_cunit_shard_at(base, f, shard), base->spec.shard_bytes[f]);
    return piece;
}

void zs_hosts_find_sources(const zs_hosts_comm *self, hosts_unit *unit)
{
    zs_cunit *base = &unit->base;
    for (int h = 0; h < self->hosts; h++) {
        const char *piece = received_of(unit, h);
        const char *sums = piece;
        bool direct = h == self->host && is_direct(self, unit), present = false;
        for (int lane = 0; lane < zs_hosts_per_host(self); lane++) {
            int r = zs_hosts_rank(self, h, lane);
            base->headers[r] = direct ? base->header : header_of(unit, piece, lane);
            base->data[r] = NULL;
            present = present || (base->headers[r]->flags & ZS_ROUND_BUCKET) != 0;
        }
        if (!present) continue;
        if (direct) {
            sums = own_shard(self, unit);
        } else if (unit->sums.code != ZS_WIRE_EXACT) {
            char *decoded = decoded_of(self, unit, h);
            zs_hosts_decode((const zs_bf16 *)(const void *)piece, unit->sums.travel, (float *)(void *)decoded);
            sums = decoded;
        }
        base->data[zs_hosts_rank(self, h, 0)] = sums;
    }
}
