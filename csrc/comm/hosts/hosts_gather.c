/* hosts_gather.c - gathering in two levels. See hosts.h.
 *
 * The one idea: a slot is memory that the ranks of a host share, so what one of them receives is there for all. Before a gather
 * all ranks say which slot they mean. Ranks of one host that mean the same have all taken it for this gather, so nobody uses what
 * was in it. Ranks that mean different ones have gone different ways (one evaluates alone, say): then each gathers for itself,
 * over all ranks, into memory of its own that takes the slot's place in its address space.
 */
#include "comm/hosts/hosts.h"

#include "base/file.h"
#include "base/fold.h"

#include <stdio.h>
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

struct zs_hosts_gathering {
    zs_hosts_ticket ticket; /* the first: see begin */
    zs_flat_mem source;
    zs_target to; /* a counted reference */
    zs_model model;
    zs_gathering *flat;        /* over all ranks; NULL: in two levels */
    uint64_t number;           /* in two levels */
    zs_status status;          /* of its begin */
    char words[ZS_C10D_WORDS]; /* of its failure */
    bool said;                 /* and not heard yet */
    zs_hosts_gathering *next;
    zs_work **works; /* [hosts] a broadcast from each; behind the turns */
    zs_c10d_turn turns[];
};

static zs_hosts_gathering *gathering_new(const zs_hosts_comm *self, const zs_flat_mem *flat, zs_target to)
{
    size_t turns = (size_t)(self->c10d.base.world + 1), works = (size_t)self->hosts;
    zs_hosts_gathering *made = calloc(1, sizeof *made + turns * sizeof(zs_c10d_turn) + works * sizeof(zs_work *));
    if (made == NULL) return NULL;
    made->source = *flat;
    made->to = to;
    made->model = self->c10d.base.model;
    made->works = (zs_work **)(void *)(made->turns + turns);
    made->ticket.turns = made->turns;
    zs_mem_retain(to.mem);
    return made;
}

static void gathering_free(zs_hosts_gathering *gathering)
{
    zs_mem_release(gathering->to.mem);
    free(gathering);
}

static void leave(zs_hosts_comm *self, zs_hosts_gathering *gathering)
{
    zs_hosts_leave(self, gathering->works, (size_t)self->hosts, gathering->to.mem);
}

/* Begins the broadcasts by which each counterpart gets this rank's shard, and this rank theirs, each into its place. */
static zs_status start_across(zs_hosts_comm *self, zs_hosts_gathering *gathering)
{
    const zs_flat_mem *flat = &gathering->source;
    zs_target to = gathering->to;
    size_t bytes = flat->shard_bytes;
    zs_hosts_arrival *arrival = NULL;
    gathering->number = ++self->gathers;
    memcpy(to.full + (size_t)self->c10d.base.rank * bytes, flat->shard, bytes);
    ZS_TRY(zs_hosts_arrival_new(self, gathering->number, self->hosts, &arrival));
    zs_status status = ZS_OK;
    for (int h = 0; h < self->hosts; h++) {
        char *place = to.full + (size_t)zs_hosts_rank(self, h, self->lane) * bytes;
        char *data = h == self->host ? flat->shard : place;
        ZS_THEN(status, zs_group_broadcast(zs_hosts_across(self, h), data, bytes, h, &gathering->works[h]));
        zs_status told = status == ZS_OK ? zs_work_then(gathering->works[h], zs_hosts_arrived, arrival) : status;
        if (told != ZS_OK) zs_hosts_arrived(arrival, false);
        ZS_THEN(status, told);
    }
    return status;
}

/* A ticket's `begin`. What may fail here is for the script's thread to tell. */
static bool begin(zs_hosts_comm *self, zs_hosts_ticket *ticket)
{
    zs_hosts_gathering *gathering = (zs_hosts_gathering *)(void *)ticket;
    const hosts_slot *slot = slot_of(gathering->to);
    if (!zs_c10d_same_slots(&self->c10d, ticket->turns) || (slot != NULL && slot->apart)) return false;
    gathering->status = start_across(self, gathering);
    if (gathering->status == ZS_OK) return true;
    snprintf(gathering->words, sizeof gathering->words, "%s", zs_last_message());
    zs_clear_error();
    return true;
}

/* Begins it once all ranks have agreed. */
static zs_status start(zs_hosts_comm *self, zs_hosts_gathering *gathering)
{
    zs_c10d_comm *c10d = &self->c10d;
    hosts_slot *slot = slot_of(gathering->to);
    zs_status status = set_apart(slot, !c10d->same_slots);
    if (status == ZS_OK && !c10d->same_slots)
        return zs_c10d_gather_agreed(c10d, &gathering->ticket.mine, gathering->source.shard, gathering->to,
                                     &gathering->flat);
    ZS_THEN(status, start_across(self, gathering));
    return status == ZS_OK ? ZS_OK : zs_c10d_fail(c10d, &gathering->ticket.mine, status);
}

/* --- what has been said ----------------------------------------------------------------------------------------------------- */

