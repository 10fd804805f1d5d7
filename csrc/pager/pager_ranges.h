/* pager_ranges.h - the pager's records of mappings and ranges, without locks or threads: tables, lists, and ways.
 *
 * A range was wanted once; its begin and length identify it. Ranges of one mapping may overlap; that costs at worst a
 * page that is fetched again.
 */
#ifndef ZS_PAGER_RANGES_H
#define ZS_PAGER_RANGES_H

#include "pager/pager.h"

enum { ZS_PAGER_WAYS = 4 }; /* ways on from one range that are remembered */

/* See the picture in pager.h. */
typedef enum zs_range_state { COLD, QUEUED, FETCHING, READY, IDLE, LEAVING } zs_range_state;

typedef struct zs_pager_range zs_pager_range;

/* Coming from `before`, `next` was wanted after this one. */
typedef struct zs_pager_way {
    const zs_pager_range *before;
    zs_pager_range *next; /* borrowed */
} zs_pager_way;

struct zs_pager_range {
    char *ptr;
    size_t bytes;
    const zs_pager_map *map; /* borrowed */
    bool lent;               /* worked on in a buffer, not in the mapping */
    char *buffer;            /* (lent) FETCHING to LEAVING; NULL: there is no memory for it */
    zs_range_state state;
    int users;  /* wants without their done */
    bool write; /* as it was wanted last */
    bool dirty; /* (IDLE; LEAVING if lent) its pages have yet to be sent to the disk */
    int error;  /* (READY) the errno of its fetch; 0: all is there */
    zs_pager_way ways[ZS_PAGER_WAYS];
    unsigned n_ways;                /* that were ever noted where there was no room: which is replaced next */
    zs_pager_range *same_head;      /* in the table */
    zs_pager_range *sooner, *later; /* in the list that it is in */
};

/* A list, by `sooner` and `later`. */
typedef struct zs_pager_list {
    zs_pager_range *first, *last;
} zs_pager_list;

/* Adds a range, which is in no list, at the end / at the front / takes it off. */
void zs_pager_append(zs_pager_list *list, zs_pager_range *r);
void zs_pager_prepend(zs_pager_list *list, zs_pager_range *r);
void zs_pager_take_off(zs_pager_list *list, zs_pager_range *r);

/* --- tables ------------------------------------------------------------------------------------------------------- */

enum { ZS_PAGER_HEADS = 1 << 12 }; /* of the hash table */

typedef struct zs_pager_tables {
    zs_pager_map **maps; /* [n_maps] owned, by address */
    size_t n_maps;
    zs_pager_range *heads[ZS_PAGER_HEADS]; /* owned */
    zs_pager_range *last[2];               /* wanted last, and before that; borrowed */
} zs_pager_tables;

/* Adds a copy of the mapping; ZS_ERR_MEMORY. */
zs_status zs_pager_add_map(zs_pager_tables *tables, const zs_pager_map *map);

/* The mapping that begins at `ptr`, NULL if there is none / takes it out, which has no ranges any more, and frees
 * it. */
zs_pager_map *zs_pager_find_map(const zs_pager_tables *tables, const char *ptr);
void zs_pager_drop_map(zs_pager_tables *tables, zs_pager_map *map);

/* The range, made if it is new; NULL where it is not on disk, or without memory for it (then the kernel pages). A
 * range that is lent is another one than that of the same bytes in the mapping; only this rank's part can be. */
zs_pager_range *zs_pager_range_of(zs_pager_tables *tables, const void *ptr, size_t bytes, bool lent);

/* Has any range that overlaps this one users, or will it soon? */
bool zs_pager_overlaps_used(const zs_pager_tables *tables, const zs_pager_range *r);

/* Is a lent, unused range that overlaps this one on its way to the disk? `any`: or is it in a buffer
 * at all, or soon? */
bool zs_pager_overlaps_lent(const zs_pager_tables *tables, const zs_pager_range *r, bool any);

/* Is there a lent range in any state that overlaps this one? */
bool zs_pager_is_lent_at_times(const zs_pager_tables *tables, const zs_pager_range *r);

/* Any range of a mapping, NULL if there is none / takes it out of all tables and frees it. */
zs_pager_range *zs_pager_any_of(const zs_pager_tables *tables, const zs_pager_map *map);
void zs_pager_drop_range(zs_pager_tables *tables, zs_pager_range *r);

/* Notes that `r` was wanted now. */
void zs_pager_learn(zs_pager_tables *tables, zs_pager_range *r);

/* The range wanted last time after `before` and then `r`; NULL if that is not known. */
zs_pager_range *zs_pager_next(const zs_pager_range *before, const zs_pager_range *r);

#endif
