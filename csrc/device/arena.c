/* arena.c - see arena.h. */
#include "device/arena.h"

#include <stdlib.h>

typedef struct slot {
    zs_mem *mem;  /* owned reference; NULL: at rest */
    size_t bytes; /* capacity */
    size_t asked; /* the bytes of it that were asked for */
    bool lent;
    bool own; /* not shared, where others are; or apart from them */
} slot;

struct zs_arena {
    const zs_device *device;
    slot *slots; /* owned */
    size_t n;
    bool dry_run;        /* slots are sizes without memory */
    zs_slot_maker maker; /* make == NULL: the device does */
};

zs_status zs_arena_new(const zs_device *device, zs_arena **out)
{
    *out = calloc(1, sizeof **out);
    if (*out == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating an arena");
    (*out)->device = device;
    return ZS_OK;
}

zs_status zs_arena_new_dry(zs_arena **out)
{
    ZS_TRY(zs_arena_new(zs_device_cpu(), out));
    (*out)->dry_run = true;
    return ZS_OK;
}

void zs_arena_made_by(zs_arena *arena, zs_slot_maker maker)
{
    arena->maker = maker;
}

void zs_arena_made_like(zs_arena *arena, const zs_arena *like)
{
    arena->maker.sharers = like->maker.sharers;
}

void zs_arena_free(zs_arena *arena)
{
    if (arena == NULL) return;
    for (size_t i = 0; i < arena->n; i++)
        zs_mem_release(arena->slots[i].mem);
    free(arena->slots);
    free(arena);
}

/* The smallest free slot of that kind that holds `bytes`; if there is none, the largest free one. */
static slot *best_fit(zs_arena *arena, size_t bytes, bool own)
{
    slot *best = NULL;
    for (size_t i = 0; i < arena->n; i++) {
        slot *candidate = &arena->slots[i];
        if (candidate->lent || candidate->own != own) continue;
        bool fits = candidate->bytes >= bytes, best_fits = best != NULL && best->bytes >= bytes;
        bool smaller = best != NULL && candidate->bytes < best->bytes;
        if (best == NULL || (fits && !best_fits) || (fits == best_fits && smaller == fits)) best = candidate;
    }
    return best;
}

static zs_status add_slot(zs_arena *arena, slot **out)
{
    slot *grown = realloc(arena->slots, (arena->n + 1) * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating slot %zu", arena->n);
    arena->slots = grown;
    *out = &grown[arena->n++];
    **out = (slot){0};
    return ZS_OK;
}

/* If torch caches freed memory, slots need memory during a pass only. */
static bool can_rest(const zs_arena *arena)
{
    return arena->device->ops->queues && arena->maker.make == NULL;
}

static zs_status new_memory(const zs_arena *arena, size_t bytes, bool own, zs_mem **out)
{
    if (arena->maker.make != NULL && !own) return arena->maker.make(arena->maker.arg, bytes, out);
    if (can_rest(arena)) return zs_device_mem_lend(arena->device, bytes, out);
    if (!arena->dry_run) return zs_device_mem_new(arena->device, bytes, out);
    return zs_mem_wrap(NULL, bytes > 0 ? bytes : 1, NULL, NULL, out);
}

static zs_status take(zs_arena *arena, size_t bytes, bool own, zs_mem **out)
{
    slot *found = best_fit(arena, bytes, own);
    if (found != NULL && found->bytes >= bytes && found->mem == NULL)
        ZS_TRY(new_memory(arena, found->bytes, own, &found->mem));
    if (found == NULL || found->bytes < bytes) {
        zs_mem *mem = NULL;
        ZS_TRY(new_memory(arena, bytes, own, &mem));
        zs_status status = found == NULL ? add_slot(arena, &found) : ZS_OK;
        if (status != ZS_OK) {
            zs_mem_release(mem);
            return status;
        }
        zs_mem_release(found->mem);
        found->mem = mem;
        found->bytes = mem->bytes;
        found->asked = bytes;
        found->own = own;
    }
    found->lent = true;
    *out = found->mem;
    return ZS_OK;
}

zs_status zs_arena_take(zs_arena *arena, size_t bytes, zs_mem **out)
{
    return take(arena, bytes, false, out);
}

zs_status zs_arena_take_own(zs_arena *arena, size_t bytes, zs_mem **out)
{
    return take(arena, bytes, arena->maker.sharers > 1, out);
}

zs_status zs_arena_take_apart(zs_arena *arena, size_t bytes, zs_mem **out)
{
    return take(arena, bytes, true, out);
}

static bool is_shared(const zs_arena *arena, const slot *it)
{
    return arena->maker.sharers > 1 && !it->own;
}

bool zs_arena_has(const zs_arena *arena, const zs_mem *mem, bool *shared)
{
    *shared = false;
    for (size_t i = 0; i < arena->n; i++) {
        if (arena->slots[i].mem != mem) continue;
        *shared = is_shared(arena, &arena->slots[i]);
        return true;
    }
    return false;
}

void zs_arena_give(zs_arena *arena, zs_mem *mem)
{
    for (size_t i = 0; i < arena->n; i++) {
        if (arena->slots[i].mem == mem) arena->slots[i].lent = false;
    }
}

static bool are_alike(const slot *a, const slot *b)
{
    return a->asked == b->asked && a->own == b->own;
}

/* Pairs each slot of the arena with a slot of `plan`; `met` [plan->n]: the slots of the plan that have a partner. */
static void match(zs_arena *arena, const zs_arena *plan, bool *met)
{
    size_t kept = 0;
    for (size_t i = 0; i < arena->n; i++) {
        slot own = arena->slots[i];
        size_t p = 0;
        while (p < plan->n && (met[p] || !are_alike(&plan->slots[p], &own)))
            p++;
        if (p < plan->n) met[p] = true;
        if (p < plan->n || own.lent)
            arena->slots[kept++] = own;
        else
            zs_mem_release(own.mem);
    }
    arena->n = kept;
}

zs_status zs_arena_fit(zs_arena *arena, const zs_arena *plan)
{
    bool *met = calloc(plan->n + 1, sizeof *met);
    if (met == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory reserving slots");
    match(arena, plan, met);
    zs_status status = ZS_OK;
    for (size_t p = 0; p < plan->n && status == ZS_OK; p++) {
        slot made = {.asked = plan->slots[p].asked, .own = plan->slots[p].own}, *place = NULL;
        if (met[p]) continue;
        made.bytes = made.asked;
        if (!can_rest(arena)) status = new_memory(arena, made.asked, made.own, &made.mem);
        if (status != ZS_OK) break;
        if (made.mem != NULL) made.bytes = made.mem->bytes;
        status = add_slot(arena, &place);
        if (status == ZS_OK)
            *place = made;
        else
            zs_mem_release(made.mem);
    }
    free(met);
    return status;
}

zs_status zs_arena_cover(zs_arena *arena, const zs_arena *plan)
{
    zs_mem **taken = calloc(plan->n + 1, sizeof(zs_mem *));
    if (taken == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory reserving slots");
    zs_status status = ZS_OK;
    for (size_t p = 0; p < plan->n && status == ZS_OK; p++)
        status = take(arena, plan->slots[p].bytes, plan->slots[p].own, &taken[p]);
    for (size_t p = 0; p < plan->n; p++)
        if (taken[p] != NULL) zs_arena_give(arena, taken[p]);
    free(taken);
    return status;
}

void zs_arena_rest(zs_arena *arena)
{
    for (size_t i = 0; i < arena->n && can_rest(arena); i++) {
        if (arena->slots[i].lent) continue;
        zs_mem_release(arena->slots[i].mem);
        arena->slots[i].mem = NULL;
    }
}

static size_t own_bytes(const zs_arena *arena, const slot *it)
{
    return it->mem == NULL ? 0 : it->bytes / (is_shared(arena, it) ? (size_t)arena->maker.sharers : 1);
}

size_t zs_arena_lent_bytes(const zs_arena *arena)
{
    size_t total = 0;
    for (size_t i = 0; i < arena->n; i++)
        if (arena->slots[i].lent) total += own_bytes(arena, &arena->slots[i]);
    return total;
}

size_t zs_arena_bytes(const zs_arena *arena)
{
    size_t total = 0;
    for (size_t i = 0; i < arena->n; i++)
        total += own_bytes(arena, &arena->slots[i]);
    return total;
}
