/* peer_round.c - reducing where GPUs map each other's memory. See peer.h and gpu_round.c.
 *
 * The one idea: nothing is received. Where a bucket lies travels between the hosts, beside the used parameters of the round;
 * the sum reads its sources there. Three numbers of each unit in the pads say that a rank's bucket may be read, that its sum
 * may, and that it has read the others': the counters of shm_round.c, with streams in the place of hosts.
 */
#include "base/bits.h"
#include "comm/peer/peer.h"
#include "device/device_cuda.h"

#include <stdlib.h>
#include <string.h>

typedef struct peer_unit {
    zs_cunit base;
    zs_cunit *control;       /* its round between the hosts; owned */
    uint64_t *posted;        /* [used_words, then a zs_peer_address] what this rank says in it; owned */
    const zs_bucket *bucket; /* of the round that is out, NULL: it brings nothing; borrowed */
    zs_cu_event read;        /* this rank has read all; NULL: no round yet */
    bool placed;             /* has a place */
    uint32_t place;          /* in the pads */
    bool unread;             /* peers may be reading the bucket */
} peer_unit;

enum { ADDRESS_WORDS = (sizeof(zs_peer_address) + 7) / 8 };

zs_room zs_peer_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    zs_room room = {0};
    if (spec == NULL) room.fixed = zs_peer_pad_bytes(comm->world) + ZS_PEER_STAGE;
    return room;
}

/* --- birth and end ----------------------------------------------------------------------------------------------------- */

void zs_peer_cunit_renamed(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *gpu = (zs_gpu_comm *)comm;
    peer_unit *unit = (peer_unit *)cunit;
    if (unit->control != NULL) (void)zs_cunit_rename(gpu->control, unit->control, cunit->spec.name);
}

void zs_peer_cunit_free(zs_comm *comm, zs_cunit *cunit)
{
    if (cunit == NULL) return;
    zs_gpu_comm *gpu = (zs_gpu_comm *)comm;
    peer_unit *unit = (peer_unit *)cunit;
    if (unit->control != NULL) zs_cunit_free(gpu->control, unit->control);
    if (unit->placed) zs_peer_of(comm)->taken[unit->place] = false;
    zs_gpu_event_give(gpu, unit->read);
    free(unit->posted);
    zs_cunit_clear(cunit);
    free(unit);
}

/* Units are made in one order on all ranks, so they find the same places. */
static zs_status take_place(zs_peer *self, peer_unit *unit)
{
    unit->place = (uint32_t)(self->units++ % ZS_PEER_UNITS);
    if (self->taken[unit->place])
        return ZS_FAIL(
            ZS_ERR_STATE,
            "unit '%s': transport 'peer' supports at most %d units; wrap fewer modules, or pass transport='nccl'",
            unit->base.spec.name, (int)ZS_PEER_UNITS);
    unit->placed = self->taken[unit->place] = true;
    return ZS_OK;
}

static zs_status make_control(zs_gpu_comm *gpu, peer_unit *unit)
{
    zs_cunit_spec spec = {.name = unit->base.spec.name};
    size_t words = unit->base.used_words + ADDRESS_WORDS;
    spec.n_params = unit->base.spec.n_params;
    spec.n_more = 64 * words - spec.n_params;
    unit->posted = calloc(words, sizeof *unit->posted);
    if (unit->posted == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec.name);
    return zs_cunit_new(gpu->control, &spec, &unit->control);
}

