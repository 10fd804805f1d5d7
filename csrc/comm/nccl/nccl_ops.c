/* nccl_ops.c - the operations of nccl_comm.h.
 *
 * Each is one call of NCCL between enter and leave, and is on the stream when it returns. Bytes travel as int8: for
 * operations that only move them, NCCL treats them so anyway. */
#include "comm/nccl/nccl_local.h"

#include "base/file.h"

static const size_t most_bytes = SIZE_MAX / 4; /* above this, counts and ends would overflow */

/* Do [a, a + a_bytes) and [b, b + b_bytes) overlap? */
static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    uintptr_t first = (uintptr_t)a, second = (uintptr_t)b;
    return first < second + b_bytes && second < first + a_bytes;
}

/* Requirements of every operation on its memory: not NULL, and not too large. */
static zs_status check_memory(const zs_nccl_comm *comm, const char *call, const void *send, const void *receive,
                              size_t bytes)
{
    if (bytes > most_bytes / (size_t)comm->world)
        return ZS_FAIL(ZS_ERR_VALUE, "NCCL, communicator '%s': %s of %zu bytes for each of %d ranks is too large",
                       comm->name, call, bytes, comm->world);
    if (send != NULL && receive != NULL) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE, "NCCL, communicator '%s': the %s buffer of %s must not be NULL", comm->name,
                   send == NULL ? "send" : "receive", call);
}

zs_status zs_nccl_all_gather(zs_nccl_comm *comm, const void *shard, void *full, size_t shard_bytes, void *stream)
{
    if (shard_bytes == 0) return zs_nccl_comm_check(comm);
    ZS_TRY(check_memory(comm, "all_gather", shard, full, shard_bytes));
    const char *place = (const char *)full + (size_t)comm->rank * shard_bytes;
    if (shard != place && overlap(shard, shard_bytes, full, shard_bytes * (size_t)comm->world))
        return ZS_FAIL(ZS_ERR_VALUE,
                       "NCCL, communicator '%s': the shard of all_gather overlaps the full buffer, but not at the "
                       "offset of rank %d",
                       comm->name, comm->rank);
    ZS_TRY(zs_nccl_enter(comm));
    zs_nccl_result result = comm->nccl->AllGather(shard, full, shard_bytes, ZS_NCCL_INT8, comm->handle, stream);
    return zs_nccl_leave(comm, zs_nccl_settle(comm, "AllGather", result));
}

/* With the lock held. */
static zs_status in_one_launch(zs_nccl_comm *comm, const zs_message *messages, size_t count, void *stream)
{
    const zs_nccl *nccl = comm->nccl;
    const char *call = "GroupStart";
    zs_nccl_result result = nccl->GroupStart();
    if (result != ZS_NCCL_SUCCESS) return zs_nccl_settle(comm, call, result);
    for (size_t i = 0; i < count && result == ZS_NCCL_SUCCESS; i++) {
        const zs_message *m = &messages[i];
        call = "Send";
        result = nccl->Send(m->send, m->bytes, ZS_NCCL_INT8, m->peer, comm->handle, stream);
        if (result != ZS_NCCL_SUCCESS) break;
        call = "Recv";
        result = nccl->Recv(m->receive, m->bytes, ZS_NCCL_INT8, m->peer, comm->handle, stream);
    }
    zs_nccl_result end = nccl->GroupEnd(); /* also after a failure: an open group would swallow later calls */
    bool failed = result != ZS_NCCL_SUCCESS && result != ZS_NCCL_IN_PROGRESS;
    return failed ? zs_nccl_settle(comm, call, result) : zs_nccl_settle(comm, "GroupEnd", end);
}

zs_status zs_nccl_messages(zs_nccl_comm *comm, const zs_message *messages, size_t count, void *stream)
{
    for (size_t i = 0; i < count; i++) {
        const zs_message *m = &messages[i];
        if (m->peer < 0 || m->peer >= comm->world)
            return ZS_FAIL(ZS_ERR_VALUE, "rank %d is out of range for world size %d", m->peer, comm->world);
        if (m->bytes == 0)
            return ZS_FAIL(ZS_ERR_VALUE, "NCCL, communicator '%s': cannot send a message of 0 bytes", comm->name);
        ZS_TRY(check_memory(comm, "send/recv", m->send, m->receive, m->bytes));
    }
    if (count == 0) return zs_nccl_comm_check(comm);
    ZS_TRY(zs_nccl_enter(comm));
    return zs_nccl_leave(comm, in_one_launch(comm, messages, count, stream));
}

zs_status zs_nccl_broadcast(zs_nccl_comm *comm, void *data, size_t bytes, int root, void *stream)
{
    if (root < 0 || root >= comm->world)
        return ZS_FAIL(ZS_ERR_VALUE, "rank %d is out of range for world size %d", root, comm->world);
    if (bytes == 0) return zs_nccl_comm_check(comm);
    ZS_TRY(check_memory(comm, "broadcast", data, data, bytes));
    ZS_TRY(zs_nccl_enter(comm));
    zs_nccl_result result = comm->nccl->Broadcast(data, data, bytes, ZS_NCCL_INT8, root, comm->handle, stream);
    return zs_nccl_leave(comm, zs_nccl_settle(comm, "Broadcast", result));
}
