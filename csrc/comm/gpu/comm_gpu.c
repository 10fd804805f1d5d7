/* comm_gpu.c - the transports for GPUs: a transport between the hosts, and a backend for device memory.
 *
 * No host waits for a GPU, so hosts communicate early, and report what they find (other bitmaps, another order, a peer
 * that exited) as on the CPU, with the control transport's messages. Moves on the devices must be requested in one
 * order on all ranks. Either hosts agree before each (gpu_turn.c), or they meet when a session begins, and compare
 * their requests when it ends, before the script can wait for results that never come. */
#include "comm/gpu/gpu.h"
#include "device/device_cuda.h"

#include <stdlib.h>

/* --- one order on all ranks --------------------------------------------------------------------------------------- */

static zs_status compare_fingerprints(zs_gpu_comm *comm)
{
    for (int r = 0; r < comm->base.world; r++)
        comm->fingerprints[r] = comm->orders[r].fingerprint;
    return zs_comm_compare_fingerprints(&comm->base, comm->fingerprints);
}

/* Have all ranks asked for the same moves, and if a session has `ended`, with parameters of the same steps? A GPU
 * would wait for peers that have not, without a deadline. */
static zs_status check_order(zs_gpu_comm *comm, bool ended)
{
    comm->order.fingerprint = comm->base.fingerprint;
    ZS_TRY(zs_gpu_after_wait(comm, zs_gpu_compare_hosts(comm, &comm->order, sizeof comm->order, comm->orders)));
    int other = 0;
    if (zs_gpu_order_differs(comm, &other)) return zs_gpu_fail(comm, zs_gpu_order_fail(comm, other));
    comm->agreed = comm->order.count;
    return ended ? compare_fingerprints(comm) : ZS_OK;
}

zs_status zs_gpu_read_end(zs_comm *comm, zs_reader *reader, zs_phase phase)
{
    (void)reader;
    (void)phase;
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_usable(self));
    return self->turns.ops == NULL ? check_order(self, true) : ZS_OK;
}

/* --- events ------------------------------------------------------------------------------------------------------- */

void zs_gpu_event_give(zs_gpu_comm *comm, zs_cu_event event)
{
    if (event == NULL) return;
    if (comm->n_idle == comm->idle_room) {
        size_t room = 2 * comm->idle_room + 8;
        zs_cu_event *grown = realloc(comm->idle, room * sizeof *grown);
        if (grown == NULL) {
            zs_device_cuda_event_free(event);
            return;
        }
        comm->idle = grown;
        comm->idle_room = room;
    }
    comm->idle[comm->n_idle++] = event;
}

enum { EVENTS_AT_A_TIME = 3 * ZS_MAX_FLATS }; /* gathers of a unit in use, and of two ahead: later steps find enough */

zs_status zs_gpu_event_take(zs_gpu_comm *comm, zs_cu_event *out)
{
    for (int i = comm->n_idle > 0 ? EVENTS_AT_A_TIME : 0; i < EVENTS_AT_A_TIME; i++) {
        zs_cu_event made;
        ZS_TRY(zs_device_cuda_event_new(comm->base.device, &made));
        zs_gpu_event_give(comm, made);
    }
    if (comm->n_idle == 0) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating CUDA events");
    *out = comm->idle[--comm->n_idle];
    return ZS_OK;
}

/* --- gathers ------------------------------------------------------------------------------------------------------ */

/* A gather that is queued. */
struct zs_gathering {
    size_t code_bytes; /* of a shard; 0: it travels as it is */
    zs_cu_event done;
    uint64_t session; /* in which it was queued */
    zs_mem *mem;      /* counted reference */
    zs_mem *codes;    /* an area; NULL: shards travel as they are */
};

