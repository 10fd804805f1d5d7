/* profile.c - see profile.h. */
#include "base/profile.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

enum { NAME = 256 };

static const zs_profiler *profiler;

void zs_profile_by(const zs_profiler *by)
{
    __atomic_store_n(&profiler, by, __ATOMIC_RELEASE);
}

bool zs_profile_records(void)
{
    const zs_profiler *by = __atomic_load_n(&profiler, __ATOMIC_ACQUIRE);
    return by != NULL && by->records();
}

zs_profile *zs_profile_begin(const char *format, ...)
{
    if (!zs_profile_records()) return NULL;
    char name[NAME];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    return __atomic_load_n(&profiler, __ATOMIC_ACQUIRE)->begin(name);
}

void zs_profile_end(zs_profile *range)
{
    if (range != NULL) __atomic_load_n(&profiler, __ATOMIC_ACQUIRE)->end(range);
}
