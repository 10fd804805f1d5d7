/* hosts_gather.c - gathering in two levels. See hosts.h.
 *
 * A slot is memory that the ranks of a host share, so one rank receives for all. Before a gather all ranks send their
 * slot. Ranks of one host with the same slot have all taken it for this gather, so its old content is unused. Ranks
 * with different slots have diverged (one evaluates alone, for example): then each gathers for itself, over all ranks,
 * into private memory that replaces the slot in its address space. If shards cross as codes (hosts_params.c), it then
 * decodes them in place. */
#include "comm/hosts/hosts.h"

#include "base/file.h"
#include "base/fold.h"

#include <stdlib.h>
#include <string.h>

/* --- slots -------------------------------------------------------------------------------------------------------- */

typedef struct hosts_slot {
    zs_flat_mem shared; /* of the transport of the host's ranks */
    uint64_t id;        /* equal on two ranks only if they created the same slots up to this one */
    int lane;
    bool apart; /* this rank has private memory in its place */
} hosts_slot;

static void release_slot(zs_mem *mem)
{
    hosts_slot *slot = mem->owner;
    zs_mem_release(slot->shared.mem);
    free(slot);
}

zs_status zs_hosts_slot_new(zs_comm *comm, size_t bytes, zs_mem **out)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    size_t per_host = (size_t)zs_hosts_per_host(self);
    if (per_host == 1) return zs_device_mem_new(comm->device, bytes, out);
    hosts_slot *slot = calloc(1, sizeof *slot);
    if (slot == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a slot");
    size_t part = zs_file_bucket_room((bytes + per_host - 1) / per_host);
    slot->lane = self->lane;
    slot->id = self->slots = zs_fold(self->slots, part);
    zs_status status = zs_comm_flat_new(self->local, part, &slot->shared);
    if (status == ZS_OK) {
        status = zs_mem_wrap(slot->shared.full, part * per_host, release_slot, slot, out);
        if (status == ZS_OK) return ZS_OK;
        zs_comm_flat_free(self->local, &slot->shared);
    }
    free(slot);
    return status;
}

/* The slot that begins at the target; NULL: other memory. */
static hosts_slot *slot_of(zs_target to)
{
    if (to.mem->destroy != release_slot || to.full != to.mem->ptr) return NULL;
    return to.mem->owner;
}

/* Its number in the turn. A host with one rank shares it with none. */
static uint64_t id_of(const zs_hosts_comm *self, const hosts_slot *slot)
{
    if (zs_hosts_per_host(self) == 1) return 1;
    return slot != NULL ? slot->id : 0;
}

/* From here on the slot belongs to this rank alone / to the host again. */
static zs_status set_apart(hosts_slot *slot, bool apart)
{
    if (slot == NULL || slot->apart == apart) return ZS_OK;
    ZS_TRY(zs_file_set_apart(slot->shared.mem, slot->lane, apart));
    slot->apart = apart;
    return ZS_OK;
}

/* --- gathering ---------------------------------------------------------------------------------------------------- */

typedef struct hosts_gathering {
    zs_hosts_op op;
    zs_flat_mem source;   /* a counted reference */
    zs_target to;         /* a counted reference */
    zs_gathering *flat;   /* over all ranks; NULL: in two levels */
    uint64_t number;      /* in two levels */
    size_t code_bytes;    /* of a shard; 0: it crosses as it is */
    zs_mem *codes;        /* (coded) an area, [hosts] of them; NULL: none, or returned */
    zs_hosts_move *moves; /* [hosts] after the turns */
    zs_turn turns[];
} hosts_gathering;

static hosts_gathering *gathering_new(const zs_hosts_comm *self, const zs_flat_mem *flat, zs_target to)
{
    size_t turns = zs_hosts_op_turns(self), hosts = (size_t)self->hosts;
    hosts_gathering *made = calloc(1, sizeof *made + turns * sizeof(zs_turn) + hosts * sizeof(zs_hosts_move));
    if (made == NULL) return NULL;
    made->source = *flat;
    made->to = to;
    made->code_bytes = zs_wire_code_bytes(to.code, to.dtype, flat->shard_bytes);
    made->moves = (zs_hosts_move *)(void *)(made->turns + turns);
    made->op.ticket.turns = made->turns;
    zs_mem_retain(to.mem);
    zs_mem_retain(flat->mem);
    return made;
}

