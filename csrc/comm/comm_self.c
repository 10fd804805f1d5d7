/* comm_self.c - the transport of a world of one: the shard is the full buffer, the bucket is the sum's only source. */
#include "comm/comm_local.h"

#include <stdlib.h>
#include <string.h>

static zs_status self_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out)
{
    ZS_TRY(zs_local_flat_new(comm, shard_bytes, out));
    out->full = out->shard;
    return ZS_OK;
}

static zs_status self_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    (void)comm;
    ZS_TRY(zs_check_exchange(bytes));
    memmove(all, mine, bytes);
    return ZS_OK;
}

static zs_status self_broadcast(zs_comm *comm, void *data, size_t bytes, int root)
{
    (void)data;
    (void)bytes;
    return zs_check_root(comm, root);
}

static size_t self_bytes(const zs_comm *comm)
{
    (void)comm;
    return 0;
}

static zs_room self_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    (void)comm;
    (void)spec;
    return (zs_room){0};
}

static void self_abort(zs_comm *comm, const char *reason)
{
    (void)comm;
    (void)reason;
}

static void self_close(zs_comm *comm)
{
    (void)comm;
}

static void self_destroy(zs_comm *comm)
{
    free(comm);
}

static const zs_flat_ops self_flats = {
    .flat_new = self_flat_new,
    .flat_free = zs_local_flat_free,
};

static const zs_round_ops self_rounds = {
    .bucket_new = zs_local_bucket_new,
    .bucket_free = zs_local_bucket_free,
    .bucket_room = zs_local_bucket_room,
    .room = self_room,
};

static const zs_talk_ops self_talk = {
    .exchange = self_exchange,
    .broadcast = self_broadcast,
    .abort = self_abort,
};

const zs_comm_ops zs_self_ops = {
    .name = "self",
    .shard_align = 64,
    .mapped = true,
    .flats = &self_flats,
    .rounds = &self_rounds,
    .readers = &zs_local_reader_ops,
    .talk = &self_talk,
    .bytes = self_bytes,
    .close = self_close,
    .destroy = self_destroy,
};

zs_status zs_comm_self_new(const zs_device *device, zs_comm **out)
{
    zs_comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the self transport");
    comm->ops = &zs_self_ops;
    comm->world = 1;
    comm->device = device;
    zs_refs_init(&comm->refs);
    *out = comm;
    return ZS_OK;
}
