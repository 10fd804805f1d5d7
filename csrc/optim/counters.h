/* counters.h - which counters on a device hold the same number, without reading them.
 *
 * Counters that began equal, and that every step has counted all together or not at all, are equal. A step that leaves
 * some out separates them for good. CUDA graphs repeat steps unseen by the host, but a graph repeats what was found
 * when it was captured, so it separates no counters anew.
 */
#ifndef ZS_COUNTERS_H
#define ZS_COUNTERS_H

#include "base/status.h"

typedef struct zs_counters zs_counters;

/* New: `n` members, which are related if their `key` is equal. */
zs_status zs_counters_new(int64_t n, const double *key, zs_counters **out);

/* Frees it; NULL allowed. */
void zs_counters_free(zs_counters *counters);

/* Before a step of the members in `taken` [n]: separates those that are related to others. */
void zs_counters_part(zs_counters *counters, const bool *taken);

/* The number of a member's set of equal counters, below n. */
int64_t zs_counters_of(const zs_counters *counters, int64_t member);

#endif
