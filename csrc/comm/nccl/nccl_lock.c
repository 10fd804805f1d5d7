/* nccl_lock.c - see nccl_local.h: the lock, and what NCCL's results mean.
 *
 * Communicators are non-blocking, so no call of NCCL waits for a peer, and an abort is always possible. The price is
 * that a call may return before its kernel is on the stream; zs_nccl_settle waits for that, and only that.
 *
 * Known of 2.28.9 (init.cc, group.cc, enqueue.cc): a non-blocking communicator that has refused an argument refuses
 * all later calls too (its state stays at "invalid argument"), so arguments are checked here first, and a refusal
 * poisons unless NCCL's state is good. CommAbort and CommDestroy consume the handle, and end in the background. */
#define _GNU_SOURCE 1 /* nanosleep */
#include "comm/nccl/nccl_local.h"

#include "base/clock.h"
#include "base/file.h"
#include "comm/comm_local.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>

static const double ask_every = 0.1; /* seconds between two checks for Ctrl-C */

/* --- failures ----------------------------------------------------------------------------------------------------- */

/* Fills `text` with the call, its result and NCCL's message. */
static void describe(const zs_nccl_comm *comm, const char *call, zs_nccl_result result, char *text, size_t size)
{
    const char *more = comm->nccl->GetLastError != NULL ? comm->nccl->GetLastError(comm->handle) : NULL;
    bool has_more = more != NULL && more[0] != 0;
    snprintf(text, size, "NCCL, communicator '%s', rank %d of %d: nccl%s failed: %s%s%s", comm->name, comm->rank,
             comm->world, call, comm->nccl->GetErrorString(result), has_more ? ": " : "", has_more ? more : "");
}

void zs_nccl_poison(zs_nccl_comm *comm, zs_status failure, const char *why)
{
    if (comm->failure != ZS_OK) return;
    comm->failure = failure;
    comm->reports = true;
    snprintf(comm->why, sizeof comm->why, "%s", why);
    zs_nccl_handle handle = comm->handle;
    comm->handle = NULL;
    comm->launching = NULL;
    if (handle != NULL) comm->nccl->CommAbort(handle); /* even after an error, the handle is no longer ours */
}

void zs_nccl_poison_by(zs_nccl_comm *comm, const char *call, zs_nccl_result result)
{
    char text[sizeof comm->why];
    describe(comm, call, result, text, sizeof text);
    if (comm->failure == ZS_OK) comm->result = result;
    zs_nccl_poison(comm, ZS_ERR_NCCL, text);
}

/* Fails with the record on this thread. */
static zs_status fail_as_recorded(const zs_nccl_comm *comm)
{
    return ZS_FAIL(comm->failure, "%s", comm->why);
}

static zs_status fail_by(zs_nccl_comm *comm, const char *call, zs_nccl_result result)
{
    zs_nccl_result state = result;
    bool harmless = result == ZS_NCCL_INVALID_ARGUMENT && comm->handle != NULL &&
                    comm->nccl->CommGetAsyncError(comm->handle, &state) == ZS_NCCL_SUCCESS && state == ZS_NCCL_SUCCESS;
    if (!harmless) {
        zs_nccl_poison_by(comm, call, result);
        return fail_as_recorded(comm);
    }
    char text[sizeof comm->why];
    describe(comm, call, result, text, sizeof text);
    return ZS_FAIL(ZS_ERR_NCCL, "%s", text);
}

/* --- the lock ----------------------------------------------------------------------------------------------------- */

/* First no sleep at all (a kernel's launch takes some 20 us), then longer and longer ones. */
static void nap(int looks)
{
    if (looks < 50)
        sched_yield();
    else
        nanosleep(&(struct timespec){.tv_nsec = looks < 500 ? 20000 : 1000000}, NULL);
}

/* Waits with the lock released; ZS_OK: check again. */
static zs_status wait_a_little(zs_nccl_comm *comm, int looks, double *asked)
{
    pthread_mutex_unlock(&comm->lock);
    nap(looks);
    bool stop = false;
    if (!comm->ending && zs_clock() > *asked + ask_every) { /* takes the GIL, so not under the lock */
        *asked = zs_clock();
        stop = zs_comm_interrupted();
    }
    pthread_mutex_lock(&comm->lock);
    if (comm->failure != ZS_OK) return fail_as_recorded(comm);
    if (stop) return ZS_FAIL(ZS_ERR_TORCH, "NCCL, communicator '%s': interrupted", comm->name);
    return ZS_OK;
}