/* Of a shard. */
static size_t traveling_bytes(const hosts_gathering *gathering)
{
    return gathering->code_bytes > 0 ? gathering->code_bytes : gathering->source.shard_bytes;
}

/* Sends `own` to host `h` and receives `theirs`, if that is not this host. */
static zs_status start_leg(zs_hosts_comm *self, hosts_gathering *gathering, int h, char *own, char *theirs)
{
    zs_hosts_move *move = &gathering->moves[h];
    if (h == self->host) {
        move->arrived(move->arg, true);
        return ZS_OK;
    }
    move->out[0] = (struct iovec){own, traveling_bytes(gathering)};
    move->in[0] = (struct iovec){theirs, traveling_bytes(gathering)};
    move->n_out = move->n_in = 1;
    zs_status status = zs_hosts_move_begin(self, h, move);
    if (status != ZS_OK) move->arrived(move->arg, false);
    return status;
}

/* Each counterpart gets this rank's shard, and this rank theirs, each in its place. */
static zs_status start_exact(zs_hosts_comm *self, hosts_gathering *gathering, zs_hosts_arrival *arrival)
{
    const zs_flat_mem *flat = &gathering->source;
    char *full = gathering->to.full;
    memcpy(full + (size_t)self->c10d.base.rank * flat->shard_bytes, flat->shard, flat->shard_bytes);
    zs_status status = ZS_OK;
    for (int h = 0; h < self->hosts; h++) {
        gathering->moves[h].arrived = zs_hosts_arrived;
        gathering->moves[h].arg = arrival;
        ZS_ALSO(status, start_leg(self, gathering, h, flat->shard,
                                  full + (size_t)zs_hosts_rank(self, h, self->lane) * flat->shard_bytes));
    }
    return status;
}

/* The same for codes, which are decoded into their places. */
static zs_status start_coded(zs_hosts_comm *self, hosts_gathering *gathering, zs_hosts_arrival *arrival)
{
    size_t bytes = gathering->code_bytes;
    zs_hosts_decoding *decoding = NULL;
    char *codes = gathering->codes->ptr, *own = codes + (size_t)self->host * bytes;
    zs_status status = zs_hosts_decoding_new(self, bytes, gathering->codes, gathering->to, arrival, &decoding);
    if (status != ZS_OK) {
        for (int h = 0; h < self->hosts; h++)
            zs_hosts_arrived(arrival, false);
        return status;
    }
    const float *shard = (const float *)(const void *)gathering->source.shard;
    zs_hosts_encode_shard(shard, bytes, (zs_bf16 *)(void *)own);
    for (int h = 0; h < self->hosts; h++) {
        gathering->moves[h].arrived = zs_hosts_code_arrived;
        gathering->moves[h].arg = zs_hosts_decoding_part(decoding, h);
        ZS_ALSO(status, start_leg(self, gathering, h, own, codes + (size_t)h * bytes));
    }
    return status;
}

static zs_status start_across(zs_hosts_comm *self, hosts_gathering *gathering)
{
    zs_hosts_arrival *arrival = NULL;
    size_t bytes = traveling_bytes(gathering);
    gathering->number = ++self->gathers;
    ZS_TRY(zs_hosts_arrival_new(self, gathering->number, self->hosts, &arrival));
    zs_traffic_count(ZS_TRAFFIC_GATHER, 0, (size_t)(self->hosts - 1) * bytes);
    return (gathering->code_bytes > 0 ? start_coded : start_exact)(self, gathering, arrival);
}

/* Codes stay in an area until the gather has ended: as units do, they keep the areas alive. */
static zs_status borrow_codes(zs_hosts_comm *self, hosts_gathering *gathering)
{
    if (gathering->code_bytes == 0) return ZS_OK;
    ZS_TRY(zs_c10d_borrow_area(&self->c10d, gathering->code_bytes * (size_t)self->hosts, &gathering->codes));
    zs_c10d_keep_areas(&self->c10d);
    return ZS_OK;
}

