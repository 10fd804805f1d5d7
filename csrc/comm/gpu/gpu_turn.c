/* gpu_turn.c - how the ranks' hosts exchange turns (comm/turn.h) before each move. See gpu.h.
 *
 * Turns travel over the control transport; only the gathers themselves are the backend's. */
#include "comm/gpu/gpu.h"

#include <stdio.h>

/* --- exchanging --------------------------------------------------------------------------------------------------- */

/* A rank that has failed in a meeting may have left its part of the next one: the one after that reports why. */
static zs_status meet(const zs_gpu_comm *comm, const void *mine, size_t bytes, void *all)
{
    ZS_TRY(zs_comm_exchange(comm->control, mine, bytes, all));
    return zs_comm_is_stopped(comm->control) ? zs_comm_exchange(comm->control, mine, bytes, all) : ZS_OK;
}

static zs_status exchange(zs_comm *comm, const zs_turn *mine, zs_turn *turns)
{
    char call[ZS_CALL] = ""; /* which the turns have */
    zs_call_swap(call);
    zs_status status = meet((zs_gpu_comm *)comm, mine, sizeof *mine, turns);
    zs_call_swap(call);
    return status;
}

static zs_status exchange_texts(zs_comm *comm, const zs_turn *turn, zs_diagnostics *all)
{
    (void)turn;
    return zs_gpu_compare_hosts((zs_gpu_comm *)comm, &comm->texts, sizeof comm->texts, all);
}

/* The result is discarded. */
static zs_status queue(zs_gpu_comm *comm, const zs_turn *turn, const char *shard, const zs_mem *area)
{
    const zs_device *device = comm->base.device;
    zs_gpu_order_add(comm, "parameters", turn->name, turn->bytes);
    ZS_TRY(zs_device_fork(device, ZS_STREAM_GATHER));
    if (turn->round != ZS_WIRE_EXACT) {
        ZS_TRY(zs_gpu_gather_codes(comm, turn->bytes / 2, shard, area->ptr));
    } else {
        zs_traffic_from_each(&comm->base, ZS_TRAFFIC_GATHER, turn->bytes);
        ZS_TRY(comm->backend->ops->gather(comm->backend, ZS_STREAM_GATHER, shard, area->ptr, turn->bytes));
    }
    return zs_device_join(device, ZS_STREAM_GATHER);
}

static zs_status serve(zs_comm *base, const zs_turn *turn, const char *shard, zs_mem *mem)
{
    (void)mem;
    zs_gpu_comm *comm = (zs_gpu_comm *)base;
    zs_mem *area = NULL;
    ZS_TRY(zs_gpu_take_codes(comm, turn->bytes * (size_t)base->world, &area));
    zs_status status = queue(comm, turn, shard, area);
    zs_arena_give(comm->areas, area);
    return status;
}

static zs_status usable(zs_comm *comm)
{
    return zs_gpu_usable((zs_gpu_comm *)comm);
}

/* The control knows a turn as a message alone. */
static zs_status name_turn(const zs_comm *comm, const zs_turn *turn, zs_status status)
{
    if (status != ZS_ERR_TIMEOUT && status != ZS_ERR_PEER) return status;
    char phrase[ZS_TURN_PHRASE];
    zs_turn_describe_here(turn, "", phrase, sizeof phrase);
    bool looks = turn->kind == ZS_TURN_GATHER && zs_reading_is_look(comm->reading);
    return zs_rephrase("%s; rank %d was %s: %s", zs_last_message(), comm->rank, phrase,
                       looks ? "on GPUs all ranks must take part in an evaluation: run it on all of them"
                             : zs_turn_remedy(turn));
}

static zs_status fail(zs_comm *comm, const zs_turn *turn, zs_status status)
{
    return zs_gpu_fail((zs_gpu_comm *)comm, name_turn(comm, turn, status));
}

const zs_turns_ops zs_gpu_turns_ops = {exchange, exchange_texts, serve, usable, fail};

/* --- turns -------------------------------------------------------------------------------------------------------- */

zs_status zs_gpu_agree(zs_gpu_comm *comm, const zs_turn *turn)
{
    if (comm->turns.ops == NULL) return ZS_OK;
    zs_status status = zs_turns_agree(&comm->base, turn, comm->room);
    return status == ZS_OK || status == ZS_ERR_DIVERGED ? status : fail(&comm->base, turn, status);
}

zs_status zs_gpu_agree_on_gather(zs_gpu_comm *comm, const zs_flat_mem *flat, const char *unit, bool coded)
{
    if (comm->turns.ops == NULL) return ZS_OK;
    zs_turn turn = zs_gather_turn(&comm->base, flat, unit);
    if (flat->mem->on_host) turn.joinable = false; /* backends only handle device memory */
    turn.round = coded ? ZS_WIRE_BF16 : ZS_WIRE_EXACT;
    return zs_gpu_agree(comm, &turn);
}

zs_status zs_gpu_agree_on_round(zs_gpu_comm *comm, const zs_gpu_unit *unit, zs_turn_kind kind)
{
    const zs_cunit *base = &unit->base;
    zs_turn turn = zs_turn_of(kind, unit->number, base->shards_bytes, base->spec.name);
    turn.round = base->round;
    return zs_gpu_agree(comm, &turn);
}

zs_status zs_gpu_agree_to_talk(zs_gpu_comm *comm, zs_turn_kind kind, size_t bytes, int root)
{
    zs_turn turn = zs_talk_turn(&comm->base, kind, bytes);
    turn.round = (uint64_t)root;
    ZS_TRY(zs_gpu_agree(comm, &turn));
    comm->turns.n_talks++;
    return ZS_OK;
}

static zs_status with_remedy(void)
{
    return zs_rephrase("%s. Over NCCL, no rank may evaluate alone: do so on all ranks, or pass transport="
                       "zshard.NcclOptions(any_order=True), over which ranks that train take part" ZS_UNEVEN,
                       zs_last_message());
}

/* Without turns the hosts meet before anything is queued: a GPU that waits for ranks elsewhere has no deadline. */
zs_status zs_gpu_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(zs_turns_read_begin(comm, reader, reading));
    if (self->turns.ops != NULL) return ZS_OK;
    char nothing = 0, all[comm->world];
    bool named = zs_call_begin(reading->pass == ZS_PASS_BACKWARD ? "backward()" : "forward()");
    zs_status status = meet(self, &nothing, sizeof nothing, all);
    if (named) zs_call_end();
    if (status == ZS_ERR_DIVERGED || status == ZS_ERR_TIMEOUT) return zs_gpu_fail(self, with_remedy());
    return zs_gpu_after_wait(self, status);
}
