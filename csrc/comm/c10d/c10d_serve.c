/* c10d_serve.c - gathers that this rank does not need, but takes part in. See c10d.h.
 *
 * Ranks exchange their turns before each collective, so a rank that leaves a unit out learns that the others gather it.
 * It needs only its shard for that: it takes part, discards the result, and sends its own turn again. All ranks choose
 * among the turns by one rule, so they choose the same. While any rank wants to gather, that comes first; what a rank
 * cannot do for another (a round of gradients) waits until all have reached it, in an order that is the same on all
 * ranks. Each gather lets one rank proceed, so this ends.
 *
 * A rank contributes a shard only as it was when its model's session began: see `serves`. */
#include "comm/c10d/c10d.h"

#include <stdlib.h>
#include <string.h>

/* --- what can be brought ------------------------------------------------------------------------------------------ */

/* A flat that this transport has created, and not freed. */
struct zs_c10d_flat {
    uint64_t key;
    zs_mem *mem; /* borrowed, of the shard */
    const char *shard;
    size_t shard_bytes;
    struct zs_c10d_flat *next;
};

/* A model, and whether its shards have not changed since its last forward. */
struct zs_reader {
    uint64_t number;
    bool current;
    zs_reader *next;
};

/* The start of the list for a flat of this number: each gather searches it. */
static zs_c10d_flat **list_of(zs_c10d_comm *comm, uint64_t key)
{
    return &comm->made[key % ZS_C10D_LISTS];
}

static const zs_c10d_flat *find_flat(zs_c10d_comm *comm, uint64_t key)
{
    const zs_c10d_flat *flat = *list_of(comm, key);
    while (flat != NULL && flat->key != key)
        flat = flat->next;
    return flat;
}

zs_status zs_c10d_flat_add(zs_c10d_comm *comm, zs_flat_mem *made)
{
    zs_c10d_flat *flat = malloc(sizeof *flat);
    if (flat == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a shard");
    made->key = comm->flats++;
    zs_c10d_flat **list = list_of(comm, made->key);
    *flat = (zs_c10d_flat){made->key, made->mem, made->shard, made->shard_bytes, *list};
    *list = flat;
    return ZS_OK;
}

zs_status zs_c10d_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out)
{
    ZS_TRY(zs_local_flat_new(comm, shard_bytes, out));
    zs_status status = zs_c10d_flat_add((zs_c10d_comm *)comm, out);
    if (status != ZS_OK) zs_local_flat_free(comm, out);
    return status;
}

void zs_c10d_flat_remove(zs_c10d_comm *comm, const zs_flat_mem *flat)
{
    zs_c10d_flat **at = list_of(comm, flat->key);
    while (*at != NULL && (*at)->shard != flat->shard)
        at = &(*at)->next;
    if (*at != NULL) {
        zs_c10d_flat *gone = *at;
        *at = gone->next;
        free(gone);
    }
}

void zs_c10d_flat_free(zs_comm *comm, zs_flat_mem *flat)
{
    zs_c10d_flat_remove((zs_c10d_comm *)comm, flat);
    zs_local_flat_free(comm, flat);
}

void zs_c10d_numbers(const zs_comm *comm, uint64_t *out)
{
    const zs_c10d_comm *self = (const zs_c10d_comm *)comm;
    out[0] = self->flats;
    out[1] = self->units;
}

void zs_c10d_continue_from(zs_comm *comm, const uint64_t *numbers)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    self->flats = numbers[0];
    self->units = numbers[1];
}

/* Flats on a disk, or of another transport, cannot be found by their numbers. */
bool zs_c10d_is_own(zs_c10d_comm *comm, const zs_flat_mem *flat)
{
    const zs_c10d_flat *found = find_flat(comm, flat->key);
    return found != NULL && found->shard == flat->shard;
}

static zs_status c10d_reader_new(zs_comm *comm, const char *name, zs_reader **out)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    zs_reader *reader = malloc(sizeof *reader);
    if (reader == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the reader of '%s'", name);
    *reader = (zs_reader){comm->models, false, self->readers};
    *out = self->readers = reader;
    return ZS_OK;
}

static void unlink_reader(zs_c10d_comm *comm, const zs_reader *reader)
{
    zs_reader **at = &comm->readers;
    while (*at != NULL && *at != reader)
        at = &(*at)->next;
    if (*at != NULL) *at = reader->next;
}

static void c10d_reader_free(zs_comm *comm, zs_reader *reader)
{
    unlink_reader((zs_c10d_comm *)comm, reader);
    free(reader);
}

