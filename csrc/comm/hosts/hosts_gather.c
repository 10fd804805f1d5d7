/* hosts_gather.c - gathering in two levels. See hosts.h.
 *
 * The one idea: a slot is memory that the ranks of a host share, so what one of them receives is there for all. Before a gather
 * all ranks say which slot they mean. Ranks of one host that mean the same have all taken it for this gather, so nobody uses what
 * was in it. Ranks that mean different ones have gone different ways (one evaluates alone, say): then each gathers for itself,
 * over all ranks, into memory of its own that takes the slot's place in its address space. Where shards cross as codes
 * (hosts_params.c), it makes of these what their codes say.
 */
#include "comm/hosts/hosts.h"

#include "base/file.h"
#include "base/fold.h"

#include <stdlib.h>
#include <string.h>

/* --- slots ---------------------------------------------------------------------------------------------------------------- */

typedef struct hosts_slot {
    zs_flat_mem shared; /* of the host's ranks' transport */
    uint64_t id;        /* equal on two ranks only if they have made the same slots up to this one */
    int lane;
    bool apart; /* this rank has memory of its own in its place */
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

/* The slot that begins at the target; NULL: it is other memory. */
static hosts_slot *slot_of(zs_target to)
{
    if (to.mem->destroy != release_slot || to.full != to.mem->ptr) return NULL;
    return to.mem->owner;
}

/* What the turn says of it. A host with one rank shares with nobody. */
static uint64_t id_of(const zs_hosts_comm *self, const hosts_slot *slot)
{
    if (zs_hosts_per_host(self) == 1) return 1;
    return slot != NULL ? slot->id : 0;
}

/* From here on the slot is this rank's alone, or the host's again. */
static zs_status set_apart(hosts_slot *slot, bool apart)
{
    if (slot == NULL || slot->apart == apart) return ZS_OK;
    ZS_TRY(zs_file_set_apart(slot->shared.mem, slot->lane, apart));
    slot->apart = apart;
    return ZS_OK;
}

/* --- gathering ------------------------------------------------------------------------------------------------------------ */

typedef struct hosts_gathering {
    zs_c10d_turn turn;
    zs_gathering *flat; /* over all ranks; NULL: in two levels */
    uint64_t number;    /* in two levels */
    zs_hosts_code code;
    zs_mem *codes;    /* (coded, in two levels) an area, [hosts] of them */
    zs_mem *mem;      /* counted reference */
    char *full;       /* within it */
    zs_work *works[]; /* [hosts] a broadcast from each */
} hosts_gathering;

static hosts_gathering *gathering_new(const zs_hosts_comm *self, zs_target to)
{
    size_t works = (size_t)self->hosts * sizeof(zs_work *);
    hosts_gathering *made = calloc(1, sizeof *made + works);
    if (made == NULL) return NULL;
    made->mem = zs_mem_retain(to.mem);
    made->full = to.full;
    return made;
}

static void gathering_free(hosts_gathering *gathering)
{
    zs_mem_release(gathering->mem);
    free(gathering);
}

/* What the broadcast from a host moves, and who is told of its end. */
typedef struct leg {
    char *data;
    void (*arrived)(void *arg, bool good);
    void *arg;
} leg;

/* Begins the broadcast from host `h`. */
static zs_status start_leg(zs_hosts_comm *self, int h, leg it, size_t bytes, zs_work **work, zs_status status)
{
    ZS_THEN(status, zs_group_broadcast(self->across, it.data, bytes, h, work));
    zs_status told = status == ZS_OK ? zs_work_then(*work, it.arrived, it.arg) : status;
    if (told != ZS_OK) it.arrived(it.arg, false);
    ZS_THEN(status, told);
    return status;
}

/* Begins the broadcasts by which each counterpart gets this rank's shard, and this rank theirs, each into its place. */
static zs_status start_across(zs_hosts_comm *self, const zs_flat_mem *flat, hosts_gathering *gathering,
                              zs_hosts_arrival *arrival)
{
    size_t bytes = flat->shard_bytes;
    memcpy(gathering->full + (size_t)self->c10d.base.rank * bytes, flat->shard, bytes);
    zs_status status = ZS_OK;
    for (int h = 0; h < self->hosts; h++) {
        char *place = gathering->full + (size_t)zs_hosts_rank(self, h, self->lane) * bytes;
        leg it = {h == self->host ? flat->shard : place, zs_hosts_arrived, arrival};
        status = start_leg(self, h, it, bytes, &gathering->works[h], status);
    }
    return status;
}

/* The same of codes, which are decoded into their places. */
static zs_status start_coded(zs_hosts_comm *self, const zs_flat_mem *flat, hosts_gathering *gathering,
                             zs_hosts_arrival *arrival)
{
    const zs_hosts_code *code = &gathering->code;
    zs_target to = {.mem = gathering->mem, .full = gathering->full};
    zs_hosts_decoding *decoding = NULL;
    char *codes = gathering->codes->ptr;
    zs_status status = zs_hosts_decoding_new(self, code, gathering->codes, to, arrival, &decoding);
    if (status != ZS_OK) {
        for (int h = 0; h < self->hosts; h++)
            zs_hosts_arrived(arrival, false);
        return status;
    }
    zs_hosts_encode_shard(code, flat->shard, codes + (size_t)self->host * code->stride);
    for (int h = 0; h < self->hosts; h++) {
        leg it = {codes + (size_t)h * code->stride, zs_hosts_code_arrived, zs_hosts_decoding_part(decoding, h)};
        status = start_leg(self, h, it, code->bytes, &gathering->works[h], status);
    }
    return status;
}

/* Codes are in an area until the gather has ended: as units do, they keep the areas. */
static zs_status borrow_codes(zs_hosts_comm *self, hosts_gathering *gathering)
{
    if (gathering->code.wire == ZS_WIRE_EXACT) return ZS_OK;
    ZS_TRY(zs_c10d_borrow_area(&self->c10d, gathering->code.stride * (size_t)self->hosts, &gathering->codes));
    self->c10d.living++;
    return ZS_OK;
}

static void return_codes(zs_hosts_comm *self, hosts_gathering *gathering)
{
    if (gathering->codes == NULL) return;
    zs_c10d_return_area(&self->c10d, &gathering->codes);
    self->c10d.living--;
}

static zs_status start_in_two_levels(zs_hosts_comm *self, const zs_flat_mem *flat, hosts_gathering *gathering)
{
    zs_hosts_arrival *arrival = NULL;
    bool coded = gathering->code.wire != ZS_WIRE_EXACT;
    gathering->number = ++self->gathers;
    ZS_TRY(borrow_codes(self, gathering));
    ZS_TRY(zs_hosts_arrival_new(self, gathering->number, self->hosts, &arrival));
    zs_group_set_timeout(self->across, self->c10d.base.timeout);
    return coded ? start_coded(self, flat, gathering, arrival) : start_across(self, flat, gathering, arrival);
}

static zs_status start(zs_hosts_comm *self, const zs_flat_mem *flat, zs_target to, hosts_gathering *gathering)
{
    zs_c10d_comm *c10d = &self->c10d;
    hosts_slot *slot = slot_of(to);
    gathering->turn.slot = id_of(self, slot);
    ZS_TRY(zs_c10d_agree(c10d, &gathering->turn));
    zs_status status = set_apart(slot, !c10d->same_slots);
    if (status == ZS_OK && !c10d->same_slots)
        return zs_c10d_gather_agreed(c10d, &gathering->turn, flat->shard, to, &gathering->flat);
    ZS_THEN(status, start_in_two_levels(self, flat, gathering));
    return status == ZS_OK ? ZS_OK : zs_c10d_fail(c10d, &gathering->turn, status);
}

zs_status zs_hosts_gather_start(zs_comm *comm, const zs_flat_mem *flat, const char *name, zs_target to,
                                zs_gathering **out)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_gathering *gathering = gathering_new(self, to);
    if (gathering == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory all-gathering unit '%s'", name);
    gathering->code = zs_hosts_code_of(to.code, to.dtype, flat->shard_bytes);
    gathering->turn = zs_c10d_gather_turn(&self->c10d, flat, name);
    gathering->turn.round = gathering->code.wire;
    zs_status status = start(self, flat, to, gathering);
    if (status == ZS_OK) {
        *out = (zs_gathering *)gathering;
        return ZS_OK;
    }
    zs_hosts_leave(self, gathering->works, (size_t)self->hosts, gathering->mem);
    gathering_free(gathering);
    return zs_hosts_pass(self, status);
}

/* All ranks' shards have come as they are: makes of them what their codes say. */
static void round_all(const zs_hosts_comm *self, const hosts_gathering *gathering)
{
    for (int r = 0; r < self->c10d.base.world && gathering->code.wire != ZS_WIRE_EXACT; r++)
        zs_hosts_round_shard(&gathering->code, gathering->full + (size_t)r * gathering->turn.bytes);
}

static zs_status finish_flat(zs_hosts_comm *self, hosts_gathering *gathering)
{
    ZS_TRY(zs_c10d_gather_finish(&self->c10d.base, gathering->flat));
    round_all(self, gathering);
    return ZS_OK;
}

/* After a failure torch's threads may still write to the codes. */
static zs_status finish_in_two_levels(zs_hosts_comm *self, hosts_gathering *gathering)
{
    size_t n = (size_t)self->hosts;
    ZS_TRY(zs_hosts_finish(self, &gathering->turn, gathering->works, n, gathering->mem));
    ZS_TRY(zs_hosts_await(self, &gathering->turn, gathering->number));
    return_codes(self, gathering);
    return ZS_OK;
}

zs_status zs_hosts_gather_finish(zs_comm *comm, zs_gathering *handle)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    hosts_gathering *gathering = (hosts_gathering *)handle;
    bool flat = gathering->flat != NULL;
    zs_status status = flat ? finish_flat(self, gathering) : finish_in_two_levels(self, gathering);
    gathering_free(gathering);
    return zs_hosts_pass(self, status);
}
