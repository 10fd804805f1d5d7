/* counters.h - which counters on a device hold the same number, without reading them.
 *
 * Counters that began equal and have always been counted together are equal. Members of a plan are *counters* as long
 * as every step has taken all of them or none; one that leaves some out parts them, for ever. That holds for the steps
 * that CUDA graphs repeat as well, unseen by the host: a graph repeats what was found when it was captured, so it
 * separates no counters anew.
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

/* The number of a member's kin, below n: equal for those that are kin. */
int64_t zs_counters_of(const zs_counters *counters, int64_t member);

#endif
