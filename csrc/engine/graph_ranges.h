/* graph_ranges.h - finds the unit and the forward in which a node of autograd's graph was created.
 *
 * Each thread numbers the nodes that it creates in ascending order. So a forward's nodes are those from the number at
 * its begin up to the number at its end, however its results left it; nested forwards lie within. A backward that
 * reaches such a node needs the unit's parameters. Ranges are kept whether or not a backward comes: a thread keeps the
 * last few thousand, and older nodes count as created by any unit, which gathers too much, never too little.
 */
#ifndef ZS_GRAPH_RANGES_H
#define ZS_GRAPH_RANGES_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct zs_unit;

/* The stamp of a forward's range. */
enum { ZS_MADE_IN_FORWARD = -1 };

/* The nodes of one forward of a unit, or of its backward, where autograd records that (create_graph). */
typedef struct zs_graph_range {
    struct zs_unit *unit; /* borrowed; NULL: freed */
    int64_t begin, end;   /* node numbers; `end` is exclusive, and INT64_MAX while the forward runs */
    int64_t outer;        /* index of the range in which it began, negative: none */
    int64_t stamp;        /* of a backward: its forward's stamp; otherwise ZS_MADE_IN_FORWARD */
    bool by_hand;         /* no forward: a script had the parameters unsharded */
} zs_graph_range;

/* The ranges of one thread, in the order of their begins. */
typedef struct zs_thread_ranges {
    uint64_t thread;
    zs_graph_range *ranges; /* [n] owned */
    int64_t n, room;
    int64_t inner; /* index of the innermost open range, negative: none */
    int64_t lost;  /* nodes with lower numbers may belong to forgotten ranges */
    int64_t hint;  /* index of the range found last */
} zs_thread_ranges;

typedef struct zs_graph_ranges {
    zs_thread_ranges *threads; /* [n] owned */
    size_t n;
    bool lost_threads; /* some thread's ranges are forgotten */
} zs_graph_ranges;

/* A node's place: its thread's and its innermost range's index, or one of these. */
enum { ZS_PLACE_NONE = -1, ZS_PLACE_LOST = -2 };

/* A forward begins, on `thread`, whose next node will have the number `now`. ZS_ERR_MEMORY. */
zs_status zs_graph_ranges_open(zs_graph_ranges *all, uint64_t thread, int64_t now, const zs_graph_range *range);

/* The innermost open range of this thread: of that unit, or if `unit` is NULL, of any forward or its backward; NULL:
 * none. */
const zs_graph_range *zs_graph_ranges_inner(const zs_graph_ranges *all, uint64_t thread, const struct zs_unit *unit);

/* Ends the innermost open range of this unit, but not those within it. No-op if none is open. */
void zs_graph_ranges_close_one(zs_graph_ranges *all, uint64_t thread, int64_t now, const struct zs_unit *unit);

/* Ends the innermost open range of this unit and all within it. Returns whether it has nodes; false if none is open. */
bool zs_graph_ranges_close(zs_graph_ranges *all, uint64_t thread, int64_t now, const struct zs_unit *unit);

/* Ends the open ranges of backwards, up to the one within which `stamp` lies; negative: all. */
void zs_graph_ranges_close_backwards(zs_graph_ranges *all, uint64_t thread, int64_t now, int64_t stamp);

/* Ends all open ranges of this thread, except those for which `goes_on` is true. */
void zs_graph_ranges_close_all(zs_graph_ranges *all, uint64_t thread, int64_t now,
                               bool (*goes_on)(const zs_graph_range *));

/* The unit was freed: its nodes need nothing. */
void zs_graph_ranges_forget(zs_graph_ranges *all, const struct zs_unit *unit);

/* The place of the node that this thread created with this number. */
int64_t zs_graph_ranges_find(zs_graph_ranges *all, uint64_t thread, int64_t number);

/* The innermost range at a place from zs_graph_ranges_find / the next range around it that also contains the node
 * `number`; NULL: none. */
const zs_graph_range *zs_graph_ranges_at(const zs_graph_ranges *all, int64_t place);
const zs_graph_range *zs_graph_ranges_around(const zs_graph_ranges *all, int64_t place, const zs_graph_range *range,
                                             int64_t number);

/* Were there never any ranges? */
static inline bool zs_graph_ranges_empty(const zs_graph_ranges *all)
{
    return all->n == 0;
}

/* Frees all ranges. */
void zs_graph_ranges_free(zs_graph_ranges *all);

#endif