zs_status zs_peer_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out)
{
    peer_unit *unit = calloc(1, sizeof *unit);
    if (unit == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", spec->name);
    zs_status status = zs_cunit_init(&unit->base, spec, comm);
    ZS_THEN(status, make_control((zs_gpu_comm *)comm, unit));
    ZS_THEN(status, take_place(zs_peer_of(comm), unit));
    if (status == ZS_OK)
        *out = &unit->base;
    else
        zs_peer_cunit_free(comm, &unit->base);
    return status;
}

/* --- numbers in the pads ------------------------------------------------------------------------------------------------- */

static size_t words_of(const zs_peer *self, const peer_unit *unit, zs_peer_word word)
{
    return zs_peer_unit_words(self, unit->place, word);
}

static zs_status say(zs_peer *self, const peer_unit *unit, zs_peer_word word)
{
    return zs_peer_say(self, ZS_STREAM_REDUCE, words_of(self, unit, word), self->rounds[unit->place]);
}

static zs_status hear(zs_peer *self, const peer_unit *unit, zs_stream stream, zs_peer_word word)
{
    return zs_peer_hear(self, stream, words_of(self, unit, word), self->rounds[unit->place]);
}

/* --- post ---------------------------------------------------------------------------------------------------------------- */

static zs_status put_address(zs_peer *self, peer_unit *unit, const zs_bucket *bucket)
{
    zs_peer_address address = {0};
    if (bucket != NULL) ZS_TRY(zs_peer_tell(self->maps, bucket->ptr, &address));
    memcpy(unit->posted + unit->base.used_words, &address, sizeof address);
    return ZS_OK;
}

/* A rank that brings nothing says so too: it has what it gathered of the unit behind it then, as its peers may rely on. */
static zs_status offer(zs_gpu_comm *gpu, peer_unit *unit)
{
    zs_peer *self = (zs_peer *)gpu->backend;
    self->rounds[unit->place]++;
    ZS_TRY(zs_gpu_note(gpu, "gradients", unit->base.spec.name, unit->base.piece_bytes));
    if (unit->read == NULL) ZS_TRY(zs_gpu_event_take(gpu, &unit->read));
    ZS_TRY(zs_device_fork(gpu->base.device, ZS_STREAM_REDUCE)); /* behind the packing */
    return say(self, unit, ZS_PEER_READY);
}

zs_status zs_peer_post(zs_comm *comm, zs_cunit *cunit, const zs_bucket *bucket, const uint64_t *used)
{
    zs_gpu_comm *gpu = (zs_gpu_comm *)comm;
    peer_unit *unit = (peer_unit *)cunit;
    ZS_TRY(zs_gpu_usable(gpu));
    ZS_TRY(zs_cunit_may_post(cunit, bucket));
    ZS_TRY(put_address(zs_peer_of(comm), unit, bucket));
    memcpy(unit->posted, used, cunit->used_words * sizeof *used);
    ZS_TRY(zs_cunit_post(gpu->control, unit->control, NULL, unit->posted));
    cunit->round++;
    unit->bucket = bucket;
    unit->unread = true;
    cunit->state = ZS_ROUND_POSTED;
    zs_status status = offer(gpu, unit);
    return status == ZS_OK ? ZS_OK : zs_gpu_fail(gpu, status);
}

/* --- collect, share, release ------------------------------------------------------------------------------------------- */

/* Where the buckets of all ranks are here. */
static zs_status find_buckets(zs_peer *self, peer_unit *unit, const zs_sources *said)
{
    for (int r = 0; r < self->base.world; r++) {
        zs_peer_address address;
        char *at = NULL;
        memcpy(&address, said->used[r] + unit->base.used_words, sizeof address);
        unit->base.used[r] = said->used[r];
        if (r == self->base.rank)
            at = unit->bucket != NULL ? unit->bucket->ptr : NULL;
        else if (address.number != 0)
            ZS_TRY(zs_peer_map(self->maps, r, &address, &at));
        unit->base.data[r] = at;
    }
    return ZS_OK;
}

zs_status zs_peer_collect(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    zs_gpu_comm *gpu = (zs_gpu_comm *)comm;
    zs_peer *self = zs_peer_of(comm);
    peer_unit *unit = (peer_unit *)cunit;
    zs_sources said;
    ZS_TRY(zs_gpu_hear_hosts(gpu, cunit, unit->control, wait, ready, &said));
    if (!*ready) return ZS_OK;
    zs_status status = find_buckets(self, unit, &said);
    ZS_THEN(status, hear(self, unit, ZS_STREAM_REDUCE, ZS_PEER_READY));
    ZS_THEN(status, zs_peer_watch_move(self, ZS_STREAM_REDUCE, "gradient reduction", cunit->spec.name));
    if (status != ZS_OK) return zs_gpu_fail(gpu, status);
    cunit->state = ZS_ROUND_COLLECTED;
    zs_cunit_sources(cunit, out);
    return ZS_OK;
}

zs_status zs_peer_share(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *gpu = (zs_gpu_comm *)comm;
    ZS_TRY(zs_gpu_usable(gpu));
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_COLLECTED, "share"));
    zs_status status = zs_gpu_note(gpu, "reduced gradients", cunit->spec.name, cunit->piece_bytes);
    ZS_THEN(status, say(zs_peer_of(comm), (peer_unit *)cunit, ZS_PEER_SHARED));
    if (status != ZS_OK) return zs_gpu_fail(gpu, status);
    cunit->state = ZS_ROUND_SHARED;
    return ZS_OK;
}

