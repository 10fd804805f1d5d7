/* agree.c - exchanges turns until all ranks run the same collective. See turn.h.
 *
 * A rank that leaves a unit out learns from the turns that the others gather it. It needs only its shard for that: it
 * takes part, discards the result, and sends its own turn again. While any rank wants to gather, that comes first; what
 * a rank cannot do for another (a round of gradients) waits until all have reached it, in an order that is the same on
 * all ranks. Each gather lets one rank proceed, so this ends. Ranks that diverged (a skipped backward, another model)
 * get an error that says how.
 *
 * A rank contributes a shard only as it was when its model's session began: see `serves`. */
#include "comm/comm_local.h"
#include "comm/turn.h"
#include "comm/where.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- flats -------------------------------------------------------------------------------------------------------- */

/* A flat that this transport has created, and not freed. */
struct zs_turn_flat {
    uint64_t key;
    zs_mem *mem; /* borrowed, of the shard */
    const char *shard;
    size_t shard_bytes;
    struct zs_turn_flat *next;
};

/* The start of the list for a flat of this number: each gather searches it. */
static zs_turn_flat **list_of(const zs_comm *comm, uint64_t key)
{
    return &comm->turns->flats[key % ZS_TURN_LISTS];
}

static const zs_turn_flat *find_flat(const zs_comm *comm, uint64_t key)
{
    const zs_turn_flat *flat = *list_of(comm, key);
    while (flat != NULL && flat->key != key)
        flat = flat->next;
    return flat;
}

zs_status zs_turns_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out)
{
    ZS_TRY(zs_local_flat_new(comm, shard_bytes, out));
    zs_turn_flat *flat = malloc(sizeof *flat);
    if (flat == NULL) {
        zs_local_flat_free(comm, out);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a shard");
    }
    out->key = comm->turns->n_flats++;
    zs_turn_flat **list = list_of(comm, out->key);
    *flat = (zs_turn_flat){out->key, out->mem, out->shard, out->shard_bytes, *list};
    *list = flat;
    return ZS_OK;
}

void zs_turns_flat_free(zs_comm *comm, zs_flat_mem *flat)
{
    zs_turn_flat **at = list_of(comm, flat->key);
    while (*at != NULL && (*at)->shard != flat->shard)
        at = &(*at)->next;
    if (*at != NULL) {
        zs_turn_flat *gone = *at;
        *at = gone->next;
        free(gone);
    }
    zs_local_flat_free(comm, flat);
}

void zs_turns_numbers(const zs_comm *comm, uint64_t *out)
{
    out[0] = comm->turns->n_flats;
    out[1] = comm->turns->n_units;
}

void zs_turns_continue_from(zs_comm *comm, const uint64_t *numbers)
{
    comm->turns->n_flats = numbers[0];
    comm->turns->n_units = numbers[1];
}

/* --- readers ------------------------------------------------------------------------------------------------------ */

/* A model, and whether its shards have not changed since its last forward. */
struct zs_reader {
    uint64_t number;
    bool current;
    zs_reader *next;
};

zs_status zs_turns_reader_new(zs_comm *comm, const char *name, zs_reader **out)
{
    zs_reader *reader = malloc(sizeof *reader);
    if (reader == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the reader of '%s'", name);
    *reader = (zs_reader){comm->models, false, comm->turns->readers};
    *out = comm->turns->readers = reader;
    return ZS_OK;
}

static void unlink_reader(zs_turns *turns, const zs_reader *reader)
{
    zs_reader **at = &turns->readers;
    while (*at != NULL && *at != reader)
        at = &(*at)->next;
    if (*at != NULL) *at = reader->next;
}

void zs_turns_reader_free(zs_comm *comm, zs_reader *reader)
{
    unlink_reader(comm->turns, reader);
    free(reader);
}

zs_status zs_turns_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading)
{
    if (reading->pass != ZS_PASS_BACKWARD) {
        unlink_reader(comm->turns, reader);
        reader->current = true;
        reader->next = comm->turns->readers;
        comm->turns->readers = reader;
    }
    return zs_local_read_begin(comm, reader, reading);
}

zs_status zs_turns_write_begin(zs_comm *comm, zs_reader *reader)
{
    (void)comm;
    reader->current = false;
    return ZS_OK;
}

void zs_turns_write_end(zs_comm *comm, zs_reader *reader, bool known)
{
    (void)comm;
    (void)known;
    reader->current = false;
}

const zs_reader_ops zs_turns_reader_ops = {
    .reader_new = zs_turns_reader_new,
    .reader_free = zs_turns_reader_free,
    .read_begin = zs_turns_read_begin,
    .read_end = zs_local_read_end,
    .write_begin = zs_turns_write_begin,
    .write_end = zs_turns_write_end,
};

/* --- this rank's turn --------------------------------------------------------------------------------------------- */

/* Flats on a disk, or of another transport, cannot be found by their numbers. */
zs_turn zs_gather_turn(const zs_comm *comm, const zs_flat_mem *flat, const char *unit)
{
    const zs_turn_flat *listed = find_flat(comm, flat->key);
    zs_turn turn = zs_turn_of(ZS_TURN_GATHER, flat->key, flat->shard_bytes, unit);
    turn.joinable = listed != NULL && listed->shard == flat->shard;
    return turn;
}

zs_turn zs_talk_turn(const zs_comm *comm, zs_turn_kind kind, size_t bytes)
{
    zs_turn turn = zs_turn_of(kind, comm->turns->n_talks, bytes, NULL);
    snprintf(turn.name, sizeof turn.name, "%s", zs_call_name());
    return turn;
}

