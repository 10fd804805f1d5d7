/* hosts_pieces.c - the part of a round that crosses hosts. See hosts_unit.h.
 *
 * A piece is the host's sum of the shards of one counterpart. With one rank per host that is what this rank has
 * packed, in its own dtype. Sums may be coded (hosts_coded.c): they are then decoded after the received pieces. */
#include "comm/hosts/hosts_unit.h"

#include <string.h>

/* The host's sum of shard `shard` of flat `f`, to `dst`. */
static zs_status sum_shard(const zs_hosts_comm *self, const hosts_unit *unit, const char *const *buckets, int f,
                           int shard, char *dst)
{
    const zs_comm *comm = &self->c10d.base;
    const zs_cunit_spec *spec = &unit->base.spec;
    size_t at = zs_cunit_shard_at(&unit->base, f, shard);
    if (comm->per_host == 1 && unit->sums.code == ZS_WIRE_EXACT) {
        memcpy(dst, buckets[0] + at, spec->shard_bytes[f]);
        return ZS_OK;
    }
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

/* Fills the piece for the counterpart on host `h`. */
static zs_status fill_piece(const zs_hosts_comm *self, const hosts_unit *unit, const zs_sources *local, int h)
{
    zs_mem *area = h == self->host ? unit->received : unit->sent; /* its own has arrived */
    char *piece = (char *)area->ptr + (size_t)h * unit->stride;
    char *headers = piece + unit->sums.travel;
    bool coded = unit->sums.code != ZS_WIRE_EXACT;
    char *sums = coded ? decoded_of(self, unit, h) : piece;
    int per_host = zs_hosts_per_host(self), shard = unit->base.spec.shard_of[zs_hosts_rank(self, h, self->lane)];
    bool present = false;
    for (int lane = 0; lane < per_host; lane++) {
        present = present || local->data[lane] != NULL;
        memcpy(headers + (size_t)lane * unit->base.header_bytes, local->headers[lane], unit->base.header_bytes);
    }
    for (int f = 0; f < unit->base.spec.n_flats && present; f++)
        ZS_TRY(sum_shard(self, unit, local->data, f, shard, sums + unit->base.at[f]));
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
    for (int h = 0; h < self->hosts; h++)
        ZS_TRY(fill_piece(self, unit, &local, h));
    zs_traffic_count(ZS_TRAFFIC_REDUCE, zs_hosts_read_bytes(self, unit), (size_t)(self->hosts - 1) * unit->sums.travel);
    if (unit->base.spec.mode == ZS_REDUCE_ALL) return ZS_OK; /* until the sum is shared */
    return zs_cunit_release(self->local, unit->local);
}

zs_status zs_hosts_start_pieces(zs_hosts_comm *self, hosts_unit *unit)
{
    for (int h = 0; h < self->hosts; h++) {
        char *received = (char *)unit->received->ptr + (size_t)h * unit->stride;
        if (h == self->host) continue;
        zs_hosts_move *move = &unit->moves[h];
        move->out[0] = (struct iovec){(char *)unit->sent->ptr + (size_t)h * unit->stride, unit->stride};
        move->in[0] = (struct iovec){received, unit->stride};
        move->n_out = move->n_in = 1;
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

void zs_hosts_find_sources(const zs_hosts_comm *self, hosts_unit *unit)
{
    zs_cunit *base = &unit->base;
    for (int h = 0; h < self->hosts; h++) {
        const char *piece = (const char *)unit->received->ptr + (size_t)h * unit->stride;
        const char *sums = piece;
        bool present = false;
        for (int lane = 0; lane < zs_hosts_per_host(self); lane++) {
            int r = zs_hosts_rank(self, h, lane);
            base->headers[r] = header_of(unit, piece, lane);
            base->data[r] = NULL;
            present = present || (base->headers[r]->flags & ZS_ROUND_BUCKET) != 0;
        }
        if (!present) continue;
        if (unit->sums.code != ZS_WIRE_EXACT) {
            char *decoded = decoded_of(self, unit, h);
            zs_hosts_decode((const zs_bf16 *)(const void *)piece, unit->sums.travel, (float *)(void *)decoded);
            sums = decoded;
        }
        base->data[zs_hosts_rank(self, h, 0)] = sums;
    }
}
