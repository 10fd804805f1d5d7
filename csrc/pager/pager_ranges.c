/* pager_ranges.c - see pager_ranges.h. */
#include "pager/pager_ranges.h"

#include <stdlib.h>
#include <string.h>

/* --- lists -------------------------------------------------------------------------------------------------------- */

void zs_pager_append(zs_pager_list *list, zs_pager_range *r)
{
    r->sooner = list->last;
    r->later = NULL;
    *(list->last != NULL ? &list->last->later : &list->first) = r;
    list->last = r;
}

void zs_pager_prepend(zs_pager_list *list, zs_pager_range *r)
{
    r->sooner = NULL;
    r->later = list->first;
    *(list->first != NULL ? &list->first->sooner : &list->last) = r;
    list->first = r;
}

void zs_pager_take_off(zs_pager_list *list, zs_pager_range *r)
{
    *(r->sooner != NULL ? &r->sooner->later : &list->first) = r->later;
    *(r->later != NULL ? &r->later->sooner : &list->last) = r->sooner;
    r->sooner = r->later = NULL;
}

/* --- mappings ----------------------------------------------------------------------------------------------------- */

/* Number of mappings that begin at or before the address. */
static size_t maps_up_to(const zs_pager_tables *tables, const char *ptr)
{
    size_t low = 0, high = tables->n_maps;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (tables->maps[middle]->ptr > ptr)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The mapping that holds the address; NULL for memory that is not on disk. */
static const zs_pager_map *map_around(const zs_pager_tables *tables, const char *ptr)
{
    size_t n = maps_up_to(tables, ptr);
    const zs_pager_map *map = n > 0 ? tables->maps[n - 1] : NULL;
    return map != NULL && ptr < map->ptr + map->part_bytes * (size_t)map->n_parts ? map : NULL;
}

zs_status zs_pager_add_map(zs_pager_tables *tables, const zs_pager_map *map)
{
    zs_pager_map **grown = realloc(tables->maps, (tables->n_maps + 1) * sizeof(zs_pager_map *));
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory growing the list of mappings");
    tables->maps = grown;
    zs_pager_map *made = malloc(sizeof *made);
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a mapping");
    *made = *map;
    size_t at = maps_up_to(tables, map->ptr);
    memmove(&grown[at + 1], &grown[at], (tables->n_maps - at) * sizeof *grown);
    grown[at] = made;
    tables->n_maps++;
    return ZS_OK;
}

zs_pager_map *zs_pager_find_map(const zs_pager_tables *tables, const char *ptr)
{
    size_t n = maps_up_to(tables, ptr);
    return n > 0 && tables->maps[n - 1]->ptr == ptr ? tables->maps[n - 1] : NULL;
}

void zs_pager_drop_map(zs_pager_tables *tables, zs_pager_map *map)
{
    size_t at = maps_up_to(tables, map->ptr) - 1;
    memmove(&tables->maps[at], &tables->maps[at + 1], (tables->n_maps - at - 1) * sizeof *tables->maps);
    tables->n_maps--;
    free(map);
}

/* --- ranges ------------------------------------------------------------------------------------------------------- */

static size_t head_of(const void *ptr)
{
    return (size_t)((uintptr_t)ptr * UINT64_C(0x9e3779b97f4a7c15) >> 40) % ZS_PAGER_HEADS;
}

/* Can it be lent? Not where a file system has no direct I/O, nor where it is a peer's. */
static bool can_lend(const zs_pager_map *map, const char *ptr, size_t bytes)
{
    const char *own = map->ptr + (size_t)map->own * map->part_bytes;
    return map->direct >= 0 && ptr >= own && ptr + bytes <= own + map->part_bytes;
}

zs_pager_range *zs_pager_range_of(zs_pager_tables *tables, const void *ptr, size_t bytes, bool lent)
{
    size_t head = head_of(ptr);
    for (zs_pager_range *r = tables->heads[head]; r != NULL; r = r->same_head)
        if (r->ptr == ptr && r->bytes == bytes && r->lent == lent) return r;
    const zs_pager_map *map = map_around(tables, ptr);
    if (lent && map != NULL && !can_lend(map, ptr, bytes)) return NULL;
    zs_pager_range *made = map == NULL || bytes == 0 ? NULL : calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->ptr = (char *)(uintptr_t)ptr;
    made->bytes = bytes;
    made->map = map;
    made->lent = lent;
    made->same_head = tables->heads[head];
    tables->heads[head] = made;
    return made;
}

zs_pager_range *zs_pager_any_of(const zs_pager_tables *tables, const zs_pager_map *map)
{
    for (size_t h = 0; h < ZS_PAGER_HEADS; h++)
        for (zs_pager_range *r = tables->heads[h]; r != NULL; r = r->same_head)
            if (r->map == map) return r;
    return NULL;
}

static bool is_wanted(const zs_pager_range *r)
{
    return r->users > 0 || r->state == QUEUED || r->state == FETCHING;
}

static bool overlap(const zs_pager_range *a, const zs_pager_range *b)
{
    return a != b && a->map == b->map && a->ptr < b->ptr + b->bytes && b->ptr < a->ptr + a->bytes;
}

bool zs_pager_overlaps_used(const zs_pager_tables *tables, const zs_pager_range *r)
{
    for (size_t h = 0; h < ZS_PAGER_HEADS; h++)
        for (const zs_pager_range *each = tables->heads[h]; each != NULL; each = each->same_head)
            if (is_wanted(each) && overlap(each, r)) return true;
    return false;
}

bool zs_pager_overlaps_lent(const zs_pager_tables *tables, const zs_pager_range *r, bool any)
{
    for (size_t h = 0; h < ZS_PAGER_HEADS; h++)
        for (const zs_pager_range *each = tables->heads[h]; each != NULL; each = each->same_head) {
            bool there = each->lent && each->users == 0 && each->state != COLD;
            if (there && (any || each->dirty) && overlap(each, r)) return true;
        }
    return false;
}

bool zs_pager_is_lent_at_times(const zs_pager_tables *tables, const zs_pager_range *r)
{
    for (size_t h = 0; h < ZS_PAGER_HEADS; h++)
        for (const zs_pager_range *each = tables->heads[h]; each != NULL; each = each->same_head)
            if (each->lent && overlap(each, r)) return true;
    return false;
}

static void forget_ways(zs_pager_range *r, const zs_pager_range *gone)
{
    for (int i = 0; i < ZS_PAGER_WAYS; i++)
        if (r->ways[i].before == gone || r->ways[i].next == gone) r->ways[i] = (zs_pager_way){0};
}

void zs_pager_drop_range(zs_pager_tables *tables, zs_pager_range *gone)
{
    zs_pager_range **at = &tables->heads[head_of(gone->ptr)];
    while (*at != gone)
        at = &(*at)->same_head;
    *at = gone->same_head;
    for (size_t h = 0; h < ZS_PAGER_HEADS; h++)
        for (zs_pager_range *r = tables->heads[h]; r != NULL; r = r->same_head)
            forget_ways(r, gone);
    for (int i = 0; i < 2; i++)
        if (tables->last[i] == gone) tables->last[i] = NULL;
    free(gone);
}

/* --- ways --------------------------------------------------------------------------------------------------------- */

zs_pager_range *zs_pager_next(const zs_pager_range *before, const zs_pager_range *r)
{
    for (int i = 0; r != NULL && i < ZS_PAGER_WAYS; i++)
        if (r->ways[i].next != NULL && r->ways[i].before == before) return r->ways[i].next;
    return NULL;
}

void zs_pager_learn(zs_pager_tables *tables, zs_pager_range *r)
{
    const zs_pager_range *before = tables->last[1];
    zs_pager_range *at = tables->last[0];
    if (at != NULL && zs_pager_next(before, at) != r) {
        unsigned i = 0;
        while (i < ZS_PAGER_WAYS && at->ways[i].next != NULL && at->ways[i].before != before)
            i++;
        if (i == ZS_PAGER_WAYS) i = at->n_ways++ % ZS_PAGER_WAYS;
        at->ways[i] = (zs_pager_way){before, r};
    }
    tables->last[1] = at;
    tables->last[0] = r;
}
