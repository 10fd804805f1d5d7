/* comm_c10d.c - the transport over a process group of torch.distributed: anything that gloo or MPI reaches.
 *
 * The one idea: everything is a collective, and collectives pair up by order: all ranks gather and reduce their units in
 * one order (the schedule sees to it), and errors come in the process group's words with what it was for put before.
 */
#include "c10d.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- errors --------------------------------------------------------------------------------------------------------------- */

/* Says in this thread's record what the failed collective was for. */
zs_status zs_c10d_explain(zs_status status, int rank, const char *what, const char *name)
{
    char words[640];
    if (status == ZS_OK) return ZS_OK;
    snprintf(words, sizeof words, "%s", zs_last_message());
    zs_clear_error();
    return ZS_FAIL(status, "rank %d, %s%s%s%s: %s", rank, what, name[0] ? " '" : "", name, name[0] ? "'" : "", words);
}

zs_group *zs_c10d_group(zs_comm *comm)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    zs_group_set_timeout(self->group, comm->timeout);
    return self->group;
}

/* --- flats ---------------------------------------------------------------------------------------------------------------- */

static zs_status c10d_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out)
{
    (void)comm;
    ZS_TRY(zs_mem_new_private(shard_bytes, &out->mem));
    out->shard = out->mem->ptr;
    out->full = NULL;
    out->shard_bytes = shard_bytes;
    return ZS_OK;
}

static zs_status c10d_gather(zs_comm *comm, const zs_flat_mem *flat, void *full)
{
    zs_status status = zs_group_all_gather(zs_c10d_group(comm), flat->shard, full, flat->shard_bytes, comm->world);
    return zs_c10d_explain(status, comm->rank, "gathering parameters", "");
}

/* --- small collectives, birth and end --------------------------------------------------------------------------------------- */

static zs_status c10d_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    ZS_TRY(zs_check_exchange(bytes));
    /* A barrier even without bytes to say; a private copy, since `mine` may lie in `all`. */
    char box[4097] = "";
    memcpy(box, mine, bytes);
    if (bytes > 0) {
        zs_status status = zs_group_all_gather(zs_c10d_group(comm), box, all, bytes, comm->world);
        return zs_c10d_explain(status, comm->rank, "exchanging a message", "");
    }
    char *signs = malloc((size_t)comm->world);
    if (signs == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for a barrier");
    zs_status status = zs_group_all_gather(zs_c10d_group(comm), box, signs, 1, comm->world);
    free(signs);
    return zs_c10d_explain(status, comm->rank, "waiting at a barrier", "");
}

static zs_status c10d_broadcast(zs_comm *comm, void *data, size_t bytes, int root)
{
    ZS_TRY(zs_check_root(comm, root));
    if (bytes == 0) return ZS_OK;
    zs_status status = zs_group_broadcast(zs_c10d_group(comm), data, bytes, root);
    return zs_c10d_explain(status, comm->rank, "broadcasting", "");
}

/* A process group has no way to tell: the peers hear it when this process ends, or by the deadline. */
static void c10d_abort(zs_comm *comm, const char *reason)
{
    (void)comm;
    (void)reason;
}

/* The process group is torch's. */
static void c10d_close(zs_comm *comm)
{
    (void)comm;
}

static void c10d_destroy(zs_comm *comm)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    for (size_t i = 0; i < self->n_areas; i++)
        zs_mem_release(self->areas[i].mem);
    free(self->areas);
    zs_group_free(self->group);
    free(self);
}

static const zs_comm_ops c10d_ops = {
    .name = "c10d",
    .shard_align = 64,
    .mapped = false,
    .flat_new = c10d_flat_new,
    .flat_free = zs_local_flat_free,
    .gather = c10d_gather,
    .bucket_new = zs_local_bucket_new,
    .bucket_free = zs_local_bucket_free,
    .cunit_new = zs_c10d_cunit_new,
    .cunit_free = zs_c10d_cunit_free,
    .post = zs_c10d_post,
    .collect = zs_c10d_collect,
    .share = zs_c10d_share,
    .collect_shared = zs_c10d_collect_shared,
    .release = zs_c10d_release,
    .reusable = zs_c10d_reusable,
    .reader_new = zs_local_reader_new,
    .reader_free = zs_local_reader_free,
    .read_begin = zs_local_read,
    .read_end = zs_local_read,
    .exchange = c10d_exchange,
    .broadcast = c10d_broadcast,
    .abort = c10d_abort,
    .close = c10d_close,
    .destroy = c10d_destroy,
};

zs_status zs_comm_c10d_new(const char *group_name, int rank, int world, double timeout, zs_comm **out)
{
    if (world < 1 || rank < 0 || rank >= world)
        return ZS_FAIL(ZS_ERR_VALUE, "there is no rank %d in a world of %d", rank, world);
    zs_c10d_comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for the c10d transport");
    comm->base.ops = &c10d_ops;
    comm->base.rank = rank;
    comm->base.world = world;
    comm->base.timeout = timeout;
    atomic_init(&comm->base.refs, 1);
    zs_status status = zs_group_new(group_name, &comm->group);
    if (status != ZS_OK) {
        free(comm);
        return status;
    }
    *out = &comm->base;
    return ZS_OK;
}
