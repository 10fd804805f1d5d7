/* backend_nccl.c - moves device memory by NCCL, on our own communicators. See backend.h and nccl_comm.h.
 *
 * NCCL runs the operations of one communicator one after another, so gathers have one and everything else has another:
 * parameters move while gradients do. Operations are queued directly in the stream that asks.
 *
 * Two concurrent operations could deadlock: on rank 0 the kernel of one has all multiprocessors and waits for its
 * peers, on rank 1 that of the other. Here they cannot. Each of the device's three streams is one stream of the GPU
 * for all communicators of the process, so each has at most one kernel of NCCL; each may have a third of the
 * multiprocessors (limit_ctas), on which nothing else stays forever. All ranks queue all operations in one order.
 * Take the first of these that has not ended: all before it in its stream have, its peers have queued it too or are
 * about to (their hosts wait for nothing that comes later), and there is room for it: so it ends.
 * NCCL_LAUNCH_ORDER_IMPLICIT=1 (2.26) would also ensure this, by starting kernels in the order of the calls; it is
 * unnecessary, and harmless. */
#include "comm/comm_local.h"
#include "comm/gpu/backend.h"
#include "comm/nccl/nccl_comm.h"
#include "comm/process_watch.h"
#include "device/cuda_driver.h"
#include "device/device_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    EVENTS = 16,            /* operations of a communicator that the monitor watches at the same time */
    LANES_WITH_KERNELS = 3, /* all that NCCL uses */
};

/* One operation that the monitor watches. */
typedef struct watched_move {
    zs_cu_event event;
    const zs_device *device;
    char what[96];
} watched_move;

typedef struct nccl_backend nccl_backend;

/* A communicator, and its operations in flight. */
typedef struct nccl_line {
    nccl_backend *backend;
    zs_nccl_comm *comm; /* owned; NULL: not created, or freed */
    watched_move moves[EVENTS];
    size_t count; /* moves so far */
} nccl_line;

struct nccl_backend {
    zs_backend base;
    zs_nccl_choices choices;
    nccl_line lines[2];          /* gathers, everything else; with one communicator the first is for all */
    pthread_mutex_t ends;        /* guards lines[].comm against the monitor's thread */
    zs_process_watch *processes; /* owned */
    zs_message *messages;        /* [world * ZS_MAX_FLATS] room for those of one swap; owned */
};

static nccl_line *line_of(nccl_backend *self, zs_stream stream)
{
    return &self->lines[stream == ZS_STREAM_GATHER || self->choices.communicators == 1 ? 0 : 1];
}

/* --- peers -------------------------------------------------------------------------------------------------------- */

/* The ranks' exchange: whether they can proceed, their options, and (for the monitor) their processes. */
typedef struct card {
    int32_t status;
    char why[256]; /* if that is not ZS_OK */
    zs_nccl_choices choices;
    int32_t multiprocessors;
    zs_process_id processes;
} card;

/* NCCL creates a communicator on the thread's current device. */
static zs_status check_device(const zs_device *device)
{
    zs_cu_stream unused;
    zs_cu_device current = 0;
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_GATHER, &unused)); /* ensures a context */
    ZS_TRY(ZS_CU(cuCtxGetDevice, &current));
    if (device->where.type != ZS_ON_CUDA || current == device->where.index) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE,
                   "the model is on GPU %d, but the current device is GPU %d: call torch.cuda.set_device(%d) first",
                   device->where.index, (int)current, device->where.index);
}

/* Creates all events that a step will need. */
static zs_status make_events(nccl_line *line)
{
    const zs_device *device = line->backend->base.device;
    for (int i = 0; i < EVENTS; i++) {
        line->moves[i].device = device;
        ZS_TRY(zs_device_cuda_event_new(device, &line->moves[i].event));
    }
    return ZS_OK;
}

