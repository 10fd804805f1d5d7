/* watchdog.c - see watchdog.h.
 *
 * The one idea: the list's lock is held while something is looked at, so removing it waits for that. It is taken before the
 * locks of those that are looked at, never after.
 */
#define _GNU_SOURCE 1 /* pthread_condattr_setclock */
#include "comm/watchdog.h"

#include "base/file.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

static const long look_every = 100000000; /* nanoseconds */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake; /* on the monotonic clock */
    zs_watchdog *first;
    bool running;
    _Atomic unsigned started; /* 1 + zs_lifetime() when a thread was started, 0: never */
} watchdog = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t wake_once = PTHREAD_ONCE_INIT;

double zs_watchdog_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Ends with the last entry. */
static void *watch(void *unused)
{
    pthread_mutex_lock(&watchdog.lock);
    while (watchdog.first != NULL) {
        for (zs_watchdog *one = watchdog.first; one != NULL; one = one->next)
            one->look(one);
        zs_clear_error();
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += look_every;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&watchdog.wake, &watchdog.lock, &until);
    }
    watchdog.running = false;
    pthread_mutex_unlock(&watchdog.lock);
    return unused;
}

static void make_wake(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&watchdog.wake, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* With the lock held. Signals are for other threads. */
static zs_status start(void)
{
    pthread_once(&wake_once, make_wake);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    errno = pthread_create(&thread, NULL, watch, NULL);
    zs_status status = errno == 0 ? ZS_OK : ZS_FAIL_ERRNO("cannot start the GPU watchdog thread");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != ZS_OK) return status;
    pthread_detach(thread);
    watchdog.running = true;
    watchdog.started = 1 + zs_lifetime();
    return ZS_OK;
}

/* A forked child has the list, but not the thread, and may find the lock held for ever. */
static bool forked(void)
{
    unsigned started = watchdog.started;
    return started != 0 && started != 1 + zs_lifetime();
}

zs_status zs_watchdog_add(zs_watchdog *one)
{
    if (forked())
        return ZS_FAIL(
            ZS_ERR_STATE,
            "cannot use GPU transports in a process forked from one that uses them; use the 'spawn' start method");
    pthread_mutex_lock(&watchdog.lock);
    zs_status status = watchdog.running ? ZS_OK : start();
    if (status == ZS_OK) {
        one->next = watchdog.first;
        watchdog.first = one;
    }
    pthread_mutex_unlock(&watchdog.lock);
    return status;
}

void zs_watchdog_remove(zs_watchdog *one)
{
    if (forked()) return;
    pthread_mutex_lock(&watchdog.lock);
    for (zs_watchdog **at = &watchdog.first; *at != NULL; at = &(*at)->next)
        if (*at == one) {
            *at = one->next;
            break;
        }
    if (watchdog.running) pthread_cond_signal(&watchdog.wake);
    pthread_mutex_unlock(&watchdog.lock);
}

void zs_watchdog_end(const char *why)
{
    if (forked()) return;
    pthread_mutex_lock(&watchdog.lock);
    for (zs_watchdog *one = watchdog.first; one != NULL; one = one->next)
        if (one->end != NULL) one->end(one, why);
    pthread_mutex_unlock(&watchdog.lock);
}
