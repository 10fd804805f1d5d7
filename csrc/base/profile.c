/* profile.c - see profile.h. */
#include "base/profile.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME = 256, MOST = 2000000 /* ranges of a trace: about 200 MB */ };

static const int64_t slow = 1000000000; /* nanoseconds; longer waits are in the log from "info" on */

static const zs_profiler *profiler;
static atomic_uint running, started; /* the number of the trace that runs, 0: none; of the last one */
static _Atomic(zs_profile *) kept;
static atomic_size_t n_kept;
static _Atomic int64_t waits;

void zs_profile_by(const zs_profiler *by)
{
    __atomic_store_n(&profiler, by, __ATOMIC_RELEASE);
}

static const zs_profiler *observer(void)
{
    const zs_profiler *by = __atomic_load_n(&profiler, __ATOMIC_ACQUIRE);
    return by != NULL && by->records() ? by : NULL;
}

bool zs_profile_shows_waits(void)
{
    return zs_profile_trace() != 0 || zs_log_keeps(ZS_LOG_INFO) || observer() != NULL;
}

/* --- ranges ------------------------------------------------------------------------------------------------------- */

/* A range that a profiler misses must not end a training run. NULL: no memory. */
static zs_profile *begin(const zs_profiler *by, unsigned trace, const char *name)
{
    size_t size = strlen(name) + 1;
    zs_profile *range = malloc(sizeof *range + size);
    if (range == NULL) return NULL;
    *range = (zs_profile){.observed = by != NULL ? by->begin(name) : NULL, .trace = trace, .thread = zs_own_thread()};
    memcpy(range->name, name, size);
    range->begun = zs_clock_ns();
    return range;
}

/* `level`: of the log, from which on the range is kept for it. */
static zs_profile *begin_named(const zs_profiler *by, int level, const char *format, va_list args)
{
    unsigned trace = zs_profile_trace();
    if (trace == 0 && by == NULL && !zs_log_keeps(level)) return NULL;
    char name[NAME];
    vsnprintf(name, sizeof name, format, args);
    return begin(by, trace, name);
}

zs_profile *zs_profile_begin(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    zs_profile *range = begin_named(observer(), ZS_LOG_DEBUG, format, args);
    va_end(args);
    return range;
}

zs_profile *zs_profile_begin_wait(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    zs_profile *range = begin_named(observer(), ZS_LOG_INFO, format, args);
    va_end(args);
    if (range != NULL) range->waits = true;
    return range;
}

zs_profile *zs_profile_begin_loose(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    zs_profile *range = begin_named(NULL, ZS_LOG_DEBUG, format, args);
    va_end(args);
    return range;
}

/* Hands a range to the trace that runs, or frees it. */
static void keep(zs_profile *range)
{
    if (range->trace == 0 || range->trace != atomic_load(&running) || atomic_fetch_add(&n_kept, 1) >= MOST) {
        free(range);
        return;
    }
    range->next = atomic_load(&kept);
    while (!atomic_compare_exchange_weak(&kept, &range->next, range))
        continue;
}

/* Leaves a record of a range that is over. */
static void log_range(const zs_profile *range)
{
    const char *name = range->name + strlen("zshard::");
    int64_t took = range->ended - range->begun;
    if (range->waits && took > slow)
        zs_log(ZS_LOG_INFO, "%s: %.1f s", name, (double)took / 1e9);
    else
        zs_log(ZS_LOG_DEBUG, "%s: %.1f ms", name, (double)took / 1e6);
}

void zs_profile_end(zs_profile *range)
{
    if (range == NULL) return;
    range->ended = zs_clock_ns();
    if (range->observed != NULL) __atomic_load_n(&profiler, __ATOMIC_ACQUIRE)->end(range->observed);
    log_range(range);
    keep(range);
}

void zs_profile_drop(zs_profile *range)
{
    free(range);
}

void zs_profile_add(const char *name, int64_t begun)
{
    unsigned trace = zs_profile_trace();
    zs_profile *range = trace != 0 || zs_log_keeps(ZS_LOG_DEBUG) ? begin(NULL, trace, name) : NULL;
    if (range == NULL) return;
    range->begun = begun;
    zs_profile_end(range);
}

/* --- traces ------------------------------------------------------------------------------------------------------- */

bool zs_profile_start(void)
{
    unsigned none = 0, next = atomic_fetch_add(&started, 1) + 1;
    if (!atomic_compare_exchange_strong(&running, &none, next)) return false;
    atomic_store(&n_kept, 0);
    return true;
}

unsigned zs_profile_trace(void)
{
    return atomic_load_explicit(&running, memory_order_relaxed);
}

void zs_profile_note(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    zs_profile *range = zs_profile_trace() != 0 ? begin_named(NULL, ZS_LOG_OFF, format, args) : NULL;
    va_end(args);
    if (range == NULL) return;
    range->ended = range->begun;
    keep(range);
}

/* A thread that ends a range just now may be late by one: its range is then in the next trace's list, which drops it
 * by its number. */
zs_profile *zs_profile_stop(size_t *lost)
{
    unsigned trace = atomic_exchange(&running, 0);
    size_t n = atomic_load(&n_kept);
    *lost = n > MOST ? n - MOST : 0;
    zs_profile *first = NULL, **last = &first;
    for (zs_profile *range = atomic_exchange(&kept, NULL), *next; range != NULL; range = next) {
        next = range->next;
        range->next = NULL;
        if (range->trace != trace) {
            free(range);
            continue;
        }
        *last = range;
        last = &range->next;
    }
    return first;
}

/* --- waits -------------------------------------------------------------------------------------------------------- */

void zs_profile_waited(int64_t begun)
{
    atomic_fetch_add_explicit(&waits, zs_clock_ns() - begun, memory_order_relaxed);
}

int64_t zs_profile_all_waits(void)
{
    return atomic_load_explicit(&waits, memory_order_relaxed);
}
