/* peer_watch.c - dead peers and deadlines. See peer.h and watchdog.h.
 *
 * The one idea: a stream that waits for a peer which never comes is let go by this rank itself: it writes into its own pad
 * what the peer would have. What is computed then is worthless, so the failure is on record before, and every later call ends
 * with it. It is written again and again, as numbers that were on their way may take its place.
 */
#include "base/file.h"
#include "comm/peer/peer.h"
#include "device/cuda_driver.h"
#include "device/device_cuda.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static const double grace =
    1.0; /* seconds that what is out still has when a peer is gone: that may have done its part */

static void let_go(zs_peer *self)
{
    for (int r = 0; r < self->base.world; r++)
        if (r == self->base.rank || self->watch.tell_peers) zs_peer_let_go(self, r);
}

/* With the lock held; the first failure stays. */
static void fail(zs_peer *self, zs_status failure, const char *why)
{
    if (self->watch.failure != ZS_OK) return;
    self->watch.failure = failure;
    snprintf(self->watch.why, sizeof self->watch.why, "%s", why);
    let_go(self);
}

/* Number of the oldest move that has not ended, from 1 on; 0: none is out. With the lock held. */
static uint64_t oldest(zs_peer *self)
{
    zs_peer_watch *watch = &self->watch;
    uint64_t first = watch->count > ZS_PEER_EVENTS ? watch->count - ZS_PEER_EVENTS : 0;
    for (uint64_t i = first; i < watch->count; i++) {
        zs_peer_move *move = &watch->moves[i % ZS_PEER_EVENTS];
        move->out = move->out && !zs_device_cuda_passed(self->base.device, move->event);
        if (move->out) return i + 1;
    }
    return 0;
}

static void ask_peers(zs_peer *self, bool out)
{
    zs_peer_watch *watch = &self->watch;
    if (watch->gone_since == 0.0) {
        if (!zs_kin_gone(self->kin, watch->gone, sizeof watch->gone)) return;
        watch->gone_since = zs_watchdog_now();
    }
    if (!out || zs_watchdog_now() > watch->gone_since + grace) fail(self, ZS_ERR_PEER, watch->gone);
}

static void ask_moves(zs_peer *self)
{
    char text[400];
    zs_peer_watch *watch = &self->watch;
    double timeout = self->control->timeout;
    if (watch->stuck == 0 || zs_watchdog_now() < watch->since + timeout) return;
    snprintf(
        text, sizeof text,
        "%s did not finish on the GPU of rank %d within %g s: another rank is late or diverged; run the same modules "
        "in the same order on all ranks, or raise timeout",
        watch->moves[(watch->stuck - 1) % ZS_PEER_EVENTS].what, self->base.rank, timeout);
    fail(self, ZS_ERR_TIMEOUT, text);
}

static void look(zs_watchdog *entry)
{
    zs_peer_watch *watch = (zs_peer_watch *)entry;
    zs_peer *self = (zs_peer *)((char *)entry - offsetof(zs_peer, watch));
    zs_cu_stream unused;
    pthread_mutex_lock(&watch->lock);
    if (watch->failure != ZS_OK) {
        if (!watch->closed) let_go(self);
    } else if (zs_device_cuda_stream(self->base.device, ZS_STREAM_GATHER, &unused) == ZS_OK) { /* sees to a context */
        uint64_t first = oldest(self);
        if (first == 0 || first != watch->stuck) watch->since = zs_watchdog_now();
        watch->stuck = first;
        ask_peers(self, first != 0);
        ask_moves(self);
    }
    pthread_mutex_unlock(&watch->lock);
}

/* Streams of one priority may share a queue of the hardware, and a stream that waits holds up what is behind it there. So the
 * rescue's is one that neither our streams nor torch's usual streams have. */