zs_turn zs_turn_to_send(const zs_comm *comm, const zs_turn *turn)
{
    zs_turn mine = *turn;
    int n = 0;
    mine.fingerprint = comm->fingerprint;
    mine.reading = comm->reading;
    for (const zs_reader *reader = comm->turns->readers; reader != NULL && n < ZS_TURN_SERVES; reader = reader->next)
        if (reader->current) mine.serves[n++] = (uint32_t)reader->number;
    if (turn->kind == ZS_TURN_GATHER || turn->kind == ZS_TURN_POST || turn->kind == ZS_TURN_SHARE) {
        mine.model = comm->model.number;
        memcpy(mine.owner, comm->model.name, sizeof mine.owner);
    }
    return mine;
}

/* --- agreeing ----------------------------------------------------------------------------------------------------- */

/* All ranks have seen that turns differ: they exchange their texts before they report it. A rank that cannot has lost
 * the transport: the others are in that exchange. */
static void exchange_texts(zs_comm *comm, const zs_turn *turn)
{
    zs_diagnostics *others = calloc((size_t)comm->world, sizeof *others);
    zs_status status = others == NULL ? ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' histories") : ZS_OK;
    zs_comm_look(comm);
    ZS_THEN(status, comm->turns->ops->exchange_texts(comm, turn, others));
    if (status != ZS_OK) {
        free(others);
        others = NULL;
        (void)comm->turns->ops->fail(comm, turn, status);
    }
    zs_comm_set_others(comm, others);
    zs_clear_error();
}

/* If parameters travel: do all ranks have those of the same step? `all`: whatever each is about to do. Not on the
 * stack: with thousands of ranks it would fill that of a script's thread. */
static zs_status compare_fingerprints(zs_comm *comm, const zs_turn *turns, bool all)
{
    zs_fingerprint *fingerprints = calloc((size_t)comm->world, sizeof *fingerprints);
    if (fingerprints == NULL) /* the others may continue */
        return comm->turns->ops->fail(comm, &turns[comm->rank],
                                      ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' steps"));
    bool looks = zs_turns_fingerprints(turns, comm->world, all, fingerprints);
    zs_status status = (looks ? zs_comm_check_look : zs_comm_check_fingerprints)(comm, fingerprints);
    free(fingerprints);
    return status;
}

static zs_status fail_apart(zs_comm *comm, const zs_turn *turns, const zs_comparison *all)
{
    char failures[ZS_FAILURES];
    zs_comm_failures(comm, failures, sizeof failures);
    comm->heard |= all->gave_up >= 0;
    return zs_turns_explain(turns, comm->world, comm->rank, failures);
}

/* ZS_OK: a gather, or this rank's turn, comes next. */
static zs_status judge(zs_comm *comm, const zs_turn *turns, const zs_comparison *all)
{
    const zs_turn *own = &turns[comm->rank];
    bool apart = !all->same && all->gather < 0;
    if (apart || !all->synced) {
        exchange_texts(comm, own);
        if (own->kind == ZS_TURN_GIVE_UP) return ZS_OK; /* the others receive it whatever they are at */
        if (all->gave_up < 0) ZS_TRY(compare_fingerprints(comm, turns, all->gather >= 0));
        if (apart) return fail_apart(comm, turns, all);
        ZS_TRY(comm->turns->ops->usable(comm)); /* without the others' texts, they may conclude something else */
    }
    if (all->unsynced < 0) return ZS_OK;
    exchange_texts(comm, own);
    return zs_comm_fail_apart(comm, all->unsynced);
}

/* Takes part in a gather of other ranks. */
static zs_status serve(zs_comm *comm, const zs_turn *turn)
{
    const zs_turn_flat *flat = find_flat(comm, turn->number);
    if (flat != NULL && flat->shard_bytes == turn->bytes)
        return comm->turns->ops->serve(comm, turn, flat->shard, flat->mem);
    zs_status status = ZS_FAIL(ZS_ERR_STATE,
                               "another rank all-gathers unit '%s', which rank %d no longer has; keep the model on all "
                               "ranks until all are done",
                               turn->name, comm->rank);
    return comm->turns->ops->fail(comm, turn, status); /* the others have already begun it */
}

/* Sends this rank's turn, and receives the others'. */
static zs_status exchange(zs_comm *comm, const zs_turn *turn, zs_turn *turns)
{
    zs_turn *mine = turns + comm->world;
    *mine = zs_turn_to_send(comm, turn);
    return comm->turns->ops->exchange(comm, mine, turns);
}

zs_status zs_turns_agree_on(zs_comm *comm, const zs_turn *turn, zs_turn *turns)
{
    for (;;) {
        const zs_comparison all = zs_turns_compare(turns, comm->world);
        ZS_TRY(zs_comm_locate(comm, judge(comm, turns, &all)));
        bool hosts = all.gather < 0 && comm->per_host > 0;
        comm->turns->same_slots = hosts && zs_turns_same_slots(turns, comm->world, comm->per_host);
        if (all.gather < 0 || zs_turns_same(&turns[all.gather], &turns[comm->rank])) return ZS_OK;
        zs_turn other = turns[all.gather];
        ZS_TRY(serve(comm, &other));
        ZS_TRY(exchange(comm, turn, turns));
    }
}

zs_status zs_turns_agree(zs_comm *comm, const zs_turn *turn, zs_turn *turns)
{
    zs_status status = exchange(comm, turn, turns);
    ZS_THEN(status, zs_turns_agree_on(comm, turn, turns));
    if (status != ZS_OK) comm->failed = true;
    return status;
}