/* Checks that can fail on one rank alone. */
static zs_status prepare(nccl_backend *self, card *own)
{
    const zs_device *device = self->base.device;
    ZS_TRY(check_device(device));
    zs_cu_device number = 0;
    ZS_TRY(ZS_CU(cuCtxGetDevice, &number));
    for (int i = 0; i < self->choices.communicators; i++)
        ZS_TRY(make_events(&self->lines[i]));
    return ZS_CU(cuDeviceGetAttribute, &own->multiprocessors, ZS_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, number);
}

static zs_status check_cards(const card *all, int world)
{
    for (int r = 0; r < world; r++)
        if (all[r].status != ZS_OK) return ZS_FAIL((zs_status)all[r].status, "rank %d: %s", r, all[r].why);
    for (int r = 1; r < world; r++) {
        const zs_nccl_choices *a = &all[0].choices, *b = &all[r].choices;
        if (memcmp(a, b, sizeof *a) == 0) continue;
        return ZS_FAIL(
            ZS_ERR_DIVERGED,
            "NcclOptions differ between ranks (ctas as a number, min_ctas, max_ctas, communicators, "
            "any_order): %d, %d, %d, %d, %d on rank 0, but %d, %d, %d, %d, %d on rank %d; pass the same on all ranks",
            a->ctas, a->min_ctas, a->max_ctas, a->communicators, a->any_order, b->ctas, b->min_ctas, b->max_ctas,
            b->communicators, b->any_order, r);
    }
    return ZS_OK;
}

/* Kernels of all streams must fit on every rank's GPU at the same time: see above. A power of two, because NCCL rounds
 * the number of channels for swaps up to one. */
static zs_status limit_ctas(nccl_backend *self, const card *all)
{
    int fewest = all[0].multiprocessors, most = 1;
    for (int r = 1; r < self->base.world; r++)
        if (all[r].multiprocessors < fewest) fewest = all[r].multiprocessors;
    while (2 * most * LANES_WITH_KERNELS <= fewest)
        most *= 2;
    zs_nccl_choices *choices = &self->choices;
    int asked = choices->max_ctas > choices->min_ctas ? choices->max_ctas : choices->min_ctas;
    if (asked > most)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "NcclOptions: %d CTAs exceed what a GPU with %d multiprocessors allows: NCCL kernels in three "
                       "streams must be co-resident, or ranks could deadlock; use at most %d",
                       asked, fewest, most);
    if (choices->max_ctas == 0) choices->max_ctas = most;
    return ZS_OK;
}

/* all: [world] */
static zs_status meet_with(nccl_backend *self, zs_comm *control, card *all)
{
    card own;
    memset(&own, 0, sizeof own);
    zs_process_own_id(&own.processes);
    own.choices = self->choices;
    own.status = (int32_t)prepare(self, &own);
    snprintf(own.why, sizeof own.why, "%s", zs_last_message());
    zs_clear_error();
    ZS_TRY(zs_comm_exchange(control, &own, sizeof own, all));
    ZS_TRY(check_cards(all, control->world));
    for (int r = 0; r < control->world; r++)
        zs_process_watch_add(self->processes, r, &all[r].processes);
    return limit_ctas(self, all);
}

