/* profile.h - ranges that torch.profiler shows, as torch.profiler.record_function makes them.
 *
 * The core knows no profiler. The shim registers one (shim/torch_profile.cpp); where none records on this thread a
 * range is NULL, and its name is never made. Names begin with "zshard::"; those of waits name the peer, so that a trace
 * shows which rank is late.
 */
#ifndef ZS_PROFILE_H
#define ZS_PROFILE_H

#include <stdbool.h>

typedef struct zs_profile zs_profile; /* a range that has begun */

/* Any of them may be called by any thread. */
typedef struct zs_profiler {
    bool (*records)(void);                  /* on this thread? */
    zs_profile *(*begin)(const char *name); /* new; NULL: it cannot */
    void (*end)(zs_profile *range);         /* by the thread that began it; frees it */
} zs_profiler;

/* Has ranges shown by `profiler`, which lives for ever; once. */
void zs_profile_by(const zs_profiler *profiler);

/* Would a range be seen? */
bool zs_profile_records(void);

/* Begins a range; new. NULL if nothing records. */
zs_profile *zs_profile_begin(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Ends it; NULL allowed. */
void zs_profile_end(zs_profile *range);

#endif
