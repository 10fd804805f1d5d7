/* counters.c - finds counters on a device that hold the same number, without reading them.
 *
 * Counters that began equal, and that every step has counted all together or not at all, are equal. A step that leaves
 * some out separates them for good. CUDA graphs repeat steps unseen by the host, but a graph repeats its captured
 * state, so it separates no further counters. See optim_plan.h. */
#include "optim/optim_plan.h"

#include <stdlib.h>
#include <string.h>

struct zs_counters {
    int64_t n, groups;
    int64_t *of;    /* [n] each member's group */
    int64_t *count; /* [n] members of a group, then without those that are taken */
    int64_t *moved; /* [n] where those of a group go that are taken; -1: nowhere yet */
};

/* Those with equal keys into one group. There are few groups, and most members are of the last one. */
static void group(zs_counters *counters, const double *key)
{
    for (int64_t i = 0; i < counters->n; i++) {
        int64_t *found = &counters->of[i];
        *found = counters->groups;
        for (int64_t g = counters->groups - 1; g >= 0 && *found == counters->groups; g--)
            if (key[counters->moved[g]] == key[i]) *found = g;
        if (*found == counters->groups) counters->moved[counters->groups++] = i; /* for now: the group's first member */
    }
}

zs_status zs_counters_new(int64_t n, const double *key, zs_counters **out)
{
    zs_counters *counters = calloc(1, sizeof *counters);
    int64_t *rows = calloc((size_t)(3 * n + 1), sizeof *rows);
    if (counters == NULL || rows == NULL) {
        free(counters);
        free(rows);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the counters of %lld parameters", (long long)n);
    }
    *counters = (zs_counters){.n = n, .of = rows, .count = rows + n, .moved = rows + 2 * n};
    group(counters, key);
    *out = counters;
    return ZS_OK;
}

void zs_counters_free(zs_counters *counters)
{
    if (counters == NULL) return;
    free(counters->of);
    free(counters);
}

void zs_counters_part(zs_counters *counters, const bool *taken)
{
    int64_t groups = counters->groups;
    memset(counters->count, 0, (size_t)counters->n * sizeof *counters->count);
    for (int64_t i = 0; i < counters->n; i++)
        counters->count[counters->of[i]] += !taken[i];
    for (int64_t g = 0; g < groups; g++)
        counters->moved[g] = -1;
    for (int64_t i = 0; i < counters->n; i++) {
        int64_t g = counters->of[i];
        if (!taken[i] || g >= groups || counters->count[g] == 0) continue; /* all of it are taken: it stays */
        if (counters->moved[g] < 0) counters->moved[g] = counters->groups++;
        counters->of[i] = counters->moved[g];
    }
}

int64_t zs_counters_of(const zs_counters *counters, int64_t member)
{
    return counters->of[member];
}
