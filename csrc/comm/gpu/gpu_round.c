/* gpu_round.c - reducing over GPUs.
 *
 * Two things travel. Which parameters had gradients goes from host to host, over the control transport, in a
 * separate round without a bucket; so every decision of the engine, and every error, is as on the CPU. The gradients
 * go from GPU to GPU, in the reduce stream, and no host waits for them: the sum is queued after their arrival. */
#include "comm/gpu/gpu.h"
#include "device/device_cuda.h"

#include <string.h>

zs_room zs_gpu_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    zs_room room = {0};
    if (spec == NULL) return room;
    const zs_wire_sums sums = zs_gpu_sums_of(comm, spec);
    bool coded = sums.code != ZS_WIRE_EXACT;
    room.record = zs_gpu_lost_bytes(comm, &sums);
    room.received = coded ? zs_gpu_coded_bytes(comm, spec, &sums) : zs_spec_shards_bytes(spec) * (size_t)comm->world;
    return room;
}

/* --- birth and end ------------------------------------------------------------------------------------------------ */

void zs_gpu_renamed(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_unit *unit = (zs_gpu_unit *)cunit;
    (void)zs_cunit_rename(((zs_gpu_comm *)comm)->control, unit->control, cunit->spec.name);
}

void zs_gpu_unit_clear(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    zs_gpu_unit *unit = (zs_gpu_unit *)cunit;
    zs_cunit_free(self->control, unit->control);
    zs_gpu_event_give(self, unit->read);
    zs_gpu_coded_clear(self, unit);
    if (--self->living == 0) {
        zs_arena_free(self->areas);
        self->areas = NULL;
    }
}

zs_status zs_gpu_unit_init(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    zs_gpu_unit *unit = (zs_gpu_unit *)cunit;
    zs_cunit_spec spec = {.name = cunit->spec.name, .n_params = cunit->spec.n_params};
    self->living++;
    unit->number = self->turns.n_units++;
    zs_cunit_lay_side_by_side(cunit);
    ZS_TRY(zs_gpu_coded_init(self, unit));
    ZS_TRY(zs_cunit_new(self->control, &spec, &unit->control));
    return zs_device_cuda_event_new(comm->device, &unit->read);
}

/* --- post --------------------------------------------------------------------------------------------------------- */

static zs_swap swap_of(const zs_gpu_unit *unit, const zs_mem *filler)
{
    const zs_cunit *base = &unit->base;
    zs_swap swap = {.name = base->spec.name, .n = base->spec.n_flats, .shard_of = base->spec.shard_of};
    swap.receive = unit->received->ptr;
    swap.stride = base->shards_bytes;
    swap.at = base->at;
    swap.filler = filler != NULL ? filler->ptr : NULL;
    for (int f = 0; f < swap.n; f++) {
        swap.bytes[f] = base->spec.shard_bytes[f];
        swap.send[f] = base->bucket != NULL ? base->bucket->ptr + zs_cunit_shard_at(base, f, 0) : NULL;
    }
    return swap;
}

/* Takes the memory of a round that is not coded. Before ranks agree on it: a rank that fails later leaves its peers'
 * GPUs in a swap, paired with its next move. */
static zs_status take_areas(zs_gpu_comm *comm, zs_gpu_unit *unit, zs_mem **filler)
{
    const zs_cunit *base = &unit->base;
    if (unit->lost != NULL) return ZS_OK;
    ZS_TRY(zs_gpu_take_area(comm, base->shards_bytes * (size_t)comm->base.world, &unit->received));
    return base->bucket == NULL ? zs_gpu_take_area(comm, base->shards_bytes, filler) : ZS_OK;
}

static zs_status move_shards(zs_gpu_comm *comm, zs_gpu_unit *unit, const zs_mem *filler)
{
    const zs_cunit *base = &unit->base;
    zs_swap swap = swap_of(unit, filler);
    zs_gpu_order_add(comm, "gradients", base->spec.name, base->shards_bytes);
    zs_status status = zs_device_fork(comm->base.device, ZS_STREAM_REDUCE); /* after the packing */
    zs_traffic_from_each(&comm->base, ZS_TRAFFIC_REDUCE, base->shards_bytes);
    ZS_THEN(status, comm->backend->ops->swap(comm->backend, &swap));
    ZS_THEN(status, zs_device_cuda_record(comm->base.device, ZS_STREAM_REDUCE, unit->read));
    unit->session = comm->base.sessions;
    return status == ZS_OK ? ZS_OK : zs_gpu_fail(comm, status);
}

zs_status zs_gpu_usable_for_rounds(zs_comm *comm)
{
    return zs_gpu_usable((zs_gpu_comm *)comm);
}

