/* gpu_state.c - the state of a transport for GPUs: usable or not, and the memory that it receives into. See gpu.h. */
#define _GNU_SOURCE /* strdup */
#include "comm/gpu/gpu.h"
#include "comm/where.h"

#include <stdio.h>
#include <string.h>

/* --- failures ----------------------------------------------------------------------------------------------------- */

/* Backends have no units. */
static zs_status name_last(const zs_gpu_comm *comm)
{
    return zs_rephrase("%s; transfer %llu, the last that rank %d queued, is %s", zs_last_message(),
                       (unsigned long long)comm->order.count, comm->base.rank, zs_gpu_order_last(comm));
}

/* A backend only sees that a peer's process has ended; the hosts have the peer's last report. */
static zs_status with_reason(zs_gpu_comm *comm, zs_status status)
{
    zs_status (*check)(zs_comm *) = comm->control->ops->talk->check_peers;
    if (status != ZS_ERR_PEER || comm->control->failed || check == NULL) return status;
    char without[2048];
    snprintf(without, sizeof without, "%s", zs_last_message());
    zs_clear_error();
    zs_status reported = check(comm->control);
    return reported == ZS_OK ? ZS_FAIL(status, "%s", without) : reported;
}

zs_status zs_gpu_fail(zs_gpu_comm *comm, zs_status status)
{
    if (comm->base.lost != NULL) return status;
    status = with_reason(comm, status);
    zs_comm_locate(comm->control, status);
    if (status == ZS_ERR_TIMEOUT && comm->last != NULL) status = name_last(comm);
    comm->base.lost = strdup(zs_last_message());
    zs_comm_abort(comm->control, zs_last_message());
    comm->backend->ops->abort(comm->backend, zs_last_message());
    return status;
}

zs_status zs_gpu_after_wait(zs_gpu_comm *comm, zs_status status)
{
    return status == ZS_ERR_TORCH ? zs_gpu_fail(comm, status) : status;
}

zs_status zs_gpu_usable(zs_gpu_comm *comm)
{
    if (comm->base.lost != NULL)
        return ZS_FAIL(ZS_ERR_STATE, "cannot continue after an earlier failure; restart all ranks: %s",
                       comm->base.lost);
    if (comm->backend->ops->check == NULL) return ZS_OK;
    zs_status status = comm->backend->ops->check(comm->backend);
    return status == ZS_OK ? ZS_OK : zs_gpu_fail(comm, status);
}

/* --- areas -------------------------------------------------------------------------------------------------------- */

zs_status zs_gpu_make_areas(zs_gpu_comm *comm)
{
    return comm->areas != NULL ? ZS_OK : zs_arena_new(comm->base.device, &comm->areas);
}

zs_status zs_gpu_take_area(zs_gpu_comm *comm, size_t bytes, zs_mem **area)
{
    ZS_TRY(zs_gpu_make_areas(comm));
    return zs_arena_take(comm->areas, bytes, area);
}

zs_status zs_gpu_take_codes(zs_gpu_comm *comm, size_t bytes, zs_mem **area)
{
    ZS_TRY(zs_gpu_make_areas(comm));
    return zs_arena_take_apart(comm->areas, bytes, area);
}

void zs_gpu_return_area(const zs_gpu_comm *comm, zs_mem **area)
{
    if (*area != NULL) zs_arena_give(comm->areas, *area);
    *area = NULL;
}
