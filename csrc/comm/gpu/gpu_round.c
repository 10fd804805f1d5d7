/* gpu_round.c - reducing over GPUs.
 *
 * Two things travel. Which parameters had gradients goes from host to host, over the control transport, in a
 * round of its own without a bucket; so everything that the engine decides, and every error, is as on the CPU. The gradients
 * go from GPU to GPU, in the reduce stream, and no host waits for them: the sum is queued behind their arrival.
 */
#include "base/bits.h"
#include "comm/gpu/gpu.h"
#include "device/device_cuda.h"

#include <stdlib.h>
#include <string.h>

typedef struct gpu_unit {
    zs_cunit base;
    zs_cunit *control;       /* its round between the hosts; owned */
    uint64_t *posted;        /* [words of the control's bitmap] what this rank says in it; owned */
    const zs_bucket *bucket; /* of the round that is out, NULL: it brings nothing; borrowed */
    zs_mem *received;        /* area of that round, NULL: none */
    zs_cu_event read;        /* the bucket of the last round has been read */
    uint64_t session;        /* in which that was recorded last */
} gpu_unit;

/* The bit by which a rank says that it brings a bucket: behind those of the unit. */
static int64_t present_bit(const gpu_unit *unit)
{
    return (int64_t)(unit->base.spec.n_params + unit->base.spec.n_more);
}

zs_room zs_gpu_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    zs_room room = {0};
    if (spec != NULL) room.received = zs_spec_piece_bytes(spec) * (size_t)comm->world;
    return room;
}

/* --- birth and end ----------------------------------------------------------------------------------------------------- */

static void return_area(zs_gpu_comm *comm, zs_mem **area)
{
    if (*area != NULL) zs_arena_give(comm->areas, *area);
    *area = NULL;
}

void zs_gpu_cunit_renamed(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    gpu_unit *unit = (gpu_unit *)cunit;
    if (unit->control != NULL) (void)zs_cunit_rename(self->control, unit->control, cunit->spec.name);
}

void zs_gpu_cunit_free(zs_comm *comm, zs_cunit *cunit)
{
    if (cunit == NULL) return;
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    gpu_unit *unit = (gpu_unit *)cunit;
    if (unit->control != NULL) zs_cunit_free(self->control, unit->control);
    return_area(self, &unit->received);
    zs_gpu_event_give(self, unit->read);
    if (--self->living == 0) {
        zs_arena_free(self->areas);
        self->areas = NULL;
    }
    free(unit->posted);
    zs_cunit_clear(cunit);
    free(unit);
}

static zs_status make_control(zs_gpu_comm *comm, gpu_unit *unit)
{
    const zs_cunit_spec *own = &unit->base.spec;
    zs_cunit_spec spec = {.name = own->name, .n_params = own->n_params, .n_more = own->n_more + 1};
    unit->posted = calloc(zs_spec_used_words(&spec), sizeof *unit->posted);
    if (unit->posted == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec.name);
    return zs_cunit_new(comm->control, &spec, &unit->control);
}

zs_status zs_gpu_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out)
{
    gpu_unit *unit = calloc(1, sizeof *unit);
    if (unit == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec->name);
    ((zs_gpu_comm *)comm)->living++;
    zs_status status = zs_cunit_init(&unit->base, spec, comm);
    ZS_THEN(status, make_control((zs_gpu_comm *)comm, unit));
    ZS_THEN(status, zs_device_cuda_event_new(comm->device, &unit->read));
    if (status != ZS_OK) {
        zs_gpu_cunit_free(comm, &unit->base);
        return status;
    }
    zs_cunit_lay_side_by_side(&unit->base);
    *out = &unit->base;
    return ZS_OK;
}

/* --- post -------------------------------------------------------------------------------------------------------------- */

static zs_status take_area(zs_gpu_comm *comm, size_t bytes, zs_mem **area)
{
    ZS_TRY(zs_gpu_make_areas(comm));
    return zs_arena_take(comm->areas, bytes, area);
}

static zs_swap swap_of(const gpu_unit *unit, const zs_mem *keep_gathered)
{
    const zs_cunit *base = &unit->base;
    zs_swap swap = {.name = base->spec.name, .n = base->spec.n_slices, .part_of = base->spec.part_of};
    swap.receive = unit->received->ptr;
    swap.stride = base->piece_bytes;
    swap.at = base->at;
    swap.keep_gathered = keep_gathered != NULL ? keep_gathered->ptr : NULL;
    for (int f = 0; f < swap.n; f++) {
        swap.bytes[f] = base->spec.slice_bytes[f];
        swap.send[f] = unit->bucket != NULL ? unit->bucket->ptr + zs_cunit_slice_at(base, f, 0) : NULL;
    }
    return swap;
}

static zs_status move_slices(zs_gpu_comm *comm, gpu_unit *unit)
{
    zs_mem *keep_gathered = NULL;
    ZS_TRY(take_area(comm, unit->base.piece_bytes * (size_t)comm->base.world, &unit->received));
    if (unit->bucket == NULL) ZS_TRY(take_area(comm, unit->base.piece_bytes, &keep_gathered));
    zs_swap swap = swap_of(unit, keep_gathered);
    zs_status status = zs_gpu_note(comm, "gradients", unit->base.spec.name, unit->base.piece_bytes);
    ZS_THEN(status, zs_device_fork(comm->base.device, ZS_STREAM_REDUCE)); /* behind the packing */
    ZS_THEN(status, comm->backend->ops->swap(comm->backend, &swap));
    ZS_THEN(status, zs_device_cuda_record(comm->base.device, ZS_STREAM_REDUCE, unit->read));
    unit->session = comm->base.sessions;
    return_area(comm, &keep_gathered);
    return status == ZS_OK ? ZS_OK : zs_gpu_fail(comm, status);
}