static zs_status c10d_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    if (reading->pass != ZS_PASS_BACKWARD) {
        unlink_reader(self, reader);
        reader->current = true;
        reader->next = self->readers;
        self->readers = reader;
    }
    return zs_local_read_begin(comm, reader, reading);
}

static zs_status c10d_write_begin(zs_comm *comm, zs_reader *reader)
{
    (void)comm;
    reader->current = false;
    return ZS_OK;
}

static void c10d_write_end(zs_comm *comm, zs_reader *reader, bool known)
{
    (void)comm;
    (void)known;
    reader->current = false;
}

const zs_reader_ops zs_c10d_reader_ops = {
    .reader_new = c10d_reader_new,
    .reader_free = c10d_reader_free,
    .read_begin = c10d_read_begin,
    .read_end = zs_local_read_end,
    .write_begin = c10d_write_begin,
    .write_end = c10d_write_end,
};

void zs_c10d_served(const zs_c10d_comm *comm, uint32_t out[ZS_C10D_SERVES])
{
    int n = 0;
    memset(out, 0, ZS_C10D_SERVES * sizeof *out);
    for (const zs_reader *reader = comm->readers; reader != NULL && n < ZS_C10D_SERVES; reader = reader->next)
        if (reader->current) out[n++] = (uint32_t)reader->number;
}

/* Will all ranks contribute their shards of the model? */
static bool is_served(const zs_c10d_comm *comm, const zs_c10d_turn *turns, uint64_t model)
{
    for (int r = 0; r < comm->base.world; r++) {
        bool found = false;
        for (int i = 0; i < ZS_C10D_SERVES; i++)
            found |= turns[r].serves[i] == (uint32_t)model;
        if (!found) return false;
    }
    return true;
}

/* --- what is gathered next ---------------------------------------------------------------------------------------- */

/* A rank that left a unit out catches up soonest if the others gather in the order of its own pass. */
static bool is_before(const zs_c10d_turn *a, const zs_c10d_turn *b)
{
    bool back = zs_reading_is_backward(a->reading), other_back = zs_reading_is_backward(b->reading);
    if (back != other_back) return other_back;
    return back ? a->number > b->number : a->number < b->number;
}

int zs_c10d_choose(const zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    int chosen = -1;
    for (int r = 0; r < comm->base.world; r++)
        if (turns[r].kind == ZS_C10D_GIVE_UP) return -1;
    for (int r = 0; r < comm->base.world; r++) {
        const zs_c10d_turn *turn = &turns[r];
        bool can = turn->kind == ZS_C10D_GATHER && turn->joinable && turn->model != 0;
        if (can && is_served(comm, turns, turn->model) && (chosen < 0 || is_before(turn, &turns[chosen]))) chosen = r;
    }
    return chosen;
}

/* --- taking part -------------------------------------------------------------------------------------------------- */

static zs_status check_flat(const zs_c10d_comm *comm, const zs_c10d_turn *turn, const zs_c10d_flat *flat)
{
    if (flat != NULL && flat->shard_bytes == turn->bytes) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE,
                   "another rank all-gathers unit '%s', which rank %d no longer has; keep the model on all ranks until "
                   "all are done",
                   turn->name, comm->base.rank);
}

zs_status zs_c10d_serve(zs_c10d_comm *comm, const zs_c10d_turn *turn)
{
    const zs_c10d_flat *flat = find_flat(comm, turn->number);
    zs_mem *area = NULL;
    zs_work *work = NULL;
    int world = comm->base.world;
    zs_status status = check_flat(comm, turn, flat);
    if (comm->hooks != NULL) return status == ZS_OK ? comm->hooks->serve(comm, turn, flat->shard) : status;
    /* Memory for the result, which is discarded. */
    ZS_THEN(status, zs_c10d_borrow_area(comm, (size_t)world * flat->shard_bytes, &area));
    if (status != ZS_OK) return zs_c10d_fail(comm, turn, status); /* the others have already begun it */
    status = zs_group_all_gather(comm->group, flat->shard, area->ptr, flat->shard_bytes, world, &work);
    zs_traffic_from_each(&comm->base, ZS_TRAFFIC_GATHER, flat->shard_bytes);
    status = status == ZS_OK ? zs_c10d_finish(comm, turn, work, NULL) : zs_c10d_fail(comm, turn, status);
    zs_c10d_leave_source(comm, flat->mem);
    zs_c10d_return_area(comm, &area);
    return status;
}
