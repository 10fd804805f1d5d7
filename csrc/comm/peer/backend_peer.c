/* backend_peer.c - device memory by mappings of the peers' memory: several ranks on one GPU, or GPUs of one host. See peer.h.
 *
 * The one idea: a move is a number in each pad, once when a rank's part may be read and once when it has read all others. So
 * what is queued behind a move may write what the peers have read of this rank.
 */
#include "base/file.h"
#include "comm/peer/peer.h"
#include "device/device_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- moves --------------------------------------------------------------------------------------------------------------- */

/* Every rank pulls from another one first, so that no GPU is asked by all at a time. */
static zs_status pull_all(zs_peer *self, zs_stream stream, char *const *from, char *full, size_t bytes)
{
    int rank = self->base.rank, world = self->base.world;
    for (int i = 0; i < world; i++) {
        int r = (rank + i) % world;
        char *to = full + (size_t)r * bytes;
        if (to != from[r]) ZS_TRY(zs_device_copy(self->base.device, stream, to, from[r], bytes));
    }
    return ZS_OK;
}

static zs_status meet(zs_peer *self, zs_stream stream, zs_peer_word word)
{
    return zs_peer_meet(self, stream, zs_peer_stream_words(self, stream, word), self->moves[stream]);
}

/* What the peers can not map (an offloaded shard comes in the gather's target, which is torch's memory) they read from a stage,
 * as large as the largest that came: the gather before, in the same stream, is through with it. All ranks offload alike, so they
 * come here together. */
static zs_status onto_stage(zs_peer *self, zs_stream stream, const void **shard, size_t bytes)
{
    zs_mem **stage = &self->stages[stream];
    zs_peer_alloc *alloc = zs_peer_alloc_at(*shard);
    zs_peer_alloc_release(alloc);
    if (alloc != NULL) return ZS_OK;
    if (*stage == NULL || (*stage)->bytes < bytes) {
        zs_mem *made = NULL;
        ZS_TRY(zs_peer_mem_new(self->base.device, bytes, &made));
        zs_mem_release(*stage);
        *stage = made;
        ZS_TRY(zs_device_fork(self->base.device, stream)); /* behind its zeros */
    }
    ZS_TRY(zs_device_copy(self->base.device, stream, (*stage)->ptr, *shard, bytes));
    *shard = (*stage)->ptr;
    return ZS_OK;
}

static zs_status peer_gather(zs_backend *backend, zs_stream stream, const void *shard, char *full, size_t bytes)
{
    zs_peer *self = (zs_peer *)backend;
    char *const *from = NULL;
    ZS_TRY(zs_peer_check(backend));
    ZS_TRY(onto_stage(self, stream, &shard, bytes));
    ZS_TRY(zs_peer_shards(self, shard, &from));
    self->moves[stream]++;
    ZS_TRY(meet(self, stream, ZS_PEER_READY));
    ZS_TRY(pull_all(self, stream, from, full, bytes));
    ZS_TRY(meet(self, stream, ZS_PEER_DONE));
    return zs_peer_watch_move(self, stream, "all-gather of parameters", "");
}

/* A piece of what the root has goes over its stage, as the peers can not map torch's memory. */
static zs_status broadcast_piece(zs_peer *self, char *data, size_t bytes, int root)
{
    zs_stream stream = ZS_STREAM_COMPUTE;
    const zs_device *device = self->base.device;
    char *stage = self->pads[root] + zs_peer_pad_bytes(self->base.world);
    bool here = root == self->base.rank;
    if (here) ZS_TRY(zs_device_copy(device, stream, stage, data, bytes));
    self->moves[stream]++;
    ZS_TRY(meet(self, stream, ZS_PEER_READY));
    if (!here) ZS_TRY(zs_device_copy(device, stream, data, stage, bytes));
    return meet(self, stream, ZS_PEER_DONE);
}

static zs_status peer_broadcast(zs_backend *backend, void *data, size_t bytes, int root)
{
    zs_peer *self = (zs_peer *)backend;
    ZS_TRY(zs_peer_check(backend));
    for (size_t at = 0; at < bytes; at += ZS_PEER_STAGE) {
        size_t piece = bytes - at < ZS_PEER_STAGE ? bytes - at : ZS_PEER_STAGE;
        ZS_TRY(broadcast_piece(self, (char *)data + at, piece, root));
    }
    return bytes > 0 ? zs_peer_watch_move(self, ZS_STREAM_COMPUTE, "broadcast", "") : ZS_OK;
}

static zs_status peer_mem_new(zs_backend *backend, zs_moved what, size_t bytes, zs_mem **out)
{
    bool read_by_peers = what == ZS_MOVED_SHARD || what == ZS_MOVED_BUCKET;
    if (!read_by_peers) return zs_device_mem_new(backend->device, bytes, out);
    return zs_peer_mem_new(backend->device, bytes, out);
}

/* --- making and ending ----------------------------------------------------------------------------------------------------- */

/* Peers may wait for what is queued here still; but not for ever, where they have gone another way. */
static void peer_close(zs_backend *backend)
{
    zs_peer *self = (zs_peer *)backend;
    if (self->lifetime != zs_lifetime()) return;
    bool clean = zs_last_status() == ZS_OK;
    if (zs_peer_drain(self, 10.0) != ZS_OK) {
        zs_peer_abort(backend, "the transport closed while work on its GPU was still waiting for other ranks");
        (void)zs_peer_drain(self, 10.0);
    }
    zs_peer_part(self);
    if (clean) zs_clear_error();
}

