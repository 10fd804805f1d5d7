/* graph_ranges.c - see graph_ranges.h. */
#include "engine/graph_ranges.h"

#include "schedule/schedule.h"

#include <stdlib.h>
#include <string.h>

enum {
    MOST_RANGES = 1 << 14, /* of a thread, unless more are open */
    MOST_THREADS = 64
};

static bool is_open(const zs_graph_range *range)
{
    return range->end == INT64_MAX;
}

static zs_thread_ranges *find_thread(const zs_graph_ranges *all, uint64_t thread)
{
    for (size_t i = 0; i < all->n; i++)
        if (all->threads[i].thread == thread) return &all->threads[i];
    return NULL;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* A thread that has no forward open makes room for another. */
static zs_thread_ranges *reuse_thread(zs_graph_ranges *all)
{
    for (size_t i = 0; i < all->n; i++) {
        zs_thread_ranges *old = &all->threads[i];
        if (old->inner >= 0) continue;
        all->lost_threads = true;
        free(old->ranges);
        return old;
    }
    return NULL;
}

static zs_status new_thread(zs_graph_ranges *all, uint64_t thread, zs_thread_ranges **out)
{
    zs_thread_ranges *made = all->n < MOST_THREADS ? NULL : reuse_thread(all);
    if (made == NULL) {
        zs_thread_ranges *grown = realloc(all->threads, (all->n + 1) * sizeof *grown);
        if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory beginning a forward");
        all->threads = grown;
        made = &grown[all->n++];
    }
    *made = (zs_thread_ranges){.thread = thread, .inner = -1};
    *out = made;
    return ZS_OK;
}

/* Forgets the older half, unless a forward in it is running. */
static bool forget_half(zs_thread_ranges *own)
{
    int64_t half = own->n / 2;
    for (int64_t i = 0; i < half; i++)
        if (is_open(&own->ranges[i])) return false;
    for (int64_t i = 0; i < half; i++)
        if (own->ranges[i].end > own->lost) own->lost = own->ranges[i].end;
    own->n -= half;
    memmove(own->ranges, own->ranges + half, (size_t)own->n * sizeof *own->ranges);
    for (int64_t i = 0; i < own->n; i++)
        own->ranges[i].outer = own->ranges[i].outer >= half ? own->ranges[i].outer - half : -1;
    own->inner = own->inner >= half ? own->inner - half : -1;
    own->hint = 0;
    return true;
}

static zs_status make_room(zs_thread_ranges *own)
{
    if (own->n < own->room || (own->n >= MOST_RANGES && forget_half(own))) return ZS_OK;
    int64_t room = own->room > 0 ? 2 * own->room : 64;
    zs_graph_range *grown = realloc(own->ranges, (size_t)room * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory beginning a forward");
    own->ranges = grown;
    own->room = room;
    return ZS_OK;
}

void zs_graph_ranges_free(zs_graph_ranges *all)
{
    for (size_t i = 0; i < all->n; i++)
        free(all->threads[i].ranges);
    free(all->threads);
    *all = (zs_graph_ranges){0};
}

/* --- forwards ----------------------------------------------------------------------------------------------------- */

zs_status zs_graph_ranges_open(zs_graph_ranges *all, uint64_t thread, int64_t now, const zs_graph_range *range)
{
    zs_thread_ranges *own = find_thread(all, thread);
    if (own == NULL) ZS_TRY(new_thread(all, thread, &own));
    ZS_TRY(make_room(own));
    zs_graph_range *made = &own->ranges[own->n];
    *made = *range;
    made->begin = own->n > 0 && now < own->ranges[own->n - 1].begin ? own->ranges[own->n - 1].begin : now;
    made->end = INT64_MAX;
    made->outer = own->inner;
    own->inner = own->n++;
    return ZS_OK;
}

/* Index of the innermost open one of a unit; negative: none. */
static int64_t find_open(const zs_thread_ranges *own, const struct zs_unit *unit)
{
    int64_t at = own != NULL ? own->inner : -1;
    while (at >= 0 && (own->ranges[at].unit != unit || !is_open(&own->ranges[at])))
        at = own->ranges[at].outer;
    return at;
}

const zs_graph_range *zs_graph_ranges_inner(const zs_graph_ranges *all, uint64_t thread, const struct zs_unit *unit)
{
    const zs_thread_ranges *own = find_thread(all, thread);
    if (own == NULL || own->inner < 0) return NULL;
    int64_t at = unit != NULL ? find_open(own, unit) : own->inner;
    while (unit == NULL && at >= 0 && (own->ranges[at].by_hand || !is_open(&own->ranges[at])))
        at = own->ranges[at].outer;
    return at >= 0 ? &own->ranges[at] : NULL;
}

static void close_at(zs_thread_ranges *own, int64_t at, int64_t now)
{
    own->ranges[at].end = now;
    while (own->inner >= 0 && !is_open(&own->ranges[own->inner]))
        own->inner = own->ranges[own->inner].outer;
}

/* Ends the innermost; one without nodes leaves no trace. */
static bool close_inner(zs_thread_ranges *own, int64_t now)
{
    int64_t at = own->inner;
    bool made = own->ranges[at].begin < now;
    close_at(own, at, now);
    if (!made && at == own->n - 1) own->n--;
    return made;
}

void zs_graph_ranges_close_one(zs_graph_ranges *all, uint64_t thread, int64_t now, const struct zs_unit *unit)
{
    zs_thread_ranges *own = find_thread(all, thread);
    int64_t at = find_open(own, unit);
    if (at >= 0 && at == own->inner)
        (void)close_inner(own, now);
    else if (at >= 0)
        close_at(own, at, now);
}

bool zs_graph_ranges_close(zs_graph_ranges *all, uint64_t thread, int64_t now, const struct zs_unit *unit)
{
    zs_thread_ranges *own = find_thread(all, thread);
    int64_t at = find_open(own, unit);
    if (at < 0) return false;
    while (own->inner > at)
        (void)close_inner(own, now);
    return close_inner(own, now);
}

void zs_graph_ranges_close_backwards(zs_graph_ranges *all, uint64_t thread, int64_t now, int64_t stamp)
{
    zs_thread_ranges *own = find_thread(all, thread);
    while (own != NULL && own->inner >= 0) {
        int64_t open = own->ranges[own->inner].stamp;
        if (open == ZS_MADE_IN_FORWARD || (stamp >= 0 && zs_schedule_stamp_is_within(stamp, open))) return;
        (void)close_inner(own, now);
    }
}

void zs_graph_ranges_close_all(zs_graph_ranges *all, uint64_t thread, int64_t now,
                               bool (*goes_on)(const zs_graph_range *))
{
    zs_thread_ranges *own = find_thread(all, thread);
    for (int64_t at = own != NULL ? own->inner : -1; at >= 0; at = own->ranges[at].outer)
        if (is_open(&own->ranges[at]) && !goes_on(&own->ranges[at])) own->ranges[at].end = now;
    while (own != NULL && own->inner >= 0 && !is_open(&own->ranges[own->inner]))
        own->inner = own->ranges[own->inner].outer;
}

void zs_graph_ranges_forget(zs_graph_ranges *all, const struct zs_unit *unit)
{
    for (size_t t = 0; t < all->n; t++)
        for (int64_t i = 0; i < all->threads[t].n; i++)
            if (all->threads[t].ranges[i].unit == unit) all->threads[t].ranges[i].unit = NULL;
}

/* --- nodes -------------------------------------------------------------------------------------------------------- */

static bool holds(const zs_graph_range *range, int64_t number)
{
    return range->begin <= number && number < range->end;
}

/* Index of the last range that began no later than `number`; negative: none. */
static int64_t last_begun(zs_thread_ranges *own, int64_t number)
{
    int64_t low = 0, high = own->n, near = own->hint;
    if (near >= own->n) near = own->n - 1;
    if (near >= 0 && own->ranges[near].begin <= number) {
        if (near + 1 == own->n || number < own->ranges[near + 1].begin) return near;
        low = near + 1;
    } else if (near >= 0) {
        high = near;
    }
    while (low < high) { /* the first that began later lies in [low, high] */
        int64_t middle = low + (high - low) / 2;
        if (own->ranges[middle].begin <= number)
            low = middle + 1;
        else
            high = middle;
    }
    own->hint = low > 0 ? low - 1 : 0;
    return low - 1;
}

int64_t zs_graph_ranges_find(zs_graph_ranges *all, uint64_t thread, int64_t number)
{
    zs_thread_ranges *own = find_thread(all, thread);
    if (own == NULL) return all->lost_threads ? ZS_PLACE_LOST : ZS_PLACE_NONE;
    if (number < own->lost) return ZS_PLACE_LOST;
    int64_t at = last_begun(own, number);
    while (at >= 0 && !holds(&own->ranges[at], number))
        at = own->ranges[at].outer;
    return at < 0 ? ZS_PLACE_NONE : (int64_t)(own - all->threads) << 32 | at;
}

static const zs_thread_ranges *thread_at(const zs_graph_ranges *all, int64_t place)
{
    return &all->threads[place >> 32];
}

const zs_graph_range *zs_graph_ranges_at(const zs_graph_ranges *all, int64_t place)
{
    return &thread_at(all, place)->ranges[place & INT32_MAX];
}

const zs_graph_range *zs_graph_ranges_around(const zs_graph_ranges *all, int64_t place, const zs_graph_range *range,
                                             int64_t number)
{
    const zs_thread_ranges *own = thread_at(all, place);
    int64_t at = range->outer;
    while (at >= 0 && !holds(&own->ranges[at], number))
        at = own->ranges[at].outer;
    return at < 0 ? NULL : &own->ranges[at];
}
