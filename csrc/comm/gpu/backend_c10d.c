/* backend_c10d.c - moves device memory by torch's own process group.
 *
 * Torch orders its collectives with its current stream, which is the compute stream. So each call makes the compute
 * stream wait for the requested stream, lets torch work there, and makes that stream wait in turn: always correct,
 * and never concurrent with computation. */
#define _GNU_SOURCE /* strdup */
#include "comm/comm_local.h"
#include "comm/gpu/backend.h"
#include "shim/tensor.h"

#include <stdlib.h>
#include <string.h>

typedef struct c10d_backend {
    zs_backend base;
    zs_group *group;
    double timeout;
    zs_mem *sent; /* owned: pieces in flight; NULL: none yet */
    char *why;    /* why it was aborted; owned */
} c10d_backend;

static zs_status usable(const c10d_backend *self)
{
    return self->why == NULL ? ZS_OK : ZS_FAIL(ZS_ERR_STATE, "%s", self->why);
}

/* (NCCL) Makes the compute stream wait; (gloo) waits. */
static zs_status finish(c10d_backend *self, zs_work *work)
{
    bool done = false;
    zs_status status = zs_work_wait(work, self->timeout, &done);
    if (!done)
        return ZS_FAIL(
            ZS_ERR_TIMEOUT,
            "a collective on the torch process group did not finish within %g s: another rank is late, hangs "
            "in a kernel or diverged; run the same modules in the same order on all ranks, or raise timeout",
            self->timeout);
    zs_work_free(work);
    return status;
}

static zs_status c10d_gather(zs_backend *backend, zs_stream stream, const void *shard, char *full, size_t bytes)
{
    c10d_backend *self = (c10d_backend *)backend;
    zs_work *work = NULL;
    ZS_TRY(usable(self));
    ZS_TRY(zs_device_join(backend->device, stream));
    ZS_TRY(zs_group_all_gather(self->group, shard, full, bytes, backend->world, &work));
    ZS_TRY(finish(self, work));
    return zs_device_fork(backend->device, stream);
}

static zs_status make_room(c10d_backend *self, size_t bytes)
{
    if (self->sent != NULL && self->sent->bytes >= bytes) return ZS_OK;
    zs_mem_release(self->sent);
    self->sent = NULL;
    return zs_device_mem_new(self->base.device, bytes, &self->sent);
}

/* Arranges this rank's shards for sending: a piece for each rank. */
static zs_status pack(c10d_backend *self, const zs_swap *swap)
{
    ZS_TRY(make_room(self, swap->stride * (size_t)self->base.world));
    for (int r = 0; r < self->base.world; r++) {
        char *piece = (char *)self->sent->ptr + (size_t)r * swap->stride;
        for (int f = 0; f < swap->n && swap->send[0] != NULL; f++) {
            const char *shard = swap->send[f] + (size_t)swap->shard_of[r] * swap->bytes[f];
            ZS_TRY(zs_device_copy(self->base.device, ZS_STREAM_COMPUTE, piece + swap->at[f], shard, swap->bytes[f]));
        }
    }
    return ZS_OK;
}

static zs_status c10d_swap(zs_backend *backend, const zs_swap *swap)
{
    c10d_backend *self = (c10d_backend *)backend;
    zs_work *work = NULL;
    ZS_TRY(usable(self));
    ZS_TRY(zs_device_join(backend->device, ZS_STREAM_REDUCE)); /* `receive` may still be read there */
    ZS_TRY(pack(self, swap));
    ZS_TRY(zs_group_all_to_all(self->group, self->sent->ptr, swap->receive, swap->stride, backend->world, &work));
    ZS_TRY(finish(self, work));
    return zs_device_fork(backend->device, ZS_STREAM_REDUCE);
}

static zs_status c10d_broadcast(zs_backend *backend, void *data, size_t bytes, int root)
{
    c10d_backend *self = (c10d_backend *)backend;
    zs_work *work = NULL;
    ZS_TRY(usable(self));
    ZS_TRY(zs_group_broadcast(self->group, data, bytes, root, &work));
    return finish(self, work);
}

static void c10d_abort(zs_backend *backend, const char *why)
{
    c10d_backend *self = (c10d_backend *)backend;
    if (self->why == NULL) self->why = strdup(why);
}

static void c10d_destroy(zs_backend *backend)
{
    c10d_backend *self = (c10d_backend *)backend;
    zs_mem_release(self->sent);
    zs_group_free(self->group);
    free(self->why);
    free(self);
}

static const zs_backend_ops c10d_ops = {
    .table = &zs_c10d_gpu_ops,
    .gather = c10d_gather,
    .swap = c10d_swap,
    .broadcast = c10d_broadcast,
    .abort = c10d_abort,
    .destroy = c10d_destroy,
};

zs_status zs_backend_c10d_new(const zs_comm *control, const zs_device *device, const char *group_name, zs_backend **out)
{
    c10d_backend *self = calloc(1, sizeof *self);
    if (self == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the c10d backend");
    self->base = (zs_backend){&c10d_ops, device, control->rank, control->world, true}; /* gloo waits */
    self->timeout = control->timeout;
    zs_status status = zs_group_new(group_name, &self->group);
    if (status == ZS_OK) {
        zs_group_on(self->group, device->where);
        zs_group_set_timeout(self->group, control->timeout);
        *out = &self->base;
    } else {
        c10d_destroy(&self->base);
    }
    return status;
}