static zs_status meet_peers(nccl_backend *self, zs_comm *control)
{
    card *all = calloc((size_t)control->world, sizeof *all);
    if (all == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for the options of %d ranks", control->world);
    zs_status status = meet_with(self, control, all);
    free(all);
    return status;
}

/* On the monitor's thread. */
static bool find_gone(void *arg, char *sentence, size_t size)
{
    const nccl_backend *self = ((const nccl_line *)arg)->backend;
    int r = 0;
    while (r < self->base.world && !zs_process_has_ended(self->processes, r))
        r++;
    if (r == self->base.world) return false;
    long pid = zs_process_pid(self->processes, r);
    snprintf(sentence, size, "rank %d (pid %ld) exited; see its output for the cause", r, pid);
    return true;
}

/* On any thread: if one communicator is lost, the other one's kernels wait for something that never comes. */
static void lose_other(void *arg, zs_status failure, const char *why)
{
    nccl_line *lost = arg, *other = &lost->backend->lines[lost == &lost->backend->lines[0]];
    pthread_mutex_lock(&lost->backend->ends);
    if (other->comm != NULL) zs_nccl_comm_follow(other->comm, failure, why);
    pthread_mutex_unlock(&lost->backend->ends);
}

/* --- moves -------------------------------------------------------------------------------------------------------- */

/* On the monitor's thread. */
static bool has_ended(void *arg)
{
    const watched_move *move = arg;
    return zs_device_cuda_passed(move->device, move->event);
}

/* Makes the monitor watch the operation just queued in `stream`. If more are out than it can watch, the oldest are
 * dropped: a communicator's operations end in order, so the later ones represent them. */
static zs_status watch(nccl_backend *self, zs_stream stream, const char *what, const char *name)
{
    bool capturing = false;
    ZS_TRY(zs_device_capturing(self->base.device, &capturing));
    if (capturing) return ZS_OK; /* it does not run now, and its event could not be queried */
    nccl_line *line = line_of(self, stream);
    watched_move *move = &line->moves[line->count++ % EVENTS];
    zs_nccl_comm_forget(line->comm, move);
    snprintf(move->what, sizeof move->what, "the %s%s%.60s", what, name[0] != 0 ? " of unit " : "", name);
    ZS_TRY(zs_device_cuda_record(self->base.device, stream, move->event));
    return zs_nccl_comm_watch(line->comm, (zs_nccl_work){has_ended, move, move->what});
}

static zs_status nccl_gather(zs_backend *backend, zs_stream stream, const void *shard, char *full, size_t bytes)
{
    nccl_backend *self = (nccl_backend *)backend;
    zs_cu_stream handle;
    ZS_TRY(zs_device_cuda_stream(backend->device, stream, &handle));
    ZS_TRY(zs_nccl_all_gather(line_of(self, stream)->comm, shard, full, bytes, handle));
    return watch(self, stream, "all-gather", "");
}

/* Lists the messages of a swap; returns how many. */
static size_t list_messages(nccl_backend *self, const zs_swap *swap)
{
    size_t n = 0;
    for (int r = 0; r < self->base.world; r++)
        for (int f = 0; f < swap->n; f++) {
            if (swap->bytes[f] == 0) continue;
            const char *send =
                swap->send[f] != NULL ? swap->send[f] + (size_t)swap->shard_of[r] * swap->bytes[f] : swap->filler;
            char *receive = swap->receive + (size_t)r * swap->stride + swap->at[f];
            self->messages[n++] = (zs_message){send, receive, swap->bytes[f], r};
        }
    return n;
}

static zs_status nccl_exchange(zs_backend *backend, const char *unit, const zs_message *messages, size_t n)
{
    nccl_backend *self = (nccl_backend *)backend;
    zs_cu_stream stream;
    if (n == 0) return ZS_OK;
    ZS_TRY(zs_device_cuda_stream(backend->device, ZS_STREAM_REDUCE, &stream));
    ZS_TRY(zs_nccl_messages(line_of(self, ZS_STREAM_REDUCE)->comm, messages, n, stream));
    return watch(self, ZS_STREAM_REDUCE, "gradient exchange", unit);
}

static zs_status nccl_swap(zs_backend *backend, const zs_swap *swap)
{
    nccl_backend *self = (nccl_backend *)backend;
    return nccl_exchange(backend, swap->name, self->messages, list_messages(self, swap));
}

static zs_status nccl_broadcast(zs_backend *backend, void *data, size_t bytes, int root)
{
    nccl_backend *self = (nccl_backend *)backend;
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(backend->device, ZS_STREAM_COMPUTE, &stream));
    ZS_TRY(zs_nccl_broadcast(line_of(self, ZS_STREAM_COMPUTE)->comm, data, bytes, root, stream));
    return watch(self, ZS_STREAM_COMPUTE, "broadcast", "");
}

