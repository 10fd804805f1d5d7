/* arena.h - slots: regions that full buffers borrow and give back, so that no step allocates.
 *
 * A slot is taken by best fit from those that are free; when none fits, the largest of them is replaced by a larger
 * one, so that there are never more than were lent at a time. A step's slots are reserved before the first step
 * (plan.h), so that every take finds one. Fresh pages cost nothing until touched: a slot may be larger than its first
 * borrower needs, and reserved without need.
 */
#ifndef ZS_ARENA_H
#define ZS_ARENA_H

#include "base/memory.h"
#include "base/status.h"
#include "device/device.h"

typedef struct zs_arena zs_arena;

/* New empty arena of memory of `device`. */
zs_status zs_arena_new(const zs_device *device, zs_arena **out);

/* The maker of an arena's slots. */
typedef struct zs_slot_maker {
    zs_status (*make)(void *arg, size_t bytes, zs_mem **out);
    void *arg;   /* its target outlives the arena */
    int sharers; /* ranks that have the same memory, and put the same into it; 0: this one alone */
} zs_slot_maker;

/* From now on, `maker` makes slots, rather than the device. */
void zs_arena_made_by(zs_arena *arena, zs_slot_maker maker);

/* Keeps own slots apart from shared ones in a dry arena, as `like` does. */
void zs_arena_made_like(zs_arena *arena, const zs_arena *like);

/* New empty arena of slots without memory, to determine the sizes that a real one will have. */
zs_status zs_arena_new_dry(zs_arena **out);

/* Frees the arena; slots still lent out live on by their own references. NULL allowed. */
void zs_arena_free(zs_arena *arena);

/* Lends a slot of at least `bytes`. The arena keeps it reserved until zs_arena_give. */
zs_status zs_arena_take(zs_arena *arena, size_t bytes, zs_mem **slot);

/* The same for memory that only this rank writes to: never memory that other ranks share. */
zs_status zs_arena_take_own(zs_arena *arena, size_t bytes, zs_mem **slot);

/* The same for memory that is written in another stream than the arena's other slots: never memory of one of these,
 * whose streams may still use it. */
zs_status zs_arena_take_apart(zs_arena *arena, size_t bytes, zs_mem **slot);

/* Is it one of the arena's slots? `shared`: in memory that other ranks have too. */
bool zs_arena_has(const zs_arena *arena, const zs_mem *slot, bool *shared);

/* Returns a slot. */
void zs_arena_give(zs_arena *arena, zs_mem *slot);

/* Makes the arena hold slots of the sizes in `plan`: creates missing ones, and frees idle ones that are not in the
 * plan. Slots that are lent stay. */
zs_status zs_arena_fit(zs_arena *arena, const zs_arena *plan);

/* Makes the arena hold, besides lent slots, one of at least its size for each slot of `plan`, all at the same time. For
 * an arena with other users. */
zs_status zs_arena_cover(zs_arena *arena, const zs_arena *plan);

/* Frees the memory of free slots until they are lent again, where that costs little: on a GPU. No stream uses them
 * now. */
void zs_arena_rest(zs_arena *arena);

/* Bytes of the slots that are lent; as zs_arena_bytes, which counts more. */
size_t zs_arena_lent_bytes(const zs_arena *arena);

/* Bytes of all slots, lent or free, but not at rest; of those that ranks share, this rank's part. */
size_t zs_arena_bytes(const zs_arena *arena);

#endif
