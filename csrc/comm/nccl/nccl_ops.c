/* nccl_ops.c - the operations of nccl_comm.h.
 *
 * Each is one call of NCCL between enter and leave, and is on the stream when it returns. Bytes travel as int8:
 * what only moves them, NCCL treats so anyway.
 */
#include "comm/nccl/nccl_local.h"

#include "base/file.h"

static const size_t most_bytes = SIZE_MAX / 4; /* beyond, counts and ends would overflow */

/* Do [a, a + a_bytes) and [b, b + b_bytes) touch? */
static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    uintptr_t first = (uintptr_t)a, second = (uintptr_t)b;
    return first < second + b_bytes && second < first + a_bytes;
}

/* What every operation asks of its memory: `parts` pieces of `bytes`, all there. */
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
static zs_status in_one_launch(zs_nccl_comm *comm, const zs_nccl_message *messages, size_t count, void *stream)
{
    const zs_nccl *nccl = comm->nccl;
    const char *call = "GroupStart";
    zs_nccl_result result = nccl->GroupStart();
    if (result != ZS_NCCL_SUCCESS) return zs_nccl_settle(comm, call, result);
    for (size_t i = 0; i < count && result == ZS_NCCL_SUCCESS; i++) {
        const zs_nccl_message *m = &messages[i];
        call = "Send";
        result = nccl->Send(m->send, m->bytes, ZS_NCCL_INT8, m->peer, comm->handle, stream);
        if (result != ZS_NCCL_SUCCESS) break;
        call = "Recv";
        result = nccl->Recv(m->receive, m->bytes, ZS_NCCL_INT8, m->peer, comm->handle, stream);
    }
    zs_nccl_result end =
        nccl->GroupEnd(); /* also after a failure: a group that stays open would swallow what follows */
    bool failed = result != ZS_NCCL_SUCCESS && result != ZS_NCCL_IN_PROGRESS;
    return failed ? zs_nccl_settle(comm, call, result) : zs_nccl_settle(comm, "GroupEnd", end);
}

zs_status zs_nccl_messages(zs_nccl_comm *comm, const zs_nccl_message *messages, size_t count, void *stream)
{
    for (size_t i = 0; i < count; i++) {
        const zs_nccl_message *m = &messages[i];
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

/* All-to-all of a library that has none. With the lock held. */
static zs_status send_and_receive(zs_nccl_comm *comm, const char *send, char *receive, size_t bytes, void *stream)
{
    zs_nccl_message messages[comm->world];
    for (int r = 0; r < comm->world; r++)
        messages[r] = (zs_nccl_message){send + (size_t)r * bytes, receive + (size_t)r * bytes, bytes, r};
    return in_one_launch(comm, messages, (size_t)comm->world, stream);
}

zs_status zs_nccl_all_to_all(zs_nccl_comm *comm, const void *send, void *receive, size_t piece_bytes, void *stream)
{
    if (piece_bytes == 0) return zs_nccl_comm_check(comm);
    ZS_TRY(check_memory(comm, "all_to_all", send, receive, piece_bytes));
    size_t whole = piece_bytes * (size_t)comm->world;
    if (overlap(send, whole, receive, whole))
        return ZS_FAIL(ZS_ERR_VALUE, "NCCL, communicator '%s': the send and receive buffers of all_to_all overlap",
                       comm->name);
    ZS_TRY(zs_nccl_enter(comm));
    if (comm->nccl->AlltoAll == NULL)
        return zs_nccl_leave(comm, send_and_receive(comm, send, receive, piece_bytes, stream));
    zs_nccl_result result = comm->nccl->AlltoAll(send, receive, piece_bytes, ZS_NCCL_INT8, comm->handle, stream);
    return zs_nccl_leave(comm, zs_nccl_settle(comm, "AlltoAll", result));
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

/* --- sums ------------------------------------------------------------------------------------------------------------- */

/* NCCL's numbers for what is to be reduced. */
static zs_status translate(const zs_nccl_comm *comm, const zs_nccl_reduction *what, zs_nccl_type *type,
                           zs_nccl_redop *op)
{
    static const zs_nccl_redop ops[] = {ZS_NCCL_REDOP_SUM, ZS_NCCL_REDOP_AVG, ZS_NCCL_REDOP_MAX};
    switch (what->dtype) {
    case ZS_F32: *type = ZS_NCCL_FLOAT32; break;
    case ZS_F64: *type = ZS_NCCL_FLOAT64; break;
    case ZS_BF16: *type = ZS_NCCL_BFLOAT16; break;
    case ZS_F16: *type = ZS_NCCL_FLOAT16; break;
    default:
        return ZS_FAIL(ZS_ERR_VALUE, "NCCL, communicator '%s': can only reduce floating-point tensors, got dtype %d",
                       comm->name, (int)what->dtype);
    }
    if (what->op < ZS_NCCL_SUM || what->op > ZS_NCCL_MAX)
        return ZS_FAIL(ZS_ERR_VALUE, "NCCL, communicator '%s': unknown reduction %d", comm->name, (int)what->op);
    *op = ops[what->op];
    return ZS_OK;
}

zs_status zs_nccl_reduce_scatter(zs_nccl_comm *comm, const zs_nccl_reduction *what, void *stream)
{
    zs_nccl_type type = 0;
    zs_nccl_redop op = 0;
    ZS_TRY(translate(comm, what, &type, &op));
    if (what->numel == 0) return zs_nccl_comm_check(comm);
    ZS_TRY(check_memory(comm, "reduce_scatter", what->send, what->receive, what->numel));
    ZS_TRY(zs_nccl_enter(comm));
    zs_nccl_result result =
        comm->nccl->ReduceScatter(what->send, what->receive, what->numel, type, op, comm->handle, stream);
    return zs_nccl_leave(comm, zs_nccl_settle(comm, "ReduceScatter", result));
}

zs_status zs_nccl_all_reduce(zs_nccl_comm *comm, const zs_nccl_reduction *what, void *stream)
{
    zs_nccl_type type = 0;
    zs_nccl_redop op = 0;
    ZS_TRY(translate(comm, what, &type, &op));
    if (what->numel == 0) return zs_nccl_comm_check(comm);
    ZS_TRY(check_memory(comm, "all_reduce", what->send, what->receive, what->numel));
    ZS_TRY(zs_nccl_enter(comm));
    zs_nccl_result result =
        comm->nccl->AllReduce(what->send, what->receive, what->numel, type, op, comm->handle, stream);
    return zs_nccl_leave(comm, zs_nccl_settle(comm, "AllReduce", result));
}