static void end(zs_hosts_comm *self, hosts_gathering *gathering)
{
    zs_hosts_moves_leave(self, gathering->moves);
    if (gathering->codes != NULL) {
        zs_c10d_return_area(&self->c10d, &gathering->codes);
        zs_c10d_let_areas_go(&self->c10d);
    }
    zs_c10d_leave_source(&self->c10d, gathering->source.mem);
    zs_mem_release(gathering->source.mem);
    zs_mem_release(gathering->to.mem);
    free(gathering);
}

static bool can_begin(const zs_hosts_comm *self, const zs_hosts_op *op)
{
    const hosts_slot *slot = slot_of(((const hosts_gathering *)op)->to);
    return zs_turns_same_slots(op->ticket.turns, self->c10d.base.world, zs_hosts_per_host(self)) &&
           (slot == NULL || !slot->apart);
}

static zs_status begin(zs_hosts_comm *self, zs_hosts_op *op)
{
    return start_across(self, (hosts_gathering *)op);
}

/* With any slots on the ranks. */
static zs_status begin_here(zs_hosts_comm *self, zs_hosts_op *op)
{
    zs_c10d_comm *c10d = &self->c10d;
    hosts_gathering *gathering = (hosts_gathering *)op;
    ZS_TRY(set_apart(slot_of(gathering->to), !c10d->turns.same_slots));
    if (c10d->turns.same_slots) return start_across(self, gathering);
    zs_gathering *flat = NULL;
    ZS_TRY(zs_c10d_gathering_new(&op->ticket.mine, &gathering->source, gathering->to,
                                 &flat)); /* hosts_queue.c reports a failure */
    zs_status status = zs_c10d_gather_agreed(c10d, gathering->source.shard, gathering->to.full, flat);
    if (status == ZS_OK)
        gathering->flat = flat;
    else
        zs_c10d_gathering_free(flat);
    return status;
}

static const zs_hosts_acts gather_acts = {.can = can_begin, .begin = begin, .begin_here = begin_here};

/* --- the table's -------------------------------------------------------------------------------------------------- */

zs_status zs_hosts_gather_start(zs_comm *comm, const zs_flat_mem *flat, const char *name, zs_target to,
                                zs_gathering **out)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_gathering *gathering = gathering_new(self, flat, to);
    if (gathering == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory all-gathering unit '%s'", name);
    zs_turn turn = zs_gather_turn(comm, flat, name);
    turn.slot = id_of(self, slot_of(to));
    turn.round = gathering->code_bytes > 0 ? ZS_WIRE_BF16 : ZS_WIRE_EXACT;
    gathering->op.acts = &gather_acts;
    zs_status status = borrow_codes(self, gathering);
    if (status != ZS_OK) status = zs_hosts_turns_fail(self, zs_c10d_fail(&self->c10d, &turn, status));
    ZS_THEN(status, zs_hosts_op_enqueue(self, &gathering->op, &turn));
    if (status == ZS_OK) {
        *out = (zs_gathering *)gathering;
        return ZS_OK;
    }
    end(self, gathering);
    return zs_hosts_pass(self, status);
}

static zs_status finish(zs_hosts_comm *self, hosts_gathering *gathering)
{
    const zs_turn *turn = &gathering->op.ticket.mine;
    ZS_TRY(zs_hosts_wait_until(self, &gathering->op));
    ZS_TRY(zs_hosts_op_failure(&gathering->op));
    if (gathering->flat != NULL) {
        ZS_TRY(zs_c10d_gather_finish(&self->c10d.base, gathering->flat));
        if (gathering->code_bytes > 0) /* the shards have arrived uncoded */
            zs_hosts_round((float *)(void *)gathering->to.full,
                           (size_t)self->c10d.base.world * gathering->source.shard_bytes);
    } else {
        ZS_TRY(zs_hosts_moves_finish(self, turn, gathering->moves));
        ZS_TRY(zs_hosts_await(self, turn, gathering->number));
    }
    return ZS_OK;
}

zs_status zs_hosts_gather_finish(zs_comm *comm, zs_gathering *handle)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_gathering *gathering = (hosts_gathering *)handle;
    zs_status status = finish(self, gathering);
    end(self, gathering);
    return zs_hosts_pass(self, status);
}
