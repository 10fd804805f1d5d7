/* peer_flags.c - the numbers by which streams of different processes wait for each other. See peer.h.
 *
 * The one idea: a number is written by one rank and waited for by one other, so nothing has to be atomic; it only grows, so
 * nobody has to reset it. It is waited for in the own memory, where that costs the links between GPUs nothing.
 */
#include "comm/peer/peer.h"
#include "device/cuda_driver.h"
#include "device/device_cuda.h"

enum { OPS = 128 }; /* in one call; the driver takes 256 */

size_t zs_peer_pad_bytes(int world)
{
    size_t rows = (ZS_STREAMS + ZS_PEER_UNITS) * (size_t)ZS_PEER_WORDS + 1;
    return zs_round_up(rows * (size_t)world * sizeof(uint32_t), ZS_PEER_STAGE);
}

size_t zs_peer_stream_words(const zs_peer *self, zs_stream stream, zs_peer_word word)
{
    size_t row = (size_t)stream * ZS_PEER_WORDS + word;
    return row * (size_t)self->base.world * sizeof(uint32_t);
}

size_t zs_peer_unit_words(const zs_peer *self, uint32_t place, zs_peer_word word)
{
    return zs_peer_stream_words(self, ZS_STREAMS, ZS_PEER_READY) +
           ((size_t)place * ZS_PEER_WORDS + word) * (size_t)self->base.world * sizeof(uint32_t);
}

size_t zs_peer_end_words(const zs_peer *self)
{
    return zs_peer_unit_words(self, ZS_PEER_UNITS, 0);
}

/* Operations for one stream, sent when there are many. */
typedef struct batch {
    zs_cu_stream stream;
    unsigned n;
    zs_cu_mem_op ops[OPS];
} batch;

static zs_status send(batch *all)
{
    unsigned n = all->n;
    all->n = 0;
    return n > 0 ? ZS_CU(cuStreamBatchMemOp, all->stream, n, all->ops, 0) : ZS_OK;
}

static zs_status add(batch *all, uint32_t operation, const char *at, uint32_t value)
{
    if (all->n == OPS) ZS_TRY(send(all));
    all->ops[all->n++] = (zs_cu_mem_op){
        .operation = operation, .address = (zs_cu_ptr)(uintptr_t)at, .value = value}; /* flags 0: GEQ; with a fence */
    return ZS_OK;
}

static const char *word_at(const char *pad, size_t words, int r)
{
    return pad + words + (size_t)r * sizeof(uint32_t);
}

static zs_status add_say(zs_peer *self, batch *all, size_t words, uint32_t value)
{
    int rank = self->base.rank, world = self->base.world;
    for (int i = 1; i < world; i++) {
        const char *pad = self->pads[(rank + i) % world];
        ZS_TRY(add(all, ZS_CU_STREAM_MEM_OP_WRITE_VALUE_32, word_at(pad, words, rank), value));
    }
    return ZS_OK;
}

static zs_status add_hear(zs_peer *self, batch *all, size_t words, uint32_t value)
{
    int rank = self->base.rank, world = self->base.world;
    for (int i = 1; i < world; i++) {
        const char *at = word_at(self->pads[rank], words, (rank + i) % world);
        ZS_TRY(add(all, ZS_CU_STREAM_MEM_OP_WAIT_VALUE_32, at, value));
    }
    return ZS_OK;
}

zs_status zs_peer_say(zs_peer *self, zs_stream stream, size_t words, uint32_t value)
{
    batch all = {0};
    ZS_TRY(zs_device_cuda_stream(self->base.device, stream, &all.stream));
    ZS_TRY(add_say(self, &all, words, value));
    return send(&all);
}

zs_status zs_peer_hear(zs_peer *self, zs_stream stream, size_t words, uint32_t value)
{
    batch all = {0};
    ZS_TRY(zs_device_cuda_stream(self->base.device, stream, &all.stream));
    ZS_TRY(add_hear(self, &all, words, value));
    return send(&all);
}

zs_status zs_peer_meet(zs_peer *self, zs_stream stream, size_t words, uint32_t value)
{
    batch all = {0};
    ZS_TRY(zs_device_cuda_stream(self->base.device, stream, &all.stream));
    ZS_TRY(add_say(self, &all, words, value));
    ZS_TRY(add_hear(self, &all, words, value));
    return send(&all);
}

/* A byte that, four times over, is later than `count` and all that will come, by about a quarter of the circle. */
static unsigned char later_than(uint32_t count)
{
    return (unsigned char)((count >> 24) + 0x40);
}

void zs_peer_let_go(zs_peer *self, int r)
{
    zs_cu_stream unused, rescue = self->watch.rescue;
    char *pad = self->pads[r];
    if (rescue == NULL || pad == NULL || zs_device_cuda_stream(self->base.device, ZS_STREAM_GATHER, &unused) != ZS_OK)
        return;
    size_t row = zs_peer_stream_words(self, 1, 0), units = zs_peer_stream_words(self, ZS_STREAMS, 0);
    for (zs_stream stream = 0; stream < ZS_STREAMS; stream++)
        ZS_CU_FREE(cuMemsetD8Async, (zs_cu_ptr)(uintptr_t)(pad + stream * row), later_than(self->moves[stream]), row,
                   rescue);
    size_t rest = zs_peer_unit_words(self, ZS_PEER_UNITS, 0) - units;
    ZS_CU_FREE(cuMemsetD8Async, (zs_cu_ptr)(uintptr_t)(pad + units), later_than(0), rest, rescue); /* rounds are few */
}