/* In the gather stream. */
static zs_status move_shards(zs_gpu_comm *comm, const char *shard, size_t bytes, zs_target to, zs_gathering *gathering)
{
    const size_t code_bytes = gathering->code_bytes, all_codes = code_bytes * (size_t)comm->base.world;
    if (code_bytes == 0) {
        zs_traffic_from_each(&comm->base, ZS_TRAFFIC_GATHER, bytes);
        return comm->backend->ops->gather(comm->backend, ZS_STREAM_GATHER, shard, to.full, bytes);
    }
    ZS_TRY(zs_gpu_take_codes(comm, all_codes, &gathering->codes));
    ZS_TRY(zs_gpu_gather_codes(comm, code_bytes, shard, gathering->codes->ptr));
    return zs_gpu_decode(comm, ZS_STREAM_GATHER, gathering->codes->ptr, all_codes, to.full);
}

static zs_status start_gather(zs_gpu_comm *comm, const zs_flat_mem *flat, zs_target to, zs_gathering *gathering)
{
    const zs_device *device = comm->base.device;
    ZS_TRY(zs_gpu_event_take(comm, &gathering->done));
    const char *shard = flat->shard;
    ZS_TRY(zs_device_fork(device, ZS_STREAM_GATHER)); /* after the optimizer's step, and the slot's last use */
    if (flat->mem->on_host) {                         /* backends only handle device memory */
        char *own = to.full + (size_t)comm->base.rank * flat->shard_bytes;
        ZS_TRY(zs_device_copy(device, ZS_STREAM_GATHER, own, shard, flat->shard_bytes));
        shard = own;
    }
    ZS_TRY(move_shards(comm, shard, flat->shard_bytes, to, gathering));
    return zs_device_cuda_record(device, ZS_STREAM_GATHER, gathering->done);
}

zs_status zs_gpu_gather_start(zs_comm *comm, const zs_flat_mem *flat, const char *name, zs_target to,
                              zs_gathering **out)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_usable(self));
    const size_t code_bytes = zs_gpu_code_bytes(comm, to.code, to.dtype, flat->shard_bytes);
    zs_gathering *made = calloc(1, sizeof *made); /* before ranks agree: then all begin it */
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory all-gathering unit '%s'", name);
    made->code_bytes = code_bytes;
    zs_status status = zs_gpu_agree_on_gather(self, flat, name, code_bytes > 0);
    if (status != ZS_OK) {
        free(made);
        return status;
    }
    zs_gpu_order_add(self, "parameters", name, flat->shard_bytes);
    status = start_gather(self, flat, to, made);
    if (status == ZS_OK) {
        made->mem = zs_mem_retain(to.mem);
        made->session = comm->sessions;
        *out = made;
        return ZS_OK;
    }
    zs_gpu_event_give(self, made->done);
    zs_gpu_return_area(self, &made->codes);
    free(made);
    return zs_gpu_fail(self, status);
}

zs_status zs_gpu_gather_finish(zs_comm *comm, zs_gathering *gathering)
{
    zs_status status = ZS_OK;
    if (gathering->session == comm->sessions)
        status = zs_device_cuda_await(comm->device, ZS_STREAM_COMPUTE, gathering->done);
    zs_gpu_event_give((zs_gpu_comm *)comm, gathering->done);
    zs_gpu_return_area((zs_gpu_comm *)comm, &gathering->codes);
    zs_mem_release(gathering->mem);
    free(gathering);
    return status;
}

size_t zs_gpu_bytes(const zs_comm *comm)
{
    const zs_gpu_comm *self = (const zs_gpu_comm *)comm;
    size_t areas = self->areas != NULL ? zs_arena_bytes(self->areas) : 0;
    return areas + self->lost_bytes + zs_comm_room(comm, NULL).fixed;
}

zs_status zs_gpu_reserve(zs_comm *comm, const zs_arena *plan)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_make_areas(self));
    return zs_arena_cover(self->areas, plan);
}

/* --- between the hosts -------------------------------------------------------------------------------------------- */

zs_status zs_gpu_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(zs_gpu_agree_to_talk(self, ZS_TURN_EXCHANGE, bytes, 0));
    return zs_comm_exchange(self->control, mine, bytes, all);
}

zs_status zs_gpu_broadcast(zs_comm *comm, void *data, size_t bytes, int root)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(zs_gpu_agree_to_talk(self, ZS_TURN_BROADCAST, bytes, root));
    return zs_comm_broadcast(self->control, data, bytes, root);
}

