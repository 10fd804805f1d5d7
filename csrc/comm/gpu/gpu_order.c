/* gpu_order.c - the order of ranks' moves, which must be the same on all. See gpu.h.
 *
 * Ranks compare a count and a hash of their moves. Only if those differ do they look for the first move that
 * differs, among those since they last agreed: the last ones are often the same again. */
#include "comm/gpu/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REMEDY \
    "; run the same modules in the same order on all ranks, or pass transport=zshard.NcclOptions(any_order=True)"

/* Hashes of all moves up to each remembered one. */
typedef struct trace {
    uint64_t count; /* of moves */
    uint64_t hashes[ZS_GPU_MOVES];
} trace;

/* A move in words, as ranks exchange it. */
typedef struct phrase {
    char text[sizeof((zs_gpu_move){0}).what];
} phrase;

static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * UINT64_C(0x100000001b3); /* FNV-1a */
    return hash;
}

void zs_gpu_order_add(zs_gpu_comm *comm, const char *what, const char *unit, size_t bytes)
{
    zs_gpu_order *order = &comm->order;
    order->hash = mix(order->hash, what, strlen(what) + 1);
    order->hash = mix(order->hash, unit, strlen(unit) + 1);
    order->hash = mix(order->hash, &bytes, sizeof bytes);
    uint64_t since = order->count++ - comm->agreed;
    zs_gpu_move *move = &comm->moves[since < ZS_GPU_MOVES ? since : ZS_GPU_MOVES];
    comm->last = move;
    move->hash = order->hash;
    snprintf(move->what, sizeof move->what, "%s of unit '%.60s' (%zu bytes per rank)", what, unit, bytes);
}

const char *zs_gpu_order_last(const zs_gpu_comm *comm)
{
    return comm->last != NULL ? comm->last->what : "none";
}

static bool differ(const zs_gpu_order *a, const zs_gpu_order *b)
{
    return a->hash != b->hash || a->count != b->count || a->gave_up != b->gave_up;
}

bool zs_gpu_order_differs(const zs_gpu_comm *comm, int *rank)
{
    int world = comm->base.world, r = 1;
    while (r < world && !differ(&comm->orders[0], &comm->orders[r]))
        r++;
    *rank = r;
    return r < world;
}

zs_status zs_gpu_compare_hosts(const zs_gpu_comm *comm, const void *mine, size_t bytes, void *all)
{
    char call[ZS_CALL] = "";
    zs_call_swap(call);
    zs_status status = zs_comm_exchange(comm->control, mine, bytes, all);
    zs_call_swap(call);
    return status;
}

/* The first move since ranks agreed that differs between the two; ZS_GPU_MOVES: it is no longer remembered. */
static uint64_t first_to_differ(const zs_gpu_comm *comm, const trace *a, const trace *b)
{
    uint64_t fewer = (a->count < b->count ? a->count : b->count) - comm->agreed, i = 0;
    while (i < fewer && i < ZS_GPU_MOVES && a->hashes[i] == b->hashes[i])
        i++;
    return i;
}

/* Ranks exchange their moves at that place; a rank that no longer remembers it sends its last move. */
static zs_status describe(zs_gpu_comm *comm, const trace *a, const trace *b, int other, phrase *all)
{
    phrase mine = {{0}};
    uint64_t at = first_to_differ(comm, a, b), own = comm->order.count - comm->agreed;
    bool known = at < ZS_GPU_MOVES;
    const char *what = !known ? zs_gpu_order_last(comm) : at < own ? comm->moves[at].what : "not queued";
    snprintf(mine.text, sizeof mine.text, "%s", what);
    ZS_TRY(zs_gpu_compare_hosts(comm, &mine, sizeof mine, all));
    if (known)
        return ZS_FAIL(ZS_ERR_DIVERGED, "ranks diverged: transfer %llu is %s on rank 0, but %s on rank %d" REMEDY,
                       (unsigned long long)(comm->agreed + at + 1), all[0].text, all[other].text, other);
    return ZS_FAIL(ZS_ERR_DIVERGED,
                   "ranks diverged: rank 0 queued %llu transfers, last: %s, but rank %d queued %llu, last: %s" REMEDY,
                   (unsigned long long)a->count, all[0].text, other, (unsigned long long)b->count, all[other].text);
}

static zs_status compare(zs_gpu_comm *comm, int other)
{
    size_t world = (size_t)comm->base.world;
    trace *mine = calloc(1 + world, sizeof *mine), *all = mine + 1;
    phrase *phrases = calloc(world, sizeof *phrases);
    zs_status status = ZS_OK;
    if (mine == NULL || phrases == NULL)
        status = ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the transfers of %zu ranks, which diverged", world);
    if (status == ZS_OK) {
        mine->count = comm->order.count;
        for (size_t i = 0; i < ZS_GPU_MOVES; i++)
            mine->hashes[i] = comm->moves[i].hash;
        status = zs_gpu_compare_hosts(comm, mine, sizeof *mine, all);
    }
    ZS_THEN(status, describe(comm, &all[0], &all[other], other, phrases));
    free(mine);
    free(phrases);
    return status;
}

zs_status zs_gpu_order_fail(zs_gpu_comm *comm, int other)
{
    bool first = comm->orders[0].gave_up != 0, second = comm->orders[other].gave_up != 0;
    if (first != second)
        return ZS_FAIL(ZS_ERR_DIVERGED,
                       "rank %d abandoned its backward (probably after a caught exception), but rank %d continued; "
                       "their GPUs are waiting for each other: restart all ranks",
                       first ? 0 : other, first ? other : 0);
    return compare(comm, other);
}