/* Waits until NCCL no longer works in the background; the lock is held before and after. */
static zs_status wait_until_settled(zs_nccl_comm *comm, double patience)
{
    double start = zs_clock(), asked = start;
    for (int looks = 0;; looks += looks < 1000) {
        zs_nccl_result state = ZS_NCCL_IN_PROGRESS, result = comm->nccl->CommGetAsyncError(comm->handle, &state);
        if (result != ZS_NCCL_SUCCESS) state = result;
        if (state != ZS_NCCL_IN_PROGRESS) {
            const char *call = comm->launching;
            comm->launching = NULL;
            return state == ZS_NCCL_SUCCESS ? ZS_OK : fail_by(comm, call, state);
        }
        if (zs_clock() > start + patience) {
            char text[256];
            snprintf(text, sizeof text,
                     "NCCL, communicator '%s', rank %d of %d: nccl%s did not finish within %g s: another rank is late "
                     "or diverged",
                     comm->name, comm->rank, comm->world, comm->launching, patience);
            zs_nccl_poison(comm, ZS_ERR_TIMEOUT, text);
            return fail_as_recorded(comm);
        }
        ZS_TRY(wait_a_little(comm, looks, &asked));
    }
}

zs_status zs_nccl_settle_within(zs_nccl_comm *comm, const char *call, zs_nccl_result result, double patience)
{
    if (result != ZS_NCCL_SUCCESS && result != ZS_NCCL_IN_PROGRESS) return fail_by(comm, call, result);
    comm->launching = call; /* stays if Ctrl-C interrupts the wait: the next call continues it */
    return wait_until_settled(comm, patience);
}

zs_status zs_nccl_settle(zs_nccl_comm *comm, const char *call, zs_nccl_result result)
{
    if (result == ZS_NCCL_SUCCESS) return ZS_OK;
    return zs_nccl_settle_within(comm, call, result, comm->options.timeout);
}

zs_status zs_nccl_enter(zs_nccl_comm *comm)
{
    if (comm->lifetime != zs_lifetime())
        return ZS_FAIL(ZS_ERR_STATE,
                       "NCCL, communicator '%s': a process forked from rank %d cannot use it; start it with 'spawn'",
                       comm->name, comm->rank);
    pthread_mutex_lock(&comm->lock);
    zs_status status = comm->failure != ZS_OK ? fail_as_recorded(comm) : ZS_OK;
    if (status == ZS_OK && comm->launching != NULL) status = wait_until_settled(comm, comm->options.timeout);
    return status == ZS_OK ? ZS_OK : zs_nccl_leave(comm, status);
}

zs_status zs_nccl_leave(zs_nccl_comm *comm, zs_status status)
{
    bool reports = comm->reports;
    comm->reports = false;
    pthread_mutex_unlock(&comm->lock);
    if (reports && comm->options.lost != NULL) comm->options.lost(comm->options.arg, comm->failure, comm->why);
    return status;
}

/* --- from outside ------------------------------------------------------------------------------------------------- */

zs_status zs_nccl_comm_check(zs_nccl_comm *comm)
{
    ZS_TRY(zs_nccl_enter(comm));
    return zs_nccl_leave(comm, ZS_OK);
}

void zs_nccl_comm_follow(zs_nccl_comm *comm, zs_status failure, const char *why)
{
    if (comm->lifetime != zs_lifetime()) return;
    pthread_mutex_lock(&comm->lock);
    bool reports = comm->reports;
    zs_nccl_poison(comm, failure, why);
    comm->reports = reports;
    pthread_mutex_unlock(&comm->lock);
}

void zs_nccl_comm_abort(zs_nccl_comm *comm, const char *why)
{
    char text[sizeof comm->why];
    snprintf(text, sizeof text, "NCCL, communicator '%s', rank %d of %d: %s", comm->name, comm->rank, comm->world, why);
    zs_nccl_comm_follow(comm, ZS_ERR_STATE, text);
}