static zs_status nccl_check(zs_backend *backend)
{
    nccl_backend *self = (nccl_backend *)backend;
    for (int i = 0; i < self->choices.communicators; i++)
        ZS_TRY(zs_nccl_comm_check(self->lines[i].comm));
    return ZS_OK;
}

static void nccl_abort(zs_backend *backend, const char *why)
{
    nccl_backend *self = (nccl_backend *)backend;
    for (int i = 0; i < self->choices.communicators; i++)
        zs_nccl_comm_abort(self->lines[i].comm, why);
}

/* --- making and ending -------------------------------------------------------------------------------------------- */

/* Call it before the events are freed, which its monitor queries. */
static void end_line(nccl_line *line)
{
    pthread_mutex_lock(&line->backend->ends);
    zs_nccl_comm *comm = line->comm;
    line->comm = NULL;
    pthread_mutex_unlock(&line->backend->ends);
    zs_nccl_comm_free(comm); /* it may wait */
    for (int i = 0; i < EVENTS; i++)
        zs_device_cuda_event_free(line->moves[i].event);
}

static void nccl_destroy(zs_backend *backend)
{
    nccl_backend *self = (nccl_backend *)backend;
    for (int i = 0; i < 2; i++)
        end_line(&self->lines[i]);
    zs_process_watch_free(self->processes);
    pthread_mutex_destroy(&self->ends);
    free(self->messages);
    free(self);
}

static const zs_backend_ops nccl_ops = {
    .table = &zs_nccl_ops,
    .gather = nccl_gather,
    .swap = nccl_swap,
    .exchange = nccl_exchange,
    .broadcast = nccl_broadcast,
    .check = nccl_check,
    .abort = nccl_abort,
    .destroy = nccl_destroy,
};

static zs_status make_comms(nccl_backend *self, zs_comm *control)
{
    static const char *const names[] = {"gathers", "reductions"};
    const zs_nccl_choices *choices = &self->choices;
    for (int i = 0; i < choices->communicators; i++) {
        nccl_line *line = &self->lines[i];
        zs_nccl_options options = {.name = choices->communicators == 1 ? "gpus" : names[i],
                                   .timeout = control->timeout,
                                   .ctas = (zs_nccl_ctas)choices->ctas,
                                   .min_ctas = choices->min_ctas,
                                   .max_ctas = choices->max_ctas,
                                   .gone = find_gone,
                                   .lost = lose_other,
                                   .arg = line};
        zs_nccl_comm *made = NULL;
        ZS_TRY(zs_nccl_comm_new(control, &options, &made));
        pthread_mutex_lock(&self->ends);
        line->comm = made;
        pthread_mutex_unlock(&self->ends);
    }
    return ZS_OK;
}

/* Allocates memory for facts about the peers. */
static zs_status make_room(nccl_backend *self)
{
    size_t world = (size_t)self->base.world;
    self->messages = calloc(world * ZS_MAX_FLATS, sizeof *self->messages);
    if (self->messages == NULL)
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the messages of %zu ranks", world);
    return zs_process_watch_new(self->base.rank, self->base.world, &self->processes);
}

zs_status zs_backend_nccl_new(zs_comm *control, const zs_device *device, const zs_nccl_choices *choices,
                              zs_backend **out)
{
    if (choices->communicators < 1 || choices->communicators > 2)
        return ZS_FAIL(ZS_ERR_VALUE, "NcclOptions: communicators must be 1 or 2, got %d", choices->communicators);
    nccl_backend *self = calloc(1, sizeof *self);
    if (self == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the NCCL backend");
    self->base = (zs_backend){&nccl_ops, device, control->rank, control->world, choices->any_order != 0};
    self->choices = *choices;
    self->lines[0].backend = self->lines[1].backend = self;
    pthread_mutex_init(&self->ends, NULL);
    zs_status status = make_room(self);
    ZS_THEN(status, meet_peers(self, control));
    ZS_THEN(status, make_comms(self, control));
    if (status == ZS_OK)
        *out = &self->base;
    else
        nccl_destroy(&self->base);
    return status;
}