/* All ranks see that they do not mean the same, or not in memory that is shared. */
static zs_status agree(zs_hosts_comm *self, zs_hosts_gathering *gathering)
{
    zs_comm *base = &self->c10d.base;
    zs_model now = base->model;
    uint64_t reading = base->reading;
    base->model = gathering->model;
    base->reading = gathering->ticket.mine.reading;
    zs_status status = zs_c10d_agree_on(&self->c10d, &gathering->ticket.mine, gathering->turns);
    base->model = now;
    base->reading = reading;
    return status;
}

/* Fails on the thread, with words of it. */
static zs_status fail_begun(zs_hosts_comm *self, const zs_hosts_gathering *gathering)
{
    zs_status status = ZS_FAIL(gathering->status, "%s", gathering->words);
    return zs_hosts_turns_fail(self, zs_c10d_fail(&self->c10d, &gathering->ticket.mine, status));
}

/* Waits until all ranks have said the first of those that were said, and sees to it that it has begun. */
static zs_status hear_first(zs_hosts_comm *self)
{
    zs_hosts_gathering *gathering = self->said;
    ZS_TRY(zs_hosts_hear(self, &gathering->ticket));
    if (gathering->ticket.state == ZS_HOSTS_BEGUN)
        return gathering->status == ZS_OK ? ZS_OK : fail_begun(self, gathering);
    ZS_TRY(agree(self, gathering));
    ZS_TRY(start(self, gathering));
    zs_hosts_go_on(self);
    return ZS_OK;
}

/* None of those that were said comes about. */
static void fail_all(zs_hosts_comm *self, zs_status status)
{
    if (self->turns != NULL) zs_hosts_take_back(self);
    while (self->said != NULL) {
        zs_hosts_gathering *gathering = self->said;
        self->said = gathering->next;
        gathering->said = false;
        gathering->status = status == ZS_ERR_TORCH ? ZS_ERR_PEER : status; /* whose Python exception is told once */
        snprintf(gathering->words, sizeof gathering->words, "%s", zs_last_message());
    }
}

/* Hears those that were said before `end`, and it; NULL: all. */
static zs_status hear_until(zs_hosts_comm *self, const zs_hosts_gathering *end)
{
    while (self->said != NULL && (end == NULL || end->said)) {
        zs_status status = hear_first(self);
        if (status != ZS_OK) {
            self->c10d.base.failed = true;
            fail_all(self, status);
            return status;
        }
        self->said->said = false;
        self->said = self->said->next;
    }
    return ZS_OK;
}

zs_status zs_hosts_hear_said(zs_c10d_comm *comm)
{
    return hear_until((zs_hosts_comm *)comm, NULL);
}

static void append(zs_hosts_comm *self, zs_hosts_gathering *gathering)
{
    zs_hosts_gathering **at = &self->said;
    while (*at != NULL)
        at = &(*at)->next;
    *at = gathering;
    gathering->said = true;
}

/* Says it, if there is a thread to begin it. */
static zs_status say(zs_hosts_comm *self, zs_hosts_gathering *gathering, const char *name)
{
    zs_c10d_turn turn = zs_c10d_gather_turn(&self->c10d, &gathering->source, name);
    turn.slot = id_of(self, slot_of(gathering->to));
    gathering->ticket.mine = zs_c10d_saying(&self->c10d, &turn);
    gathering->ticket.begin = begin;
    if (self->turns == NULL) {
        ZS_TRY(zs_c10d_agree(&self->c10d, &turn));
        return start(self, gathering);
    }
    ZS_TRY(zs_c10d_can_meet(&self->c10d));
    if (self->said == NULL) zs_hosts_go_on(self);
    append(self, gathering);
    zs_hosts_say(self, &gathering->ticket);
    return ZS_OK;
}

/* --- the table's ------------------------------------------------------------------------------------------------------------ */

zs_status zs_hosts_gather_start(zs_comm *comm, const zs_flat_mem *flat, const char *name, zs_target to,
                                zs_gathering **out)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    zs_hosts_gathering *gathering = gathering_new(self, flat, to);
    if (gathering == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory all-gathering unit '%s'", name);
    zs_status status = say(self, gathering, name);
    if (status == ZS_OK) {
        *out = (zs_gathering *)gathering;
        return ZS_OK;
    }
    leave(self, gathering);
    gathering_free(gathering);
    return zs_hosts_pass(self, status);
}

static zs_status finish(zs_hosts_comm *self, zs_hosts_gathering *gathering)
{
    const zs_c10d_turn *turn = &gathering->ticket.mine;
    ZS_TRY(hear_until(self, gathering));
    if (gathering->status != ZS_OK) return ZS_FAIL(gathering->status, "%s", gathering->words);
    if (gathering->flat != NULL) return zs_c10d_gather_finish(&self->c10d.base, gathering->flat);
    ZS_TRY(zs_hosts_finish(self, turn, gathering->works, (size_t)self->hosts, gathering->to.mem));
    return zs_hosts_await(self, turn, gathering->number);
}

zs_status zs_hosts_gather_finish(zs_comm *comm, zs_gathering *handle)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    zs_hosts_gathering *gathering = (zs_hosts_gathering *)handle;
    zs_status status = finish(self, gathering);
    leave(self, gathering);
    gathering_free(gathering);
    return zs_hosts_pass(self, status);
}
