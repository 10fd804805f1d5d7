/* comm.c - common to all transports: references, numbers, passes, private memory. */
#include "comm/comm_local.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool (*_Atomic wait_hook)(void);

zs_comm *zs_comm_retain(zs_comm *comm)
{
    zs_refs_take(&comm->refs);
    return comm;
}

void zs_comm_release(zs_comm *comm)
{
    if (comm == NULL) return;
    if (!zs_refs_drop(&comm->refs)) return;
    zs_comm_close(comm);
    zs_comm_release(comm->near);
    zs_comm_set_others(comm, NULL);
    comm->ops->destroy(comm);
}

void zs_comm_on_wait(bool (*interrupted)(void))
{
    atomic_store(&wait_hook, interrupted);
}

bool zs_comm_interrupted(void)
{
    bool (*hook)(void) = atomic_load(&wait_hook);
    return hook != NULL && hook();
}

void zs_comm_set_near(zs_comm *comm, zs_comm *near)
{
    if (near == comm || near == comm->near || !zs_comm_shares_memory(near) || comm->ops->mapped) return;
    zs_comm_release(comm->near);
    comm->near = zs_comm_retain(near);
    near->patience = 10; /* longer than an unreachable store, and a rank that may still exit, keep c10d waiting */
}

bool zs_comm_shares_memory(const zs_comm *comm)
{
    return comm->ops->mapped && comm->world > 1;
}

void zs_comm_outlive(zs_comm *comm, double seconds)
{
    if (comm->failed && comm->ops->talk->outlive != NULL) comm->ops->talk->outlive(comm, seconds);
}

bool zs_comm_is_stopped(zs_comm *comm)
{
    return comm->ops->talk->is_stopped != NULL && comm->ops->talk->is_stopped(comm);
}

zs_status zs_check_exchange(size_t bytes)
{
    if (bytes <= 4096) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE, "an all-gather message of %zu bytes exceeds the limit of 4096 bytes", bytes);
}

zs_status zs_check_ranks_of_hosts(const zs_ranks_of_hosts *ranks)
{
    int world = ranks->world, per_host = ranks->per_host;
    if (world < 1 || ranks->rank < 0 || ranks->rank >= world)
        return ZS_FAIL(ZS_ERR_VALUE, "rank %d is out of range for world size %d", ranks->rank, world);
    if (per_host < 0 || (per_host > 0 && world % per_host != 0))
        return ZS_FAIL(ZS_ERR_VALUE, "world size %d is not a multiple of %d ranks per host", world, per_host);
    return ZS_OK;
}

zs_status zs_check_root(const zs_comm *comm, int root)
{
    if (root >= 0 && root < comm->world) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE, "rank %d is out of range for world size %d", root, comm->world);
}

/* --- numbers ------------------------------------------------------------------------------------------------------ */

