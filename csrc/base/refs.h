/* refs.h - counted references: each holder drops its own, and dropping the last one frees.
 *
 * Any thread that holds one may take or drop references, without a lock; writes made before a reference was dropped are
 * visible to the thread that frees.
 */
#ifndef ZS_REFS_H
#define ZS_REFS_H

#include <stdbool.h>

/* The count; only these functions touch it. */
typedef long zs_refs;

/* Begins with the maker's. */
static inline void zs_refs_init(zs_refs *refs)
{
    __atomic_store_n(refs, 1, __ATOMIC_RELAXED);
}

/* Takes one more. */
static inline void zs_refs_take(zs_refs *refs)
{
    __atomic_fetch_add(refs, 1, __ATOMIC_RELAXED);
}

/* For a caller that has none: takes one, unless the last has been given back; false: it has. */
static inline bool zs_refs_take_if_any(zs_refs *refs)
{
    long n = __atomic_load_n(refs, __ATOMIC_RELAXED);
    while (n > 0)
        if (__atomic_compare_exchange_n(refs, &n, n + 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return true;
    return false;
}

/* Drops one; true: it was the last. */
static inline bool zs_refs_drop(zs_refs *refs)
{
    return __atomic_sub_fetch(refs, 1, __ATOMIC_ACQ_REL) == 0;
}

#endif