static void peer_destroy(zs_backend *backend)
{
    zs_peer *self = (zs_peer *)backend;
    bool own = self->lifetime == zs_lifetime(); /* a forked child has nothing on the GPU */
    if (own && self->pads != NULL && self->pads[backend->rank] != NULL) peer_close(backend);
    zs_peer_watch_end(self);
    for (zs_stream stream = 0; stream < ZS_STREAMS && own; stream++)
        zs_mem_release(self->stages[stream]);
    if (own) zs_peer_give_back(self);
    zs_kin_free(self->kin);
    zs_comm_release(self->control);
    free(self->pads);
    free(self);
}

static const zs_backend_ops peer_ops = {
    .table = &zs_peer_ops,
    .gather = peer_gather,
    .broadcast = peer_broadcast,
    .mem_new = peer_mem_new,
    .gone = zs_peer_gone,
    .settle = zs_peer_settle,
    .check = zs_peer_check,
    .abort = zs_peer_abort,
    .close = peer_close,
    .destroy = peer_destroy,
};

/* What the ranks say to each other at birth. */
typedef struct card {
    int32_t status;
    char why[256]; /* where that is no ZS_OK */
    zs_kin_card kin;
    zs_peer_address pad;
} card;

/* All ranks say how it went; fails alike on all of them where it has not on one. */
static zs_status agree(zs_peer *self, zs_status status, card *own, card *all)
{
    own->status = (int32_t)status;
    snprintf(own->why, sizeof own->why, "%s", status == ZS_OK ? "" : zs_last_message());
    zs_clear_error();
    ZS_TRY(zs_comm_exchange(self->control, own, sizeof *own, all));
    for (int r = 0; r < self->base.world; r++)
        if (all[r].status != ZS_OK)
            return ZS_FAIL((zs_status)all[r].status, "transport 'peer' on rank %d: %s", r, all[r].why);
    return ZS_OK;
}

static zs_status make_pad(zs_peer *self, zs_peer_address *address)
{
    int world = self->base.world;
    self->pads = calloc((size_t)world, sizeof *self->pads);
    if (self->pads == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the addresses of %d ranks", world);
    ZS_TRY(zs_kin_new(self->base.rank, world, &self->kin));
    ZS_TRY(zs_peer_maps_new(self->base.rank, world, &self->maps));
    ZS_TRY(zs_peer_pad_new(self->base.device, zs_peer_pad_bytes(world) + ZS_PEER_STAGE, &self->pad));
    ZS_TRY(zs_peer_tell(self->maps, self->pad->ptr, address));
    self->pads[self->base.rank] = self->pad->ptr;
    return zs_device_wait(self->base.device); /* zeroed before a peer writes there */
}

/* The first that is mapped of a peer: if this can be, the rest can. The driver does not say that it is the GPU which is hidden. */
static zs_status map_pad(zs_peer *self, int r, const zs_peer_address *pad)
{
    char why[256];
    zs_status status = zs_peer_map(self->maps, r, pad, &self->pads[r]);
    if (status != ZS_ERR_CUDA) return status;
    snprintf(why, sizeof why, "%s", zs_last_message());
    zs_clear_error();
    return ZS_FAIL(status,
                   "rank %d cannot map the GPU memory of rank %d: %s; make the GPUs of all ranks visible to each rank "
                   "(CUDA_VISIBLE_DEVICES), with peer access between them, or pass transport='nccl'",
                   self->base.rank, r, why);
}

static zs_status map_pads(zs_peer *self, const card *all)
{
    for (int r = 0; r < self->base.world; r++) {
        if (r == self->base.rank) continue;
        if (!zs_kin_near(&all[r].kin, &all[self->base.rank].kin))
            return ZS_FAIL(
                ZS_ERR_UNSUPPORTED,
                "rank %d runs on another host or in another container, so its GPU memory cannot be mapped: pass "
                "transport='nccl'",
                r);
        zs_kin_meet(self->kin, r, &all[r].kin);
        ZS_TRY(map_pad(self, r, &all[r].pad));
    }
    zs_peer_maps_keep(self->maps);
    return zs_peer_watch_begin(self);
}

static zs_status meet_peers(zs_peer *self)
{
    card own, all[self->base.world];
    memset(&own, 0, sizeof own);
    zs_kin_own_card(&own.kin);
    ZS_TRY(agree(self, make_pad(self, &own.pad), &own, all));
    zs_status status = map_pads(self, all);
    return agree(self, status, &own, all);
}

zs_status zs_backend_peer_new(zs_comm *control, const zs_device *device, zs_backend **out)
{
    zs_peer *self = calloc(1, sizeof *self);
    if (self == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the peer backend");
    self->base = (zs_backend){&peer_ops, device, control->rank, control->world};
    self->control = zs_comm_retain(control);
    self->lifetime = zs_lifetime();
    pthread_mutex_init(&self->watch.lock, NULL);
    zs_status status = meet_peers(self);
    if (status == ZS_OK)
        *out = &self->base;
    else
        peer_destroy(&self->base);
    return status;
}
