/* comm_self.c - the transport of a world of one: the shard is the full buffer, the bucket is the sum's only source. */
#include "comm/comm_local.h"

#include <stdlib.h>
#include <string.h>

typedef struct self_unit {
    zs_cunit base;
    uint64_t *bitmap; /* copy of what post was given: the caller may go on changing its own */
} self_unit;

static zs_status self_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out)
{
    ZS_TRY(zs_device_mem_new(comm->device, shard_bytes, &out->mem));
    out->shard = out->mem->ptr;
    out->full = out->shard;
    out->shard_bytes = shard_bytes;
    return ZS_OK;
}

static void self_cunit_free(zs_comm *comm, zs_cunit *cunit)
{
    (void)comm;
    if (cunit == NULL) return;
    free(((self_unit *)cunit)->bitmap);
    zs_cunit_clear(cunit);
    free(cunit);
}

static zs_status self_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out)
{
    self_unit *unit = calloc(1, sizeof *unit);
    if (unit == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec->name);
    zs_status status = zs_cunit_init(&unit->base, spec, comm);
    if (status == ZS_OK) {
        unit->bitmap = calloc(unit->base.used_words, sizeof *unit->bitmap);
        if (unit->bitmap == NULL) status = ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec->name);
    }
    if (status != ZS_OK) {
        self_cunit_free(comm, &unit->base);
        return status;
    }
    *out = &unit->base;
    return ZS_OK;
}

static zs_status self_post(zs_comm *comm, zs_cunit *cunit, const zs_bucket *bucket, const uint64_t *used)
{
    self_unit *unit = (self_unit *)cunit;
    (void)comm;
    ZS_TRY(zs_cunit_may_post(cunit, bucket));
    memcpy(unit->bitmap, used, cunit->used_words * sizeof *used);
    cunit->data[0] = bucket == NULL ? NULL : bucket->ptr;
    cunit->used[0] = unit->bitmap;
    cunit->round++;
    cunit->state = ZS_ROUND_POSTED;
    return ZS_OK;
}

static zs_status self_collect(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    (void)comm;
    (void)wait;
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_POSTED, "collect"));
    cunit->state = ZS_ROUND_COLLECTED;
    zs_cunit_sources(cunit, out);
    *ready = true;
    return ZS_OK;
}

static zs_status self_share(zs_comm *comm, zs_cunit *cunit)
{
    (void)comm;
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_COLLECTED, "share"));
    cunit->state = ZS_ROUND_SHARED;
    return ZS_OK;
}

static zs_status self_collect_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    (void)comm;
    (void)wait;
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_SHARED, "collect_shared"));
    cunit->state = ZS_ROUND_GATHERED;
    zs_cunit_sources(cunit, out);
    *ready = true;
    return ZS_OK;
}

static zs_status self_release(zs_comm *comm, zs_cunit *cunit)
{
    (void)comm;
    ZS_TRY(zs_cunit_may_release(cunit));
    cunit->state = ZS_ROUND_NONE;
    return ZS_OK;
}

static zs_status self_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    (void)comm;
    (void)cunit;
    (void)wait;
    *ready = true; /* there is no peer that could still read */
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
    .cunit_new = self_cunit_new,
    .cunit_free = self_cunit_free,
    .post = self_post,
    .collect = self_collect,
    .share = self_share,
    .collect_shared = self_collect_shared,
    .release = self_release,
    .reusable = self_reusable,
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
