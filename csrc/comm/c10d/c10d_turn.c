/* c10d_turn.c - exchanges turns (comm/turn.h) over a process group. See c10d.h.
 *
 * A process group pairs collectives up by order alone. So a small gather of fixed size precedes each, in which every
 * rank sends its turn. Ranks that diverged would otherwise sum unrelated data, or gloo would abort the process on a
 * message of another length. */
#include "comm/c10d/c10d.h"

#include <string.h>

static zs_status exchange(zs_comm *comm, const zs_turn *mine, zs_turn *turns)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    zs_work *work = NULL;
    zs_group_set_timeout(self->group, comm->timeout);
    zs_status status = zs_group_all_gather(self->group, mine, turns, sizeof *mine, comm->world, &work);
    return status == ZS_OK ? zs_c10d_finish_turn(self, mine, work) : zs_c10d_fail(self, mine, status);
}

static zs_status exchange_texts(zs_comm *comm, const zs_turn *turn, zs_diagnostics *all)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    size_t bytes = (size_t)comm->world * sizeof *all;
    zs_mem *area = NULL;
    ZS_TRY(zs_c10d_borrow_area(self, bytes + sizeof *all, &area));
    char *received = area->ptr, *mine = received + bytes;
    memcpy(mine, &comm->texts, sizeof *all);
    zs_work *work = NULL;
    zs_status status = zs_group_all_gather(self->group, mine, received, sizeof *all, comm->world, &work);
    ZS_THEN(status, zs_c10d_finish(self, turn, work, NULL));
    if (status == ZS_OK) memcpy(all, received, bytes);
    zs_c10d_return_area(self, &area);
    return status;
}

/* The result is discarded. */
static zs_status serve(zs_comm *comm, const zs_turn *turn, const char *shard, zs_mem *mem)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    zs_mem *area = NULL;
    zs_work *work = NULL;
    zs_status status = zs_c10d_borrow_area(self, (size_t)comm->world * turn->bytes, &area);
    if (status != ZS_OK) return zs_c10d_fail(self, turn, status); /* the others have already begun it */
    status = zs_group_all_gather(self->group, shard, area->ptr, turn->bytes, comm->world, &work);
    zs_traffic_from_each(comm, ZS_TRAFFIC_GATHER, turn->bytes);
    status = status == ZS_OK ? zs_c10d_finish(self, turn, work, NULL) : zs_c10d_fail(self, turn, status);
    zs_c10d_leave_source(self, mem);
    zs_c10d_return_area(self, &area);
    return status;
}

zs_status zs_c10d_check_usable(zs_comm *comm)
{
    if (zs_c10d_is_forked((zs_c10d_comm *)comm))
        return ZS_FAIL(ZS_ERR_STATE,
                       "a process forked from rank %d cannot use its process group; start it with 'spawn'", comm->rank);
    if (comm->lost != NULL)
        return ZS_FAIL(ZS_ERR_PEER,
                       "cannot run a collective on this process group after an earlier failure; restart all ranks: %s",
                       comm->lost);
    return ZS_OK;
}

static zs_status fail(zs_comm *comm, const zs_turn *turn, zs_status status)
{
    return zs_c10d_fail((zs_c10d_comm *)comm, turn, status);
}

const zs_turns_ops zs_c10d_turns_ops = {exchange, exchange_texts, serve, zs_c10d_check_usable, fail};

zs_status zs_c10d_agree(zs_c10d_comm *comm, const zs_turn *turn)
{
    ZS_TRY(zs_c10d_check_usable(&comm->base));
    if (comm->wait_queued != NULL) ZS_TRY(comm->wait_queued(comm));
    zs_mem *area = NULL;
    ZS_TRY(zs_c10d_borrow_area(comm, (size_t)(comm->base.world + 1) * sizeof *turn, &area));
    zs_status status = zs_turns_agree(&comm->base, turn, area->ptr);
    zs_c10d_return_area(comm, &area);
    return status;
}