zs_status zs_gpu_send(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    zs_gpu_unit *unit = (zs_gpu_unit *)cunit;
    zs_mem *filler = NULL;
    zs_status status = take_areas(self, unit, &filler);
    ZS_THEN(status, zs_gpu_agree_on_round(self, unit, ZS_TURN_POST));
    if (status == ZS_OK) memcpy(zs_cunit_header(unit->control), cunit->header, cunit->header_bytes);
    ZS_THEN(status, zs_cunit_post(self->control, unit->control, NULL));
    ZS_THEN(status, unit->lost != NULL ? zs_gpu_send_coded(self, unit) : move_shards(self, unit, filler));
    zs_gpu_return_area(self, &filler);
    return status;
}

/* --- collect, share, release -------------------------------------------------------------------------------------- */

/* Waits for the peers' hosts, never for a GPU. */
zs_status zs_gpu_arrive(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    zs_gpu_unit *unit = (zs_gpu_unit *)cunit;
    zs_sources hosts;
    *ready = true;
    if (unit->lost != NULL) {
        zs_gpu_arrive_coded(self, unit);
        return ZS_OK;
    }
    ZS_TRY(zs_gpu_after_wait(self, zs_cunit_collect(self->control, unit->control, wait, ready, &hosts)));
    for (int r = 0; r < comm->world && *ready; r++) {
        const char *piece = (const char *)unit->received->ptr + (size_t)r * cunit->shards_bytes;
        cunit->headers[r] = hosts.headers[r];
        cunit->data[r] = (hosts.headers[r]->flags & ZS_ROUND_BUCKET) != 0 ? piece : NULL;
    }
    return ZS_OK;
}

/* Sends each rank's sum to all, in place. */
zs_status zs_gpu_share(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_agree_on_round(self, (zs_gpu_unit *)cunit, ZS_TURN_SHARE));
    zs_gpu_order_add(self, "reduced gradients", cunit->spec.name, cunit->shards_bytes);
    zs_traffic_from_each(comm, ZS_TRAFFIC_REDUCE, cunit->shards_bytes);
    zs_status status = ZS_OK;
    for (int f = 0; f < cunit->spec.n_flats && status == ZS_OK; f++) {
        char *all = cunit->bucket->ptr + zs_cunit_shard_at(cunit, f, 0);
        size_t bytes = cunit->spec.shard_bytes[f];
        const char *own = all + (size_t)comm->rank * bytes;
        status = self->backend->ops->gather(self->backend, ZS_STREAM_REDUCE, own, all, bytes);
    }
    return status == ZS_OK ? ZS_OK : zs_gpu_fail(self, status);
}

zs_status zs_gpu_release(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_unit *unit = (zs_gpu_unit *)cunit;
    /* The shared sums are read from the bucket. */
    if (cunit->spec.mode == ZS_REDUCE_ALL) ZS_TRY(zs_device_cuda_record(comm->device, ZS_STREAM_REDUCE, unit->read));
    return zs_cunit_release(((zs_gpu_comm *)comm)->control, unit->control);
}

/* The next user receives there in the same stream. */
void zs_gpu_drop(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_return_area((zs_gpu_comm *)comm, &((zs_gpu_unit *)cunit)->received);
}

/* Immediately: the compute stream waits for outstanding reads. */
zs_status zs_gpu_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    (void)wait;
    const zs_gpu_unit *unit = (const zs_gpu_unit *)cunit;
    if (!*ready || unit->session != comm->sessions) return ZS_OK;
    return zs_device_cuda_await(comm->device, ZS_STREAM_COMPUTE, unit->read);
}

/* --- texts -------------------------------------------------------------------------------------------------------- */

void zs_gpu_publish(zs_comm *comm, zs_topic topic, const char *text)
{
    zs_comm_publish(((zs_gpu_comm *)comm)->control, topic, text);
}

const char *zs_gpu_published(const zs_comm *comm, int rank, zs_topic topic)
{
    const zs_comm *control = ((const zs_gpu_comm *)comm)->control;
    return zs_comm_published(control, rank, topic);
}

bool zs_gpu_locate(zs_comm *comm, char (*texts)[ZS_WHERE])
{
    zs_comm *control = ((zs_gpu_comm *)comm)->control;
    return control->ops->talk->locate != NULL && control->ops->talk->locate(control, texts);
}

/* Only here does the control transport get fingerprints. */
zs_status zs_gpu_end(zs_comm *comm, zs_fingerprint *fingerprints, bool *all)
{
    zs_comm *control = ((const zs_gpu_comm *)comm)->control;
    if (control->ops->talk->end == NULL) return ZS_OK;
    control->fingerprint = comm->fingerprint;
    return control->ops->talk->end(control, fingerprints, all);
}
