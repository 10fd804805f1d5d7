/* comm_dry.c - fakes of transports, for plans that only need sizes.
 *
 * A model's memory follows from its layout, from its transport's rounding and from the transport's own memory. So
 * the dry-run transport is the real one's table without all that would contact peers or allocate memory; engines and
 * units on it (zs_unit_spec.dry_run) are measured as real ones are. */
#include "comm/comm_local.h"

#include <stdlib.h>
#include <string.h>

typedef struct dry_comm {
    zs_comm base;
    zs_comm_ops ops; /* its own: another transport's name and sizes */
    zs_round_ops rounds;
} dry_comm;

/* The table of the transport `name` (zs_comm_ops.name); NULL if there is none. */
static const zs_comm_ops *ops_of(const char *name)
{
    const zs_comm_ops *tables[] = {&zs_self_ops,  &zs_shm_ops,  &zs_c10d_ops,
                                   &zs_hosts_ops, &zs_nccl_ops, &zs_c10d_gpu_ops};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (strcmp(tables[i]->name, name) == 0) return tables[i];
    return NULL;
}

/* The peers would send the same bytes as this rank. */
static zs_status dry_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    for (int r = 0; r < comm->world; r++)
        memcpy((char *)all + (size_t)r * bytes, mine, bytes);
    return ZS_OK;
}

static size_t dry_bytes(const zs_comm *comm)
{
    return zs_comm_room(comm, NULL).fixed;
}

static void dry_close(zs_comm *comm)
{
    (void)comm;
}

static void dry_destroy(zs_comm *comm)
{
    free((dry_comm *)comm);
}

static const zs_reader_ops dry_readers = {.reader_new = zs_local_reader_new, .reader_free = zs_local_reader_free};
static const zs_talk_ops dry_talk = {.exchange = dry_exchange};

zs_status zs_comm_dry_new(const char *name, const zs_ranks_of_hosts *ranks, zs_comm **out)
{
    const zs_comm_ops *real = ops_of(name);
    if (real == NULL) return ZS_FAIL(ZS_ERR_VALUE, "unknown transport '%s'", name);
    ZS_TRY(zs_check_ranks_of_hosts(ranks));
    dry_comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a dry-run transport");
    comm->rounds = (zs_round_ops){.room = real->rounds->room, .bucket_room = real->rounds->bucket_room};
    comm->ops = (zs_comm_ops){.name = real->name,
                              .shard_align = real->shard_align,
                              .mapped = real->mapped,
                              .shares_slots = real->shares_slots,
                              .rounds = &comm->rounds,
                              .readers = &dry_readers,
                              .talk = &dry_talk,
                              .code_room = real->code_room,
                              .codes_apart = real->codes_apart,
                              .bytes = dry_bytes,
                              .close = dry_close,
                              .destroy = dry_destroy};
    comm->base.ops = &comm->ops;
    comm->base.rank = ranks->rank;
    comm->base.world = ranks->world;
    comm->base.per_host = ranks->per_host;
    comm->base.device = zs_device_cpu();
    zs_refs_init(&comm->base.refs);
    *out = &comm->base;
    return ZS_OK;
}