static zs_status make_rescue(zs_peer *self)
{
    int least = 0, greatest = 0;
    zs_cu_stream unused;
    ZS_TRY(zs_device_cuda_stream(self->base.device, ZS_STREAM_GATHER, &unused)); /* sees to a context */
    ZS_TRY(ZS_CU(cuCtxGetStreamPriorityRange, &least, &greatest));
    int priority = greatest + 2 <= least ? greatest + 2 : least;
    return ZS_CU(cuStreamCreateWithPriority, &self->watch.rescue, ZS_CU_STREAM_NON_BLOCKING, priority);
}

zs_status zs_peer_watch_begin(zs_peer *self)
{
    ZS_TRY(make_rescue(self));
    self->watch.entry = (zs_watchdog){.look = look};
    return zs_watchdog_add(&self->watch.entry);
}

void zs_peer_watch_end(zs_peer *self)
{
    zs_watchdog_remove(&self->watch.entry);
    if (self->lifetime != zs_lifetime()) return;
    for (int i = 0; i < ZS_PEER_EVENTS; i++)
        zs_device_cuda_event_free(self->watch.moves[i].event);
    if (self->watch.rescue != NULL) {
        ZS_CU_FREE(cuStreamSynchronize, self->watch.rescue);
        ZS_CU_FREE(cuStreamDestroy, self->watch.rescue);
    }
    pthread_mutex_destroy(&self->watch.lock);
}

/* With the lock held. */
static zs_status record(zs_peer *self, zs_stream stream, zs_peer_move *move)
{
    move->out = false;
    if (move->event == NULL) ZS_TRY(zs_device_cuda_event_new(self->base.device, &move->event));
    ZS_TRY(zs_device_cuda_record(self->base.device, stream, move->event));
    move->out = true;
    return ZS_OK;
}

zs_status zs_peer_watch_move(zs_peer *self, zs_stream stream, const char *what, const char *name)
{
    zs_peer_watch *watch = &self->watch;
    pthread_mutex_lock(&watch->lock);
    zs_peer_move *move = &watch->moves[watch->count++ % ZS_PEER_EVENTS];
    snprintf(move->what, sizeof move->what, "the %s%s%.60s", what, name[0] != 0 ? " of unit " : "", name);
    zs_status status = record(self, stream, move);
    pthread_mutex_unlock(&watch->lock);
    return status;
}

zs_status zs_peer_check(zs_backend *backend)
{
    zs_peer *self = (zs_peer *)backend;
    if (self->lifetime != zs_lifetime())
        return ZS_FAIL(ZS_ERR_STATE, "a process forked from rank %d cannot use its process group", backend->rank);
    pthread_mutex_lock(&self->watch.lock);
    zs_status status = self->watch.failure;
    if (status != ZS_OK) (void)ZS_FAIL(status, "%s", self->watch.why);
    pthread_mutex_unlock(&self->watch.lock);
    return status;
}

void zs_peer_abort(zs_backend *backend, const char *why)
{
    zs_peer *self = (zs_peer *)backend;
    if (self->lifetime != zs_lifetime()) return;
    pthread_mutex_lock(&self->watch.lock);
    self->watch.tell_peers = true;
    fail(self, ZS_ERR_STATE, why);
    pthread_mutex_unlock(&self->watch.lock);
}

zs_status zs_peer_drain(zs_peer *self, double seconds)
{
    double until = zs_watchdog_now() + seconds;
    zs_cu_event event = NULL;
    zs_status status = zs_device_cuda_event_new(self->base.device, &event);
    for (zs_stream stream = 0; stream < ZS_STREAMS && status == ZS_OK; stream++) {
        bool done = false;
        status = zs_device_cuda_record(self->base.device, stream, event);
        while (status == ZS_OK && !done) {
            status = zs_cuda_event_done(event, &done);
            if (status == ZS_OK && !done && zs_watchdog_now() > until)
                status = ZS_FAIL(ZS_ERR_TIMEOUT, "work queued on the GPU of rank %d did not finish within %g s",
                                 self->base.rank, seconds);
            if (status == ZS_OK && !done) nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        }
    }
    zs_device_cuda_event_free(event);
    return status;
}
