/* profile.h - ranges of a rank's work, for torch.profiler, zshard.profile() and the log; and the time it has waited.
 *
 * The core knows no profiler. The shim registers torch's (shim/torch_profile.cpp), which shows ranges as
 * torch.profiler.record_function makes them; a trace keeps them here until it stops; at its level "debug", the log
 * (log.h) gets a record when one ends. Where none of them records, a range is NULL, and its name is never made. Names
 * begin with "zshard::"; those of waits name the peer, so that a trace shows which rank is late.
 */
#ifndef ZS_PROFILE_H
#define ZS_PROFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct zs_observed zs_observed; /* a range as torch's profiler has it */

/* Any of them may be called by any thread. */
typedef struct zs_profiler {
    bool (*records)(void);                   /* on this thread? */
    zs_observed *(*begin)(const char *name); /* new; NULL: it cannot */
    void (*end)(zs_observed *range);         /* by the thread that began it; frees it */
} zs_profiler;

/* A range. Times in nanoseconds (clock.h). */
typedef struct zs_profile {
    struct zs_profile *next;
    zs_observed *observed; /* NULL: torch's profiler does not record it */
    int64_t begun, ended;
    int32_t thread; /* that began it, as the kernel numbers them */
    unsigned trace; /* the trace that keeps it; 0: none */
    bool waits;     /* for other ranks; long ones are in the log from "info" on */
    char name[];
} zs_profile;

/* Has ranges shown by `profiler`, which lives for ever; once. */
void zs_profile_by(const zs_profiler *profiler);

/* Would a range of a wait be seen? */
bool zs_profile_shows_waits(void);

/* Begins a range; new. NULL if nothing records. */
zs_profile *zs_profile_begin(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Begins the range of a wait for other ranks. */
zs_profile *zs_profile_begin_wait(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Begins a range that torch's profiler does not show: another thread may end it, and
 * others may begin within it and end later. */
zs_profile *zs_profile_begin_loose(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Ends it; NULL allowed. */
void zs_profile_end(zs_profile *range);

/* Frees a loose range; no trace keeps it. NULL allowed. */
void zs_profile_drop(zs_profile *range);

/* Adds a range that began at `begun` and ends now. */
void zs_profile_add(const char *name, int64_t begun);

/* --- traces ------------------------------------------------------------------------------------------------------- */

/* Starts a trace; false if one runs. */
bool zs_profile_start(void);

/* Stops the trace. Returns the ranges that are over, the last one first, which the caller frees with free(); *lost: the
 * number of ranges for which there was no room. */
zs_profile *zs_profile_stop(size_t *lost);

/* The number of the trace that runs, from 1; 0: none does. */
unsigned zs_profile_trace(void);

/* Adds a text to the trace, with the time; no-op without one. */
void zs_profile_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* --- waits for other ranks, counted always ------------------------------------------------------------------------ */

/* This thread has waited since `begun`. */
void zs_profile_waited(int64_t begun);

/* The nanoseconds that the threads of this process have waited. */
int64_t zs_profile_all_waits(void);

#endif
