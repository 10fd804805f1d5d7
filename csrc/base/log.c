/* log.c - see log.h. */
#define _GNU_SOURCE /* syscall */
#include "base/log.h"

#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_int least = ZS_LOG_OFF; /* the level */

/* The ring. A spin lock, which a forked child can open: it is held to copy one record. */
static atomic_flag locked = ATOMIC_FLAG_INIT;
static zs_log_record ring[ZS_LOG_RECORDS];
static size_t first, dropped; /* the oldest record; those before it that had no room, since the last was taken */
static atomic_size_t count;

static void lock(void)
{
    while (atomic_flag_test_and_set_explicit(&locked, memory_order_acquire))
        sched_yield();
}

static void unlock(void)
{
    atomic_flag_clear_explicit(&locked, memory_order_release);
}

int32_t zs_own_thread(void)
{
    static _Thread_local int32_t number;
    if (number == 0) number = (int32_t)syscall(SYS_gettid); /* gettid() needs glibc 2.30 */
    return number;
}

void zs_log_set_level(int level)
{
    atomic_store_explicit(&least, level, memory_order_relaxed);
}

bool zs_log_keeps(int level)
{
    return level >= atomic_load_explicit(&least, memory_order_relaxed);
}

bool zs_log_waits(void)
{
    return atomic_load_explicit(&count, memory_order_relaxed) > 0;
}

void zs_log(int level, const char *format, ...)
{
    if (!zs_log_keeps(level)) return;
    zs_log_record record = {.level = level, .thread = zs_own_thread()};
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    record.time = now.tv_sec * 1000000000LL + now.tv_nsec;
    va_list args;
    va_start(args, format);
    vsnprintf(record.text, sizeof record.text, format, args);
    va_end(args);
    lock();
    size_t n = atomic_load_explicit(&count, memory_order_relaxed);
    ring[(first + n) % ZS_LOG_RECORDS] = record;
    if (n < ZS_LOG_RECORDS) {
        atomic_store_explicit(&count, n + 1, memory_order_relaxed);
    } else {
        first = (first + 1) % ZS_LOG_RECORDS;
        dropped++;
    }
    unlock();
}

bool zs_log_take(zs_log_record *record, size_t *lost)
{
    lock();
    size_t n = atomic_load_explicit(&count, memory_order_relaxed);
    if (n > 0) {
        *record = ring[first];
        *lost = dropped;
        first = (first + 1) % ZS_LOG_RECORDS;
        dropped = 0;
        atomic_store_explicit(&count, n - 1, memory_order_relaxed);
    }
    unlock();
    return n > 0;
}

void zs_log_forget(void)
{
    zs_log_set_level(ZS_LOG_OFF);
    first = dropped = 0;
    atomic_store(&count, 0);
    unlock();
}