/* No host waits: that all ranks share what they have collected is sure. */
zs_status zs_peer_collect_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out)
{
    (void)wait;
    zs_gpu_comm *gpu = (zs_gpu_comm *)comm;
    zs_peer *self = zs_peer_of(comm);
    ZS_TRY(zs_gpu_usable(gpu));
    ZS_TRY(zs_cunit_expect(cunit, ZS_ROUND_SHARED, "collect_shared"));
    zs_status status = hear(self, (peer_unit *)cunit, ZS_STREAM_REDUCE, ZS_PEER_SHARED);
    if (status == ZS_OK)
        status = zs_peer_watch_move(self, ZS_STREAM_REDUCE, "all-gather of reduced gradients", cunit->spec.name);
    if (status != ZS_OK) return zs_gpu_fail(gpu, status);
    cunit->state = ZS_ROUND_GATHERED;
    zs_cunit_sources(cunit, out);
    *ready = true;
    return ZS_OK;
}

zs_status zs_peer_release(zs_comm *comm, zs_cunit *cunit)
{
    zs_gpu_comm *gpu = (zs_gpu_comm *)comm;
    peer_unit *unit = (peer_unit *)cunit;
    ZS_TRY(zs_gpu_usable(gpu));
    ZS_TRY(zs_cunit_may_release(cunit));
    zs_status status = say(zs_peer_of(comm), unit, ZS_PEER_DONE); /* behind the sums */
    ZS_THEN(status, zs_device_cuda_record(comm->device, ZS_STREAM_REDUCE, unit->read));
    if (status != ZS_OK) return zs_gpu_fail(gpu, status);
    cunit->state = ZS_ROUND_NONE;
    return zs_cunit_release(gpu->control, unit->control);
}

zs_status zs_peer_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready)
{
    (void)wait;
    zs_gpu_comm *gpu = (zs_gpu_comm *)comm;
    zs_peer *self = zs_peer_of(comm);
    peer_unit *unit = (peer_unit *)cunit;
    *ready = cunit->state == ZS_ROUND_NONE;
    if (!*ready || !unit->unread) return ZS_OK;
    ZS_TRY(zs_gpu_usable(gpu));
    unit->unread = false;
    zs_status status = zs_device_cuda_await(comm->device, ZS_STREAM_COMPUTE, unit->read);
    ZS_THEN(status, hear(self, unit, ZS_STREAM_COMPUTE, ZS_PEER_DONE));
    ZS_THEN(status, zs_peer_watch_move(self, ZS_STREAM_COMPUTE, "release of gradients", cunit->spec.name));
    return status == ZS_OK ? ZS_OK : zs_gpu_fail(gpu, status);
}
