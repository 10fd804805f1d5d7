/* c10d_wait.c - waits for a collective: its end, the message of its failure, and the memory that it writes to. See
 * c10d.h.
 *
 * A process group waits for a peer until its timeout, even if the peer has exited. So waits check on peers in
 * between, and an interrupted wait leaves all memory that torch's threads may still write to in place, forever. */
#define _GNU_SOURCE /* strdup */
#include "base/clock.h"
#include "base/file.h"
#include "base/profile.h"
#include "comm/c10d/c10d.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Seconds: one check for dead peers and Ctrl-C; between two checks for reasons in the store; a process's time to exit
 * after its connections close; from finding that a peer has exited until the wait fails. */
static const double slice = 0.1, ask_every = 2.0, straggle = 2.0, grace = 1.0;

enum { TEXT = 512 };

/* --- failures ----------------------------------------------------------------------------------------------------- */

/* Looks for an exited rank; a process may exit a little after its connections close. */
static bool look_for_gone(zs_c10d_comm *comm, double patience, char *sentence, size_t size)
{
    double end = zs_clock() + patience;
    for (;;) {
        bool last = zs_clock() >= end;
        if (zs_c10d_find_gone(comm, last || patience == 0, sentence, size)) return true;
        if (last) return false;
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
}

static char without_text[] = "its text did not fit into memory";

/* The transport is unusable from now on. False: it already was. */
static bool lose(zs_c10d_comm *comm, const char *why)
{
    char *none = NULL, *text = strdup(why);
    bool first = atomic_compare_exchange_strong(&comm->base.lost, &none, text != NULL ? text : without_text);
    if (!first) free(text);
    return first;
}

void zs_c10d_free_lost(zs_c10d_comm *comm)
{
    char *text = atomic_load(&comm->base.lost);
    if (text != without_text) free(text);
}

bool zs_c10d_is_forked(const zs_c10d_comm *comm)
{
    return comm->lifetime != zs_lifetime();
}

/* A process group cannot send a reason, but its store can: the peers look there after a long wait, or when we have
 * exited. */
void zs_c10d_abort(zs_comm *comm, const char *reason)
{
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    if (!self->reported && !zs_c10d_is_forked(self)) zs_group_publish_text(self->group, comm->rank, reason);
    self->reported = true;
}

zs_status zs_c10d_check_peers(zs_comm *comm)
{
    char sentence[TEXT];
    zs_c10d_comm *self = (zs_c10d_comm *)comm;
    if (zs_c10d_is_forked(self) || !zs_c10d_find_gone(self, true, sentence, sizeof sentence)) return ZS_OK;
    return ZS_FAIL(ZS_ERR_PEER, "%s", sentence);
}

/* zs_c10d_fail, with the findings of a stall; NULL: there was none. */
static zs_status fail_after(zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_stall *stall, zs_status status)
{
    char places[ZS_C10D_TEXT] = "", lines[ZS_LINES] = "";
    if (stall != NULL) zs_c10d_stall_text(comm, turn, stall, places, sizeof places);
    char cause[TEXT], phrase[ZS_TURN_PHRASE], who[TEXT];
    snprintf(cause, sizeof cause, "%s", zs_last_message());
    zs_clear_error();
    if (stall != NULL && status == ZS_ERR_TIMEOUT) zs_c10d_stall_lines(comm, stall, lines, sizeof lines);
    zs_turn_describe_here(turn, "", phrase, sizeof phrase);
    int own = comm->base.rank;
    if (look_for_gone(comm, status == ZS_ERR_PEER ? straggle : 0, who, sizeof who)) {
        status = ZS_FAIL(ZS_ERR_PEER, "%s; rank %d was %s: %s; %s", who, own, phrase, cause, zs_turn_remedy(turn));
    } else {
        zs_c10d_name_others(comm, who, sizeof who);
        if (status == ZS_ERR_TIMEOUT)
            status = ZS_FAIL(
                status,
                "rank %d timed out after %.1f s waiting for %s while %s%s; raise timeout if it is only slow: %s", own,
                comm->base.timeout, who, phrase, places, cause);
        else if (status == ZS_ERR_PEER)
            status = ZS_FAIL(status, "%s exited or is unreachable; rank %d was %s: %s; %s", who, own, phrase, cause,
                             zs_turn_remedy(turn));
        else
            status = ZS_FAIL(status, "rank %d failed while %s: %s", own, phrase, cause);
        /* The others may be in it, and would wait for this rank. */
        bool alone = status != ZS_ERR_TIMEOUT && status != ZS_ERR_PEER;
        if (alone && comm->group != NULL) zs_c10d_abort(&comm->base, zs_last_message());
    }
    if (status == ZS_ERR_TIMEOUT) zs_add_lines(lines);
    if (lose(comm, zs_last_message()) && comm->base.near != NULL) zs_comm_abort(comm->base.near, zs_last_message());
    return status;
}

zs_status zs_c10d_fail(zs_c10d_comm *comm, const zs_turn *turn, zs_status status)
{
    return fail_after(comm, turn, NULL, status);
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

/* A wait's observations so far, in seconds of zs_clock(). */
typedef struct patience {
    double asked; /* the store, last time */
    double gone;  /* when a peer was first seen to have exited; 0: none */
} patience;

/* Fails if the wait must end early. */
static zs_status check_wait(zs_c10d_comm *comm, patience *seen)
{
    char who[TEXT];
    double time = zs_clock();
    if (zs_comm_interrupted()) return ZS_FAIL(ZS_ERR_TORCH, "interrupted while waiting for another rank");
    bool ask = time - seen->asked > ask_every;
    if (ask) seen->asked = time;
    if (!zs_c10d_find_gone(comm, ask, who, sizeof who)) return ZS_OK;
    if (seen->gone == 0) seen->gone = time;
    if (time - seen->gone < grace) return ZS_OK; /* its earlier messages may be enough for us */
    return ZS_FAIL(ZS_ERR_PEER, "the collective cannot complete without that rank");
}

/* The failure of a wait whose collective continues without it: Ctrl-C (ZS_ERR_TORCH) needs no message. */
static zs_status break_off(zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_stall *stall, zs_status status)
{
    if (status != ZS_ERR_TORCH) return fail_after(comm, turn, stall, status);
    lose(comm, "a wait was interrupted (Ctrl-C) while its collective was in flight");
    return status;
}

/* Torch's threads will write to the memory whenever the missing peer comes: it is kept forever. */
static void leave_behind(zs_c10d_comm *comm, zs_work *work, zs_mem *memory)
{
    if (memory != NULL) zs_mem_retain(memory);
    comm->has_strays = true;
    zs_c10d_stray *stray = malloc(sizeof *stray);
    if (stray == NULL) return; /* they stay, but nothing points to them */
    *stray = (zs_c10d_stray){work, memory, comm->strays};
    comm->strays = stray;
}

void zs_c10d_leave_source(zs_c10d_comm *comm, zs_mem *shard)
{
    if (comm->has_strays) leave_behind(comm, NULL, shard);
}

/* `stall`: NULL if a wait may be long because of its size. */
static zs_status wait_for(zs_c10d_comm *comm, const zs_turn *turn, zs_work *work, zs_mem *memory, zs_c10d_stall *stall)
{
    if (zs_c10d_is_forked(comm)) {
        leave_behind(comm, work, memory);
        return ZS_FAIL(ZS_ERR_STATE,
                       "a process forked from rank %d cannot use its process group; start it with 'spawn'",
                       comm->base.rank);
    }
    double begun = zs_clock();
    patience seen = {.asked = begun};
    for (;;) {
        bool done = false;
        zs_status status = zs_work_wait(work, slice, &done);
        if (done) zs_work_free(work);
        if (done && status == ZS_OK) return ZS_OK;
        if (done) return fail_after(comm, turn, stall, status);
        status = check_wait(comm, &seen);
        if (status == ZS_OK && stall != NULL) zs_c10d_stall_check(comm, turn, stall, zs_clock() - begun);
        if (status == ZS_OK) continue;
        leave_behind(comm, work, memory);
        return break_off(comm, turn, stall, status);
    }
}

/* Begins the range that a profiler shows of it. A small message is late because its sender is; others because bytes
 * travel. */
static zs_profile *begin_range(const zs_turn *turn, bool small)
{
    if (!zs_profile_shows_waits()) return NULL;
    char phrase[ZS_TURN_PHRASE];
    zs_turn_describe_brief(turn, phrase, sizeof phrase);
    return zs_profile_begin_wait(small ? "zshard::wait for all ranks (%s)" : "zshard::transfer (%s)", phrase);
}

static zs_status finish(zs_c10d_comm *comm, const zs_turn *turn, zs_work *work, zs_mem *memory, zs_c10d_stall *stall)
{
    bool waits = !zs_work_done(work);
    zs_profile *range = waits ? begin_range(turn, stall != NULL) : NULL;
    int64_t begun = waits ? zs_clock_ns() : 0;
    zs_status status = wait_for(comm, turn, work, memory, stall);
    if (waits) zs_profile_waited(begun);
    zs_profile_end(range);
    return status;
}

zs_status zs_c10d_finish(zs_c10d_comm *comm, const zs_turn *turn, zs_work *work, zs_mem *memory)
{
    return finish(comm, turn, work, memory, NULL);
}

zs_status zs_c10d_finish_turn(zs_c10d_comm *comm, const zs_turn *turn, zs_work *work)
{
    zs_c10d_stall stall = {0};
    atomic_store_explicit(&comm->base.waiting, true, memory_order_relaxed);
    zs_status status = finish(comm, turn, work, NULL, &stall);
    atomic_store_explicit(&comm->base.waiting, false, memory_order_relaxed);
    zs_c10d_stall_end(&stall);
    return status;
}

/* `stall` as in wait_for. */
static zs_status watch(zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_arrival *until, zs_c10d_stall *stall)
{
    double begun = zs_clock(), limit = comm->base.timeout + (until->patient ? grace : 0);
    patience seen = {.asked = begun};
    while (!until->arrived(until->arg, slice)) {
        zs_status status = check_wait(comm, &seen);
        if (status == ZS_OK && zs_clock() - begun > limit) status = ZS_FAIL(ZS_ERR_TIMEOUT, "%s", until->late);
        if (status == ZS_OK && stall != NULL) zs_c10d_stall_check(comm, turn, stall, zs_clock() - begun);
        if (status != ZS_OK) return break_off(comm, turn, stall, status);
    }
    return ZS_OK;
}

/* Waits, if there is anything to wait for, in a range that a profiler shows. */
static zs_status watch_in_range(zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_arrival *until,
                                zs_c10d_stall *stall)
{
    if (until->arrived(until->arg, 0)) return ZS_OK;
    zs_profile *range = begin_range(turn, stall != NULL);
    int64_t begun = zs_clock_ns();
    zs_status status = watch(comm, turn, until, stall);
    zs_profile_waited(begun);
    zs_profile_end(range);
    return status;
}

zs_status zs_c10d_watch(zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_arrival *until)
{
    return watch_in_range(comm, turn, until, NULL);
}

zs_status zs_c10d_watch_turn(zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_arrival *until)
{
    zs_c10d_stall stall = {0};
    atomic_store_explicit(&comm->base.waiting, true, memory_order_relaxed);
    zs_status status = watch_in_range(comm, turn, until, &stall);
    atomic_store_explicit(&comm->base.waiting, false, memory_order_relaxed);
    zs_c10d_stall_end(&stall);
    return status;
}

/* --- areas -------------------------------------------------------------------------------------------------------- */

zs_status zs_c10d_borrow_area(zs_c10d_comm *comm, size_t bytes, zs_mem **area)
{
    pthread_mutex_lock(&comm->areas_lock);
    zs_status status = comm->areas == NULL ? zs_arena_new(comm->base.device, &comm->areas) : ZS_OK;
    ZS_THEN(status, zs_arena_take(comm->areas, bytes, area));
    pthread_mutex_unlock(&comm->areas_lock);
    return status;
}

/* With the lock. */
static void free_if_idle(zs_c10d_comm *comm)
{
    comm->areas_end = comm->areas != NULL && !comm->has_strays;
    if (!comm->areas_end || zs_arena_lent_bytes(comm->areas) > 0) return;
    zs_c10d_free_areas(comm);
    comm->areas_end = false;
}

void zs_c10d_keep_areas(zs_c10d_comm *comm)
{
    pthread_mutex_lock(&comm->areas_lock);
    comm->living++;
    comm->areas_end = false;
    pthread_mutex_unlock(&comm->areas_lock);
}

void zs_c10d_let_areas_go(zs_c10d_comm *comm)
{
    if (zs_c10d_is_forked(comm)) return; /* another thread of the parent may have held the lock */
    pthread_mutex_lock(&comm->areas_lock);
    if (--comm->living == 0) free_if_idle(comm);
    pthread_mutex_unlock(&comm->areas_lock);
}

void zs_c10d_return_area(zs_c10d_comm *comm, zs_mem **area)
{
    if (*area == NULL) return;
    pthread_mutex_lock(&comm->areas_lock);
    zs_arena_give(comm->areas, *area);
    if (comm->areas_end && comm->living == 0) free_if_idle(comm);
    pthread_mutex_unlock(&comm->areas_lock);
    *area = NULL;
}

void zs_c10d_free_areas(zs_c10d_comm *comm)
{
    if (comm->has_strays) return;
    zs_arena_free(comm->areas);
    comm->areas = NULL;
}
