/* nccl_monitor.c - the process's thread that monitors its communicators ten times a second. See nccl_comm.h.
 *
 * It makes three checks of each: has NCCL failed, has a peer exited, has the GPU's work not ended for too long? If so
 * it records that, and aborts the communicator, which ends its kernels.
 *
 * It holds the list's lock while it checks a communicator, so removing one waits for that. This lock is taken before
 * the communicators' locks, never after. */
#define _GNU_SOURCE 1 /* pthread_sigmask */
#include "comm/nccl/nccl_local.h"

#include "base/clock.h"
#include "base/file.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double grace = 1.0; /* seconds for outstanding work once a peer has exited */

/* --- the three checks --------------------------------------------------------------------------------------------- */

static void ask_nccl(zs_nccl_comm *comm)
{
    zs_nccl_result state = ZS_NCCL_SUCCESS, result = comm->nccl->CommGetAsyncError(comm->handle, &state);
    if (result == ZS_NCCL_SUCCESS) result = state;
    if (result == ZS_NCCL_SUCCESS || result == ZS_NCCL_IN_PROGRESS) return;
    zs_nccl_poison_by(comm, comm->launching != NULL ? comm->launching : "CommGetAsyncError", result);
}

/* The oldest work that has not ended; NULL: none. Forgets work that has ended. */
static const zs_nccl_work *oldest(zs_nccl_comm *comm)
{
    zs_nccl_watched *watched = &comm->watched;
    while (watched->count > 0) {
        const zs_nccl_work *work = &watched->ring[watched->first];
        if (!work->done(work->event)) return work;
        watched->first = (watched->first + 1) % watched->room;
        watched->count--;
        watched->since = zs_clock();
    }
    return NULL;
}

static void ask_work(zs_nccl_comm *comm)
{
    const zs_nccl_work *work = oldest(comm);
    if (work == NULL || zs_clock() < comm->watched.since + comm->options.timeout) return;
    char text[512];
    snprintf(text, sizeof text,
             "NCCL, communicator '%s', rank %d of %d: %s did not finish within %g s: another rank is late, "
             "hangs in a kernel or diverged; run the same modules in the same order on all ranks, or raise timeout",
             comm->name, comm->rank, comm->world, work->what, comm->options.timeout);
    zs_nccl_poison(comm, ZS_ERR_TIMEOUT, text);
}

/* Not under the communicator's lock: it may check processes and files. */
static bool ask_peers(const zs_nccl_comm *comm, char *sentence, size_t size)
{
    return comm->options.gone != NULL && comm->options.gone(comm->options.arg, sentence, size);
}

/* A peer that ended in an orderly way has done its part of the operations outstanding here, which may still
 * complete. */
static bool may_end_well(zs_nccl_comm *comm)
{
    if (oldest(comm) == NULL && comm->launching == NULL) return false;
    if (comm->gone_since == 0.0) comm->gone_since = zs_clock();
    return zs_clock() < comm->gone_since + grace;
}

static void look_at(zs_nccl_comm *comm)
{
    char sentence[400] = "", text[sizeof comm->why];
    pthread_mutex_lock(&comm->lock);
    bool alive = comm->failure == ZS_OK && comm->handle != NULL;
    pthread_mutex_unlock(&comm->lock);
    bool gone = alive && ask_peers(comm, sentence, sizeof sentence);
    snprintf(text, sizeof text, "NCCL, communicator '%s', rank %d of %d: %s", comm->name, comm->rank, comm->world,
             sentence);
    pthread_mutex_lock(&comm->lock);
    if (gone && !may_end_well(comm)) zs_nccl_poison(comm, ZS_ERR_PEER, text);
    if (comm->handle != NULL) ask_nccl(comm);
    if (comm->handle != NULL) ask_work(comm);
    zs_nccl_leave(comm, ZS_OK);
}

/* --- the thread --------------------------------------------------------------------------------------------------- */

static const double look_every = 0.1; /* seconds */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake; /* on the monotonic clock */
    zs_nccl_comm *first;
    bool running;
    _Atomic unsigned started; /* 1 + zs_lifetime() when a thread was started, 0: never */
} monitor = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t wake_once = PTHREAD_ONCE_INIT;

