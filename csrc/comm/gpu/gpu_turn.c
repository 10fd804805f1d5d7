/* gpu_turn.c - where the ranks' hosts meet before each move: do all ranks want the same one? See gpu.h.
 *
 * The rules and the messages are those of c10d (c10d_turn.c, c10d_serve.c): a rank that leaves a unit out takes part in
 * the others' gather all the same, and ranks that diverge get an error before anything is queued. Turns travel over
 * the control transport; only the gathers themselves are the backend's. */
#include "comm/gpu/gpu.h"

#include "base/file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct zs_gpu_turns {
    zs_c10d_comm head; /* first: hooks get it */
    zs_gpu_comm *gpu;  /* borrowed */
};

static zs_gpu_comm *gpu_of(zs_c10d_comm *head)
{
    return ((zs_gpu_turns *)head)->gpu;
}

zs_c10d_comm *zs_gpu_turns_of(const zs_gpu_comm *comm)
{
    return comm->turns != NULL ? &comm->turns->head : NULL;
}

/* --- hooks -------------------------------------------------------------------------------------------------------- */

/* A rank that has failed in a meeting may have left its part of the next one: the one after that reports why. */
static zs_status meet(const zs_gpu_comm *comm, const void *mine, size_t bytes, void *all)
{
    ZS_TRY(zs_comm_exchange(comm->control, mine, bytes, all));
    return zs_comm_is_stopped(comm->control) ? zs_comm_exchange(comm->control, mine, bytes, all) : ZS_OK;
}

static zs_status say(zs_c10d_comm *head, const zs_c10d_turn *mine, zs_c10d_turn *turns)
{
    char call[ZS_CALL] = ""; /* which the turns have */
    zs_call_swap(call);
    zs_status status = meet(gpu_of(head), mine, sizeof *mine, turns);
    zs_call_swap(call);
    return status;
}

static zs_status exchange_words(zs_c10d_comm *head, zs_diagnostics *all)
{
    zs_comm *control = gpu_of(head)->control;
    memcpy(control->words.where, head->base.words.where, sizeof control->words.where);
    head->base.words = control->words;
    return zs_gpu_compare_hosts(gpu_of(head), &control->words, sizeof control->words, all);
}

/* The result is discarded. */
static zs_status queue(zs_gpu_comm *comm, const zs_c10d_turn *turn, const char *shard, const zs_mem *area)
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

static zs_status serve(zs_c10d_comm *head, const zs_c10d_turn *turn, const char *shard)
{
    zs_gpu_comm *comm = gpu_of(head);
    zs_mem *area = NULL;
    ZS_TRY(zs_gpu_take_codes(comm, turn->bytes * (size_t)comm->base.world, &area));
    zs_status status = queue(comm, turn, shard, area);
    zs_arena_give(comm->areas, area);
    return status;
}

static const zs_c10d_hooks hooks = {serve, exchange_words};

/* --- turns -------------------------------------------------------------------------------------------------------- */

/* The control knows a turn as a message alone. */
static zs_status name_turn(const zs_c10d_comm *head, const zs_c10d_turn *turn, zs_status status)
{
    if (status != ZS_ERR_TIMEOUT && status != ZS_ERR_PEER) return status;
    char phrase[ZS_C10D_PHRASE];
    zs_c10d_describe_here(turn, "", phrase, sizeof phrase);
    bool looks = turn->kind == ZS_C10D_GATHER && zs_reading_is_look(head->base.reading);
    return zs_rephrase("%s; rank %d was %s: %s", zs_last_message(), head->base.rank, phrase,
                       looks ? "on GPUs an evaluation takes all ranks: call it on all of them"
                             : zs_c10d_remedy_of(turn));
}

zs_status zs_gpu_agree(zs_gpu_comm *comm, const zs_c10d_turn *turn)
{
    zs_c10d_comm *head = zs_gpu_turns_of(comm);
    if (head == NULL) return ZS_OK;
    head->base.fingerprint = comm->base.fingerprint;
    head->base.model = comm->base.model;
    head->base.apart = comm->base.apart;
    zs_status status = zs_c10d_agree(head, turn);
    comm->base.apart = head->base.apart;
    comm->base.heard |= head->base.heard;
    comm->base.failed |= head->base.failed;
    head->base.heard = false;
    return status == ZS_OK || status == ZS_ERR_DIVERGED ? status : zs_gpu_fail(comm, name_turn(head, turn, status));
}

zs_status zs_gpu_agree_on_gather(zs_gpu_comm *comm, const zs_flat_mem *flat, const char *unit, bool coded)
{
    zs_c10d_comm *head = zs_gpu_turns_of(comm);
    if (head == NULL) return ZS_OK;
    zs_c10d_turn turn = zs_c10d_gather_turn(head, flat, unit);
    if (flat->mem->on_host) turn.joinable = false; /* backends only handle device memory */
    turn.round = coded ? ZS_WIRE_BF16 : ZS_WIRE_EXACT;
    return zs_gpu_agree(comm, &turn);
}

zs_status zs_gpu_agree_on_round(zs_gpu_comm *comm, const zs_gpu_unit *unit, zs_c10d_kind kind)
{
    const zs_cunit *base = &unit->base;
    zs_c10d_turn turn = zs_c10d_turn_of(kind, unit->number, base->shards_bytes, base->spec.name);
    turn.round = base->round;
    return zs_gpu_agree(comm, &turn);
}