zs_status zs_comm_align(zs_comm *comm)
{
    enum { MODELS, OWN, ALL = OWN + ZS_NUMBERS };
    const zs_flat_ops *ops = comm->ops->flats;
    uint64_t mine[ALL] = {[MODELS] = comm->models}, (*all)[ALL] = calloc((size_t)comm->world, sizeof *all);
    if (all == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the numbers of %d ranks", comm->world);
    if (ops->numbers != NULL) ops->numbers(comm, mine + OWN);
    zs_status status = zs_comm_exchange(comm, mine, sizeof mine, all);
    for (int r = 0; r < comm->world && status == ZS_OK; r++)
        for (int i = 0; i < ALL; i++)
            if (all[r][i] > mine[i]) mine[i] = all[r][i];
    free(all);
    ZS_TRY(status);
    zs_comm_publish(comm, ZS_ON_FAILURE, "");
    zs_comm_set_others(comm, NULL);
    comm->models = mine[MODELS];
    if (ops->continue_from != NULL) ops->continue_from(comm, mine + OWN);
    return ZS_OK;
}

/* --- texts for messages, and passes as numbers
 * ---------------------------------------------------------------------------- */

const char *zs_unit_label(const char *name)
{
    return *name != 0 ? name : "(root)";
}

void zs_comm_publish_fingerprint(zs_comm *comm, zs_reader *reader, const zs_fingerprint *before,
                                 const zs_fingerprint *now)
{
    zs_fingerprint_replace(&comm->fingerprint, before, now);
    zs_comm_set_others(comm, NULL); /* these texts are outdated */
    const zs_reader_ops *readers = comm->ops->readers;
    if (readers->publish_fingerprint != NULL && reader != NULL) readers->publish_fingerprint(comm, reader, now);
}

enum { PASS = 3, CHANGED = 4, EVAL_MODE = 8 };

uint64_t zs_reading_encode(const zs_reading *reading)
{
    if (reading->pass == ZS_PASS_BACKWARD) return ZS_PASS_BACKWARD; /* it keeps what its forward was */
    return (uint64_t)reading->pass | (reading->changed ? CHANGED : 0) | (reading->eval_mode ? EVAL_MODE : 0);
}

bool zs_reading_alike(uint64_t a, uint64_t b)
{
    return ((a ^ b) & (PASS | EVAL_MODE)) == 0;
}

bool zs_reading_changed(uint64_t reading)
{
    return (reading & CHANGED) != 0;
}

bool zs_reading_is_backward(uint64_t reading)
{
    return (reading & PASS) == ZS_PASS_BACKWARD;
}

bool zs_reading_is_look(uint64_t reading)
{
    return (reading & PASS) == ZS_PASS_EVALUATE;
}

zs_status zs_comm_fail_apart(const zs_comm *comm, int changed)
{
    return ZS_FAIL(
        ZS_ERR_DIVERGED,
        "rank %d: not all ranks run the same forward (does one evaluate, or has one skipped a batch?), and the "
        "parameters of rank %d were changed since its last optimizer step or load (weights of a moving average "
        "swapped in?), so the ranks' shards may be of different weights; change parameters and run forwards on "
        "all ranks alike",
        comm->rank, changed);
}

zs_status zs_comm_gather(zs_comm *comm, const zs_flat_mem *flat, const char *unit, zs_target to)
{
    zs_gathering *gathering = NULL;
    ZS_TRY(zs_comm_gather_start(comm, flat, unit, to, &gathering));
    return zs_comm_gather_finish(comm, gathering);
}

/* --- private memory, and readers where nothing is mapped ---------------------------------------------------------- */

/* No state: no peer can read this rank's memory. */
struct zs_reader {
    char unused;
};

zs_status zs_local_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out)
{
    *out = (zs_flat_mem){.shard_bytes = shard_bytes};
    ZS_TRY(zs_device_mem_new(comm->device, shard_bytes, &out->mem));
    out->shard = out->mem->ptr;
    return ZS_OK;
}

void zs_local_flat_free(zs_comm *comm, zs_flat_mem *flat)
{
    (void)comm;
    zs_mem_release(flat->mem);
    *flat = (zs_flat_mem){0};
}

zs_status zs_local_bucket_new(zs_comm *comm, size_t bytes, zs_bucket *out)
{
    *out = (zs_bucket){.bytes = bytes};
    if (comm->device->ops->queues) return ZS_OK; /* it is at rest */
    ZS_TRY(zs_device_mem_new(comm->device, bytes, &out->mem));
    out->ptr = out->mem->ptr;
    return ZS_OK;
}

size_t zs_local_bucket_room(size_t bytes)
{
    return bytes;
}

void zs_local_bucket_free(zs_comm *comm, zs_bucket *bucket)
{
    (void)comm;
    zs_mem_release(bucket->mem);
    *bucket = (zs_bucket){0};
}

zs_status zs_local_reader_new(zs_comm *comm, const char *name, zs_reader **out)
{
    (void)comm;
    *out = calloc(1, sizeof **out);
    if (*out == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the reader of '%s'", name);
    return ZS_OK;
}

void zs_local_reader_free(zs_comm *comm, zs_reader *reader)
{
    (void)comm;
    free(reader);
}

zs_status zs_local_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading)
{
    (void)reader;
    /* A backward uses the weights of its forward. */
    uint64_t kept = reading->pass == ZS_PASS_BACKWARD ? comm->reading & CHANGED : 0;
    comm->reading = zs_reading_encode(reading) | kept;
    return ZS_OK;
}

zs_status zs_local_read_end(zs_comm *comm, zs_reader *reader, zs_phase phase)
{
    (void)comm;
    (void)reader;
    (void)phase;
    return ZS_OK;
}

const zs_reader_ops zs_local_reader_ops = {
    .reader_new = zs_local_reader_new,
    .reader_free = zs_local_reader_free,
    .read_begin = zs_local_read_begin,
    .read_end = zs_local_read_end,
};