zs_status zs_gpu_broadcast_device(zs_comm *comm, void *data, size_t bytes, int root)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(zs_check_root(comm, root));
    ZS_TRY(zs_gpu_agree_to_talk(self, ZS_TURN_BROADCAST, bytes, root));
    zs_gpu_order_add(self, "buffer", "", bytes);
    zs_status status = self->backend->ops->broadcast(self->backend, data, bytes, root);
    return status == ZS_OK ? ZS_OK : zs_gpu_fail(self, status);
}

/* Compares the order at once: the script uses the result, outside of any session. */
zs_status zs_gpu_gather_device(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(zs_gpu_agree_to_talk(self, ZS_TURN_EXCHANGE, bytes, 0));
    zs_gpu_order_add(self, "values", "", bytes);
    zs_status status = self->turns.ops != NULL ? ZS_OK : check_order(self, false);
    ZS_THEN(status, self->backend->ops->gather(self->backend, ZS_STREAM_COMPUTE, mine, all, bytes));
    return status == ZS_OK ? ZS_OK : zs_gpu_fail(self, status);
}

/* If all ranks abandon at the same move, a GPU has nothing left to wait for. */
zs_status zs_gpu_give_up(zs_comm *comm)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_usable(self));
    zs_turn turn = zs_turn_of(ZS_TURN_GIVE_UP, 0, 0, NULL);
    if (self->turns.ops != NULL) return zs_gpu_agree(self, &turn); /* all that is queued, all ranks have queued */
    self->order.gave_up = 1;
    zs_status status = check_order(self, false);
    self->order.gave_up = 0;
    return status;
}

void zs_gpu_abort(zs_comm *comm, const char *reason)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    zs_comm_abort(self->control, reason);
    self->backend->ops->abort(self->backend, reason);
}

/* The control transport's owner closes it. */
void zs_gpu_close(zs_comm *comm)
{
    (void)comm;
}

static void free_rooms(zs_gpu_comm *self)
{
    free(self->orders);
    free(self->fingerprints);
    free(self->moves);
    free(self->room);
    free(self);
}

/* A zeroed head, with its arrays: hundreds of bytes for each rank are too much for a thread's stack. NULL: out of
 * memory. */
static zs_gpu_comm *alloc_rooms(int world)
{
    zs_gpu_comm *self = calloc(1, sizeof *self);
    if (self == NULL) return NULL;
    self->orders = calloc((size_t)world, sizeof *self->orders);
    self->fingerprints = calloc((size_t)world, sizeof *self->fingerprints);
    self->moves = calloc(ZS_GPU_MOVES + 1, sizeof *self->moves);
    self->room = calloc((size_t)world + 1, sizeof *self->room);
    bool all = self->orders != NULL && self->fingerprints != NULL && self->moves != NULL && self->room != NULL;
    if (all) return self;
    free_rooms(self);
    return NULL;
}

void zs_gpu_destroy(zs_comm *comm)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    zs_arena_free(self->areas);
    for (size_t i = 0; i < self->n_idle; i++)
        zs_device_cuda_event_free(self->idle[i]);
    if (self->backend != NULL) self->backend->ops->destroy(self->backend);
    zs_comm_release(self->control);
    free(self->idle);
    free(self->base.lost);
    free_rooms(self);
}

zs_status zs_comm_gpu_new(zs_comm *control, zs_backend *backend, zs_comm **out)
{
    zs_gpu_comm *self = alloc_rooms(control->world);
    if (self == NULL) {
        backend->ops->destroy(backend);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a GPU transport");
    }
    self->base.ops = backend->ops->table;
    self->base.rank = control->rank;
    self->base.world = control->world;
    self->base.per_host = control->per_host;
    control->is_control = true;
    self->base.device = backend->device;
    self->base.timeout = control->timeout;
    zs_refs_init(&self->base.refs);
    self->control = zs_comm_retain(control);
    self->backend = backend;
    self->base.turns = &self->turns;
    if (backend->meets) self->turns.ops = &zs_gpu_turns_ops;
    *out = &self->base;
    return ZS_OK;
}
