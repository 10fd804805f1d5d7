/* mover_nccl.c - device memory by NCCL, on a communicator of our own. See mover.h and nccl_comm.h.
 *
 * The one idea: one communicator for all lanes. NCCL does its operations one after another in the order of the calls, which
 * is the same on all ranks, so no two of them can wait for each other; and they are queued straight in the lane that asks.
 */
#define _GNU_SOURCE 1 /* syscall */
#include "device_cuda.h"
#include "kin.h"
#include "mover.h"
#include "nccl_comm.h"

#include "cuda_driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EVENTS = 16 }; /* operations that the monitor is asked to look after at a time */

/* One operation that the monitor looks after. */
typedef struct watched_move {
    zs_cu_event event;
    const zs_device *device;
    char what[96];
} watched_move;

typedef struct nccl_mover {
    zs_mover base;
    zs_nccl_comm *comm; /* owned */
    watched_move moves[EVENTS];
    size_t count;              /* of moves so far */
    zs_kin *kin;               /* owned */
    zs_nccl_message *messages; /* [world * ZS_MAX_FLATS] room for those of one swap; owned */
} nccl_mover;

/* --- peers --------------------------------------------------------------------------------------------------------------- */

/* What the ranks say to each other: whether they can, and (for the monitor) what processes they are. */
typedef struct card {
    int32_t status;
    char why[256]; /* where that is no ZS_OK */
    zs_kin_card kin;
} card;

/* NCCL makes a communicator of the device that is current on the thread. */
static zs_status check_device(const zs_device *device)
{
    zs_cu_stream unused;
    zs_cu_device current = 0;
    ZS_TRY(zs_device_cuda_stream(device, ZS_LANE_GATHER, &unused)); /* sees to a context */
    ZS_TRY(ZS_CU(cuCtxGetDevice, &current));
    if (device->where.type != ZS_ON_CUDA || current == device->where.index) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE,
                   "the model is on GPU %d, and this thread's current one is GPU %d: call torch.cuda.set_device(%d) "
                   "before",
                   device->where.index, (int)current, device->where.index);
}

static zs_status meet_peers(nccl_mover *self, zs_comm *control)
{
    card own, all[control->world];
    memset(&own, 0, sizeof own);
    zs_kin_own_card(&own.kin);
    own.status = (int32_t)check_device(self->base.device);
    snprintf(own.why, sizeof own.why, "%s", zs_last_message());
    zs_clear_error();
    ZS_TRY(control->ops->exchange(control, &own, sizeof own, all));
    for (int r = 0; r < control->world; r++)
        if (all[r].status != ZS_OK) return ZS_FAIL((zs_status)all[r].status, "rank %d: %s", r, all[r].why);
    for (int r = 0; r < control->world; r++)
        zs_kin_meet(self->kin, r, &all[r].kin);
    return ZS_OK;
}

/* By the monitor's thread. */
static bool find_gone(void *arg, char *sentence, size_t size)
{
    return zs_kin_gone(((nccl_mover *)arg)->kin, sentence, size);
}

/* --- moves --------------------------------------------------------------------------------------------------------------- */

/* By the monitor's thread, which needs the device's context. What the driver says of a failure is for others to find. */
static bool has_ended(void *arg)
{
    const watched_move *move = arg;
    zs_cu_stream unused;
    bool done = true;
    if (zs_device_cuda_stream(move->device, ZS_LANE_GATHER, &unused) == ZS_OK)
        (void)zs_cuda_event_done(move->event, &done);
    zs_clear_error();
    return done;
}

/* Has the monitor look after what has just been queued in `lane`. Where more are out than it is told of, the oldest are
 * forgotten: NCCL's operations end in order, so the later ones speak for them. */
static zs_status watch(nccl_mover *self, zs_lane lane, const char *what, const char *name)
{
    watched_move *move = &self->moves[self->count++ % EVENTS];
    zs_nccl_comm_forget(self->comm, move);
    if (move->event == NULL) ZS_TRY(zs_device_cuda_event_new(self->base.device, &move->event));
    move->device = self->base.device;
    snprintf(move->what, sizeof move->what, "the %s%s%.60s", what, name[0] != 0 ? " of unit " : "", name);
    ZS_TRY(zs_device_cuda_record(self->base.device, lane, move->event));
    return zs_nccl_comm_watch(self->comm, (zs_nccl_work){has_ended, move, move->what});
}