zs_status zs_gpu_agree_to_talk(zs_gpu_comm *comm, zs_c10d_kind kind, size_t bytes, int root)
{
    zs_c10d_comm *head = zs_gpu_turns_of(comm);
    if (head == NULL) return ZS_OK;
    zs_c10d_turn turn = zs_c10d_talk_turn(head, kind, bytes);
    turn.round = (uint64_t)root;
    ZS_TRY(zs_gpu_agree(comm, &turn));
    head->messages++;
    return ZS_OK;
}

/* --- flats and readers: those of c10d, where there are turns ------------------------------------------------------ */

zs_status zs_gpu_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out)
{
    zs_c10d_comm *head = zs_gpu_turns_of((zs_gpu_comm *)comm);
    ZS_TRY(zs_local_flat_new(comm, shard_bytes, out));
    zs_status status = head != NULL ? zs_c10d_flat_add(head, out) : ZS_OK;
    if (status != ZS_OK) zs_local_flat_free(comm, out);
    return status;
}

void zs_gpu_flat_free(zs_comm *comm, zs_flat_mem *flat)
{
    zs_c10d_comm *head = zs_gpu_turns_of((zs_gpu_comm *)comm);
    if (head != NULL) zs_c10d_flat_remove(head, flat);
    zs_local_flat_free(comm, flat);
}

void zs_gpu_numbers(const zs_comm *comm, uint64_t *out)
{
    zs_c10d_comm *head = zs_gpu_turns_of((const zs_gpu_comm *)comm);
    if (head != NULL) zs_c10d_numbers(&head->base, out);
}

void zs_gpu_continue_from(zs_comm *comm, const uint64_t *numbers)
{
    zs_c10d_comm *head = zs_gpu_turns_of((zs_gpu_comm *)comm);
    if (head != NULL) zs_c10d_continue_from(&head->base, numbers);
}

/* Where there are turns, c10d's, which know what was written since the last forward. */
static const zs_reader_ops *readers_of(const zs_gpu_comm *comm)
{
    return comm->turns != NULL ? &zs_c10d_reader_ops : &zs_local_reader_ops;
}

/* Its transport. */
static zs_comm *readers_comm(zs_comm *comm)
{
    zs_c10d_comm *head = zs_gpu_turns_of((zs_gpu_comm *)comm);
    return head != NULL ? &head->base : comm;
}

zs_status zs_gpu_reader_new(zs_comm *comm, const char *name, zs_reader **out)
{
    zs_comm *its = readers_comm(comm);
    its->models = comm->models;
    return readers_of((zs_gpu_comm *)comm)->reader_new(its, name, out);
}

void zs_gpu_reader_free(zs_comm *comm, zs_reader *reader)
{
    readers_of((zs_gpu_comm *)comm)->reader_free(readers_comm(comm), reader);
}

zs_status zs_gpu_write_begin(zs_comm *comm, zs_reader *reader)
{
    const zs_reader_ops *ops = readers_of((zs_gpu_comm *)comm);
    return ops->write_begin != NULL ? ops->write_begin(readers_comm(comm), reader) : ZS_OK;
}

void zs_gpu_write_end(zs_comm *comm, zs_reader *reader, bool known)
{
    const zs_reader_ops *ops = readers_of((zs_gpu_comm *)comm);
    if (ops->write_end != NULL) ops->write_end(readers_comm(comm), reader, known);
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
    zs_comm *its = readers_comm(comm);
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(readers_of(self)->read_begin(its, reader, reading));
    comm->reading = its->reading;
    if (self->turns != NULL) return ZS_OK;
    char nothing = 0, all[comm->world];
    bool named = zs_call_begin(reading->pass == ZS_PASS_BACKWARD ? "backward()" : "forward()");
    zs_status status = meet(self, &nothing, sizeof nothing, all);
    if (named) zs_call_end();
    if (status == ZS_ERR_DIVERGED || status == ZS_ERR_TIMEOUT) return zs_gpu_fail(self, with_remedy());
    return zs_gpu_after_wait(self, status);
}

/* --- birth and end ------------------------------------------------------------------------------------------------ */

zs_status zs_gpu_turns_new(zs_gpu_comm *comm)
{
    zs_gpu_turns *self = calloc(1, sizeof *self);
    if (self == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a GPU transport");
    zs_c10d_comm *head = &self->head;
    head->base.ops = &zs_c10d_ops;
    head->base.rank = comm->base.rank;
    head->base.world = comm->base.world;
    head->base.device = zs_device_cpu();
    head->base.timeout = comm->base.timeout;
    head->lifetime = zs_lifetime();
    head->gone = -1;
    pthread_mutex_init(&head->areas_lock, NULL);
    head->say = say;
    head->hooks = &hooks;
    self->gpu = comm;
    comm->turns = self;
    return ZS_OK;
}

void zs_gpu_turns_free(zs_gpu_comm *comm)
{
    if (comm->turns == NULL) return;
    zs_c10d_comm *head = &comm->turns->head;
    zs_c10d_free_areas(head);
    zs_comm_set_others(&head->base, NULL);
    zs_c10d_free_lost(head);
    free(comm->turns);
    comm->turns = NULL;
}