zs_status zs_gpu_post(zs_comm *comm, zs_cunit *cunit, const zs_bucket *bucket, const uint64_t *used)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    gpu_unit *unit = (gpu_unit *)cunit;
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(zs_cunit_may_post(cunit, bucket));
    memcpy(unit->posted, used, cunit->used_words * sizeof *used);
    zs_clear_bit(unit->posted, present_bit(unit));
    if (bucket != NULL) zs_set_bit(unit->posted, present_bit(unit));
    ZS_TRY(zs_cunit_post(self->control, unit->control, NULL, unit->posted));
    cunit->round++;
    unit->bucket = bucket;
    cunit->state = ZS_ROUND_POSTED;
    return move_slices(self, unit);
}

/* --- collect, share, release ------------------------------------------------------------------------------------------- */

zs_status zs_gpu_collect(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    gpu_unit *unit = (gpu_unit *)cunit;
    zs_sources said;
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_POSTED, "collect"));
    /* In ZS_REDUCE_ALL another transfer follows, so all ranks must collect in one order: no looking first. */
    zs_wait how = cunit->spec.mode == ZS_REDUCE_ALL ? ZS_WAIT : wait;
    ZS_TRY(zs_gpu_after_wait(self, zs_cunit_collect(self->control, unit->control, how, ready, &said)));
    if (!*ready) return ZS_OK;
    for (int r = 0; r < comm->world; r++) {
        const char *piece = (const char *)unit->received->ptr + (size_t)r * cunit->piece_bytes;
        cunit->used[r] = said.used[r];
        cunit->data[r] = zs_get_bit(said.used[r], present_bit(unit)) ? piece : NULL;
    }
    cunit->state = ZS_ROUND_COLLECTED;
    zs_cunit_sources(cunit, out);
    return ZS_OK;
}

/* Each rank's sum to all, in place. */
zs_status zs_gpu_share(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    gpu_unit *unit = (gpu_unit *)cunit;
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_COLLECTED, "share"));
    zs_status status = zs_gpu_note(self, "reduced gradients", cunit->spec.name, cunit->piece_bytes);
    for (int f = 0; f < cunit->spec.n_slices && status == ZS_OK; f++) {
        char *all = unit->bucket->ptr + zs_cunit_slice_at(cunit, f, 0);
        size_t bytes = cunit->spec.slice_bytes[f];
        const char *own = all + (size_t)comm->rank * bytes;
        status = self->backend->ops->gather(self->backend, ZS_STREAM_REDUCE, own, all, bytes);
    }
    if (status != ZS_OK) return zs_gpu_fail(self, status);
    for (int r = 0; r < comm->world; r++)
        cunit->data[r] = unit->bucket->ptr;
    cunit->state = ZS_ROUND_SHARED;
    return ZS_OK;
}

zs_status zs_gpu_collect_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    (void)comm;
    (void)wait;
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_SHARED, "collect_shared"));
    cunit->state = ZS_ROUND_GATHERED;
    zs_cunit_sources(cunit, out);
    *ready = true;
    return ZS_OK;
}

zs_status zs_gpu_release(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *self = (zs_gpu_comm *)comm;
    gpu_unit *unit = (gpu_unit *)cunit;
    ZS_TRY(zs_gpu_usable(self));
    ZS_TRY(zs_cunit_may_release(cunit));
    /* What was shared is read from the bucket. */
    if (cunit->spec.mode == ZS_REDUCE_ALL) ZS_TRY(zs_device_cuda_record(comm->device, ZS_STREAM_REDUCE, unit->read));
    return_area(self, &unit->received); /* the next one to receive there does so in the same stream */
    cunit->state = ZS_ROUND_NONE;
    return zs_cunit_release(self->control, unit->control);
}

zs_status zs_gpu_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    (void)wait;
    gpu_unit *unit = (gpu_unit *)cunit;
    *ready = cunit->spec.mode == ZS_REDUCE_SCATTER || cunit->state == ZS_ROUND_NONE;
    if (!*ready || unit->session != comm->sessions) return ZS_OK;
    return zs_device_cuda_await(comm->device, ZS_STREAM_COMPUTE, unit->read);
}

/* --- words -------------------------------------------------------------------------------------------------------------- */

void zs_gpu_publish(zs_comm *comm, zs_topic topic, const char *text)
{
    zs_comm_publish(((zs_gpu_comm *)comm)->control, topic, text);
}

const char *zs_gpu_published(const zs_comm *comm, int rank, zs_topic topic)
{
    const zs_comm *control = ((const zs_gpu_comm *)comm)->control;
    return zs_comm_published(control, rank, topic);
}

/* The control is never told of fingerprints but here. */
zs_status zs_gpu_end(zs_comm *comm, zs_fingerprint *fingerprints, bool *all)
{
    zs_comm *control = ((const zs_gpu_comm *)comm)->control;
    if (control->ops->talk->end == NULL) return ZS_OK;
    control->fingerprint = comm->fingerprint;
    return control->ops->talk->end(control, fingerprints, all);
}