static zs_status nccl_gather(zs_mover *mover, zs_lane lane, const void *shard, char *full, size_t bytes)
{
    nccl_mover *self = (nccl_mover *)mover;
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(mover->device, lane, &stream));
    ZS_TRY(zs_nccl_all_gather(self->comm, shard, full, bytes, stream));
    return watch(self, lane, "all-gather", "");
}

/* The messages of a swap; how many. */
static size_t list_messages(nccl_mover *self, const zs_swap *swap)
{
    size_t n = 0;
    for (int r = 0; r < self->base.world; r++)
        for (int f = 0; f < swap->n; f++) {
            if (swap->bytes[f] == 0) continue;
            const char *send =
                swap->send[f] != NULL ? swap->send[f] + (size_t)swap->part_of[r] * swap->bytes[f] : swap->spare;
            char *receive = swap->receive + (size_t)r * swap->stride + swap->at[f];
            self->messages[n++] = (zs_nccl_message){send, receive, swap->bytes[f], r};
        }
    return n;
}

static zs_status nccl_swap(zs_mover *mover, const zs_swap *swap)
{
    nccl_mover *self = (nccl_mover *)mover;
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(mover->device, ZS_LANE_REDUCE, &stream));
    ZS_TRY(zs_nccl_messages(self->comm, self->messages, list_messages(self, swap), stream));
    return watch(self, ZS_LANE_REDUCE, "gradients", swap->name);
}

static zs_status nccl_broadcast(zs_mover *mover, void *data, size_t bytes, int root)
{
    nccl_mover *self = (nccl_mover *)mover;
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(mover->device, ZS_LANE_COMPUTE, &stream));
    ZS_TRY(zs_nccl_broadcast(self->comm, data, bytes, root, stream));
    return watch(self, ZS_LANE_COMPUTE, "broadcast", "");
}

static zs_status nccl_check(zs_mover *mover)
{
    return zs_nccl_comm_check(((nccl_mover *)mover)->comm);
}

static void nccl_abort(zs_mover *mover, const char *why)
{
    zs_nccl_comm_abort(((nccl_mover *)mover)->comm, why);
}

/* --- making and ending ------------------------------------------------------------------------------------------------- */

/* The communicator goes first: its monitor asks about the rest. */
static void nccl_destroy(zs_mover *mover)
{
    nccl_mover *self = (nccl_mover *)mover;
    zs_nccl_comm_release(self->comm);
    for (int i = 0; i < EVENTS; i++)
        zs_device_cuda_event_free(self->moves[i].event);
    zs_kin_free(self->kin);
    free(self->messages);
    free(self);
}

static const zs_mover_ops nccl_ops = {
    .name = "nccl",
    .gather = nccl_gather,
    .swap = nccl_swap,
    .broadcast = nccl_broadcast,
    .check = nccl_check,
    .abort = nccl_abort,
    .destroy = nccl_destroy,
};

static zs_status make_comm(nccl_mover *self, zs_comm *control)
{
    zs_nccl_options options = {.name = "gpus", .timeout = control->timeout, .gone = find_gone, .arg = self};
    ZS_TRY(meet_peers(self, control));
    return zs_nccl_comm_new(control, &options, &self->comm);
}

zs_status zs_mover_nccl_new(zs_comm *control, const zs_device *device, zs_mover **out)
{
    size_t world = (size_t)control->world;
    nccl_mover *self = calloc(1, sizeof *self);
    if (self == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for a mover");
    self->base = (zs_mover){&nccl_ops, device, control->rank, control->world};
    self->messages = calloc(world * ZS_MAX_FLATS, sizeof *self->messages);
    zs_status status = self->messages != NULL ? ZS_OK : ZS_FAIL(ZS_ERR_MEMORY, "out of memory for %zu ranks", world);
    if (status == ZS_OK) status = zs_kin_new(control->rank, control->world, &self->kin);
    if (status == ZS_OK) status = make_comm(self, control);
    if (status == ZS_OK)
        *out = &self->base;
    else
        nccl_destroy(&self->base);
    return status;
}