/* Ends with the last entry. */
static void *watch(void *unused)
{
    pthread_mutex_lock(&monitor.lock);
    while (monitor.first != NULL) {
        for (zs_nccl_comm *one = monitor.first; one != NULL; one = one->next)
            look_at(one);
        zs_clear_error();
        const struct timespec until = zs_clock_in(look_every);
        pthread_cond_timedwait(&monitor.wake, &monitor.lock, &until);
    }
    monitor.running = false;
    pthread_mutex_unlock(&monitor.lock);
    return unused;
}

static void make_wake(void)
{
    zs_clock_condition(&monitor.wake);
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
    monitor.running = true;
    monitor.started = 1 + zs_lifetime();
    return ZS_OK;
}

/* A forked child has the list, but not the thread, and its lock may be held forever. */
static bool forked(void)
{
    unsigned started = monitor.started;
    return started != 0 && started != 1 + zs_lifetime();
}

zs_status zs_nccl_monitor_add(zs_nccl_comm *comm)
{
    if (forked())
        return ZS_FAIL(
            ZS_ERR_STATE,
            "cannot use GPU transports in a process forked from one that uses them; use the 'spawn' start method");
    pthread_mutex_lock(&monitor.lock);
    zs_status status = monitor.running ? ZS_OK : start();
    if (status == ZS_OK) {
        comm->next = monitor.first;
        monitor.first = comm;
    }
    pthread_mutex_unlock(&monitor.lock);
    return status;
}

void zs_nccl_monitor_remove(zs_nccl_comm *comm)
{
    if (forked()) return;
    pthread_mutex_lock(&monitor.lock);
    for (zs_nccl_comm **at = &monitor.first; *at != NULL; at = &(*at)->next)
        if (*at == comm) {
            *at = comm->next;
            break;
        }
    if (monitor.running) pthread_cond_signal(&monitor.wake);
    pthread_mutex_unlock(&monitor.lock);
}

void zs_nccl_abort_all(const char *why)
{
    if (forked()) return;
    pthread_mutex_lock(&monitor.lock);
    for (zs_nccl_comm *one = monitor.first; one != NULL; one = one->next)
        zs_nccl_comm_abort(one, why);
    pthread_mutex_unlock(&monitor.lock);
}

/* --- communicators and events to watch ---------------------------------------------------------------------------- */

/* Makes room for one more, with the oldest first. */
static zs_status make_room(zs_nccl_watched *watched)
{
    if (watched->count < watched->room) return ZS_OK;
    size_t room = watched->room == 0 ? 64 : 2 * watched->room;
    zs_nccl_work *ring = malloc(room * sizeof *ring);
    if (ring == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory listing %zu NCCL operations", room);
    for (size_t i = 0; i < watched->count; i++) /* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): count <= room */
        ring[i] = watched->ring[(watched->first + i) % watched->room];
    free(watched->ring);
    watched->ring = ring;
    watched->room = room;
    watched->first = 0;
    return ZS_OK;
}

zs_status zs_nccl_comm_watch(zs_nccl_comm *comm, zs_nccl_work work)
{
    ZS_TRY(zs_nccl_enter(comm));
    zs_nccl_watched *watched = &comm->watched;
    zs_status status = make_room(watched);
    if (status == ZS_OK) {
        if (watched->count == 0) watched->since = zs_clock();
        watched->ring[(watched->first + watched->count) % watched->room] = work;
        watched->count++;
    }
    return zs_nccl_leave(comm, status);
}

void zs_nccl_comm_forget(zs_nccl_comm *comm, const void *event)
{
    if (comm->lifetime != zs_lifetime()) return;
    pthread_mutex_lock(&comm->lock);
    zs_nccl_watched *watched = &comm->watched;
    size_t kept = 0;
    for (size_t i = 0; i < watched->count; i++) {
        zs_nccl_work work = watched->ring[(watched->first + i) % watched->room];
        if (work.event == event) {
            if (i == 0) watched->since = zs_clock();
            continue;
        }
        watched->ring[(watched->first + kept) % watched->room] = work;
        kept++;
    }
    watched->count = kept;
    pthread_mutex_unlock(&comm->lock);
}
