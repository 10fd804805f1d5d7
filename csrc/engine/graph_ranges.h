/* graph_ranges.h - which nodes of autograd's graph were made in which forward of which unit.
 *
 * Each thread numbers the nodes that it makes, and the numbers only grow. So a forward has made the nodes from the
 * number at its begin up to the number at its end, whatever it returned and to whom; what is nested lies within. A
 * backward that comes to such a node needs the unit's parameters. Ranges are kept without knowing whether a backward
 * will come: a thread has the latest few thousand, and what is older counts as made by any unit, which gathers too
 * much, never too little.
 */
#ifndef ZS_GRAPH_RANGES_H
#define ZS_GRAPH_RANGES_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct zs_unit;

/* The stamp of a range that a forward has made. */
enum { ZS_MADE_IN_FORWARD = -1 };

/* The nodes of one forward of a unit, or of its backward, where autograd records that (create_graph). */
typedef struct zs_graph_range {
    struct zs_unit *unit; /* borrowed; NULL: it is gone */
    int64_t begin, end;   /* numbers; `end` is not in it, and INT64_MAX while the forward runs */
    int64_t outer;        /* index of the range in which it began, negative: none */
    int64_t stamp;        /* the forward's whose backward it is; ZS_MADE_IN_FORWARD */
    bool by_hand;         /* there was no forward: its parameters were full for a script */
} zs_graph_range;

/* Those of one thread, in the order of their begins. */
typedef struct zs_thread_ranges {
    uint64_t thread;
    zs_graph_range *ranges; /* [n] owned */
    int64_t n, room;
    int64_t inner; /* index of the innermost that is open, negative: none */
    int64_t lost;  /* nodes of lower numbers may be of ranges that are forgotten */
    int64_t hint;  /* index of the one that was found last */
} zs_thread_ranges;

typedef struct zs_graph_ranges {
    zs_thread_ranges *threads; /* [n] owned */
    size_t n;
    bool lost_threads; /* those of some thread are forgotten */
} zs_graph_ranges;

/* Where a node lies: its thread's index and its innermost range's, or one of these. */
enum { ZS_PLACE_NONE = -1, ZS_PLACE_LOST = -2 };

/* A forward begins, on `thread`, whose next node will have the number `now`. ZS_ERR_MEMORY. */
zs_status zs_graph_ranges_open(zs_graph_ranges *all, uint64_t thread, int64_t now, const zs_graph_range *range);

/* The innermost that is open on this thread: of that unit, or if none is given, of a forward or its backward; NULL:
 * none. */
const zs_graph_range *zs_graph_ranges_inner(const zs_graph_ranges *all, uint64_t thread, const struct zs_unit *unit);

/* The innermost that is open of this unit ends, and what is within it goes on. No-op if none is open. */
void zs_graph_ranges_close_one(zs_graph_ranges *all, uint64_t thread, int64_t now, const struct zs_unit *unit);

/* The innermost that is open of this unit ends, with all within it. Returns whether it has made nodes; false if none
 * is open. */
bool zs_graph_ranges_close(zs_graph_ranges *all, uint64_t thread, int64_t now, const struct zs_unit *unit);

/* Those that are open of backwards end, up to the one within which `stamp` lies; negative: all. */
void zs_graph_ranges_close_backwards(zs_graph_ranges *all, uint64_t thread, int64_t now, int64_t stamp);

/* All that are open on this thread end, but for those of which `goes_on` is true. */
void zs_graph_ranges_close_all(zs_graph_ranges *all, uint64_t thread, int64_t now,
                               bool (*goes_on)(const zs_graph_range *));

/* The unit is gone: its nodes need nothing any more. */
void zs_graph_ranges_forget(zs_graph_ranges *all, const struct zs_unit *unit);

/* Where the node lies that this thread made under this number. */
int64_t zs_graph_ranges_find(zs_graph_ranges *all, uint64_t thread, int64_t number);

/* The innermost range at a place that zs_graph_ranges_find gave, and the next one around it that has the node
 * `number` as well; NULL: none. */
const zs_graph_range *zs_graph_ranges_at(const zs_graph_ranges *all, int64_t place);
const zs_graph_range *zs_graph_ranges_around(const zs_graph_ranges *all, int64_t place, const zs_graph_range *range,
                                             int64_t number);

/* Are there none, and never were? */
static inline bool zs_graph_ranges_empty(const zs_graph_ranges *all)
{
    return all->n == 0;
}

/* Frees what it has. */
void zs_graph_ranges_free(zs_graph_ranges *all);

#endif
