/* pager.c - see pager.h. What is done to pages is in pager_io.c, here is when. */
#define _GNU_SOURCE /* sigset_t */
#include "pager.h"

#include "file.h"
#include "pager_io.h"
#include "pager_ranges.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

enum {
    FURTHEST = 64,    /* ranges that are fetched ahead, at most */
    USUAL = 256 << 20 /* bytes that may be resident */
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* any state: there are few who wait */
    zs_pager_tables tables;
    zs_pager_list queue; /* QUEUED, in the order in which they are fetched */
    zs_pager_list idle;  /* IDLE, those first that may go first */
    size_t limit, resident, most;
    uint64_t wanted, ahead;
    int write_errno; /* of a write that has failed; the data are lost */
    unsigned lifetime;
    bool running;
} pager = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .limit = USUAL};

static _Atomic int n_maps_now; /* what zs_pager_active looks at */

static void count_resident(size_t bytes)
{
    pager.resident += bytes;
    if (pager.resident > pager.most) pager.most = pager.resident;
}

static void enqueue(zs_pager_range *r, bool urgent)
{
    r->state = QUEUED;
    count_resident(r->bytes);
    if (urgent)
        zs_pager_prepend(&pager.queue, r);
    else
        zs_pager_append(&pager.queue, r);
}

static void settle(zs_pager_range *r)
{
    r->state = r->users > 0 ? READY : IDLE;
    if (r->state == IDLE) zs_pager_append(&pager.idle, r);
}

/* --- the two threads ------------------------------------------------------------------------------------------------------ */

/* Is there too much here, and something that may go? */
static bool crowded(void)
{
    return pager.resident > pager.limit && pager.idle.first != NULL;
}

static void *read_thread(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pager.lock);
    for (;;) {
        zs_pager_range *r = pager.queue.first;
        if (r == NULL || crowded()) {
            pthread_cond_wait(&pager.changed, &pager.lock);
            continue;
        }
        zs_pager_take_off(&pager.queue, r);
        r->state = FETCHING;
        bool write = r->write;
        pthread_mutex_unlock(&pager.lock);
        int error = zs_pager_fetch(r->map, r->ptr, r->bytes, write);
        pthread_mutex_lock(&pager.lock);
        r->error = error;
        settle(r);
        pthread_cond_broadcast(&pager.changed);
    }
    return NULL;
}

/* The range whose pages are to be sent to the disk next. */
static zs_pager_range *dirty_one(void)
{
    for (zs_pager_range *r = pager.idle.first; r != NULL; r = r->later)
        if (r->dirty) return r;
    return NULL;
}

static void write_behind(zs_pager_range *r)
{
    r->dirty = false;
    const zs_pager_map *map = r->map;
    char *ptr = r->ptr;
    size_t bytes = r->bytes;
    r->state = LEAVING; /* nobody frees or wants it meanwhile */
    zs_pager_take_off(&pager.idle, r);
    pthread_mutex_unlock(&pager.lock);
    int err = zs_pager_write(map, ptr, bytes);
    pthread_mutex_lock(&pager.lock);
    if (err != 0) pager.write_errno = err;
    settle(r);
}

static void evict(zs_pager_range *r)
{
    zs_pager_take_off(&pager.idle, r);
    r->state = LEAVING;
    /* A unit is resharded, and then stepped piece by piece: its shard goes with the pieces. */
    bool keep_own = r->map->n_parts > 1 && zs_pager_overlaps_used(&pager.tables, r);
    pthread_mutex_unlock(&pager.lock);
    int err = zs_pager_drop(r->map, r->ptr, r->bytes, keep_own);
    pthread_mutex_lock(&pager.lock);
    if (err != 0) pager.write_errno = err;
    r->state = COLD;
    pager.resident -= r->bytes;
}

static void *write_thread(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pager.lock);
    for (;;) {
        zs_pager_range *r = dirty_one();
        if (r != NULL)
            write_behind(r);
        else if (crowded())
            evict(pager.idle.first);
        else {
            pthread_cond_wait(&pager.changed, &pager.lock);
            continue;
        }
        pthread_cond_broadcast(&pager.changed);
    }
    return NULL;
}

/* One that no signal of the process goes to. */
static zs_status start_thread(void *(*run)(void *))
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    errno = pthread_create(&thread, NULL, run, NULL);
    bool made = errno == 0;
    zs_status status = made ? ZS_OK : ZS_FAIL_ERRNO("offload: starting a thread");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (made) pthread_detach(thread);
    return status;
}

static zs_status start_threads(void)
{
    if (pager.running) return ZS_OK;
    ZS_TRY(start_thread(read_thread));
    ZS_TRY(start_thread(write_thread));
    pager.lifetime = zs_lifetime();
    pager.running = true;
    return ZS_OK;
}

/* --- mappings ---------------------------------------------------------------------------------------------------------- */

/* In a forked child the threads are gone, and the lock may be held for ever. */
static bool usable(void)
{
    return atomic_load_explicit(&n_maps_now, memory_order_relaxed) > 0 && pager.lifetime == zs_lifetime();
}

bool zs_pager_active(void)
{
    return usable();
}

zs_status zs_pager_add(const zs_pager_map *map)
{
    if (pager.running && pager.lifetime != zs_lifetime())
        return ZS_FAIL(ZS_ERR_STATE, "offload: a forked process cannot have memory on disk where its parent has");
    pthread_mutex_lock(&pager.lock);
    zs_status status = start_threads();
    if (status == ZS_OK) status = zs_pager_add_map(&pager.tables, map);
    atomic_store(&n_maps_now, (int)pager.tables.n_maps);
    pthread_mutex_unlock(&pager.lock);
    return status;
}

/* Waits until no thread is at work on the range, and takes it off all lists. */
static void quiesce(zs_pager_range *r)
{
    while (r->state == FETCHING || r->state == LEAVING)
        pthread_cond_wait(&pager.changed, &pager.lock);
    if (r->state == QUEUED) zs_pager_take_off(&pager.queue, r);
    if (r->state == IDLE) zs_pager_take_off(&pager.idle, r);
    if (r->state != COLD) pager.resident -= r->bytes;
    r->state = COLD;
}

void zs_pager_remove(const char *ptr)
{
    if (!usable()) return;
    pthread_mutex_lock(&pager.lock);
    zs_pager_map *map = zs_pager_find_map(&pager.tables, ptr);
    for (zs_pager_range *r; map != NULL && (r = zs_pager_any_of(&pager.tables, map)) != NULL;) {
        quiesce(r);
        zs_pager_drop_range(&pager.tables, r);
    }
    if (map != NULL) zs_pager_drop_map(&pager.tables, map);
    atomic_store(&n_maps_now, (int)pager.tables.n_maps);
    pthread_cond_broadcast(&pager.changed);
    pthread_mutex_unlock(&pager.lock);
}

void zs_pager_set_limit(size_t bytes)
{
    if (pager.running && pager.lifetime != zs_lifetime()) return;
    pthread_mutex_lock(&pager.lock);
    pager.limit = bytes;
    pthread_cond_broadcast(&pager.changed);
    pthread_mutex_unlock(&pager.lock);
}

/* --- the way of a step ------------------------------------------------------------------------------------------------------ */

/* Has what comes next fetched, as far as there is room: half of it, the other is for what is in use and on its way out. */
static void look_ahead(void)
{
    const zs_pager_range *before = pager.tables.last[1], *at = pager.tables.last[0];
    size_t bytes = 0;
    for (int i = 0; i < FURTHEST; i++) {
        zs_pager_range *next = zs_pager_next(before, at);
        if (next == NULL || next == pager.tables.last[0]) return;
        bytes += next->bytes;
        if (bytes > pager.limit / 2) return;
        if (next->state == COLD) enqueue(next, false);
        if (next->state == IDLE) { /* it will be wanted soon: others may go first */
            zs_pager_take_off(&pager.idle, next);
            zs_pager_append(&pager.idle, next);
        }
        before = at;
        at = next;
    }
}

/* An IDLE range has a user again. */
static void take_idle(zs_pager_range *r)
{
    zs_pager_take_off(&pager.idle, r);
    r->state = READY;
}

static zs_status check(zs_pager_range *r)
{
    errno = pager.write_errno;
    if (errno != 0)
        return ZS_FAIL_ERRNO("offload: what was written to the disk is lost; go on from a checkpoint. Writing");
    errno = r->error;
    r->error = 0; /* the next one tries again */
    return errno != 0 ? ZS_FAIL_ERRNO("offload: reading what was put on the disk") : ZS_OK;
}

/* Waits until the range is READY for its new user. */
static void bring_in(zs_pager_range *r)
{
    if (r->state == IDLE) take_idle(r);
    if (r->state == COLD) enqueue(r, true);
    if (r->state == QUEUED) { /* ahead of what is fetched for later */
        zs_pager_take_off(&pager.queue, r);
        zs_pager_prepend(&pager.queue, r);
    }
    look_ahead();
    pthread_cond_broadcast(&pager.changed);
    while (r->state != READY) {
        if (r->state == COLD) enqueue(r, true); /* it was on its way out */
        pthread_cond_broadcast(&pager.changed);
        pthread_cond_wait(&pager.changed, &pager.lock);
    }
}

zs_status zs_pager_want(const void *ptr, size_t bytes, zs_pager_use use)
{
    if (!usable()) return ZS_OK;
    pthread_mutex_lock(&pager.lock);
    zs_pager_range *r = zs_pager_range_of(&pager.tables, ptr, bytes);
    zs_status status = ZS_OK;
    if (r != NULL) {
        r->users++;
        r->write = use == ZS_PAGER_WRITE;
        pager.wanted++;
        if (r->state != COLD && r->state != LEAVING) pager.ahead++;
        zs_pager_learn(&pager.tables, r);
        bring_in(r);
        status = check(r);
    }
    pthread_mutex_unlock(&pager.lock);
    if (status != ZS_OK) zs_pager_done(ptr, bytes);
    return status;
}

void zs_pager_done(const void *ptr, size_t bytes)
{
    if (!usable()) return;
    pthread_mutex_lock(&pager.lock);
    zs_pager_range *r = zs_pager_range_of(&pager.tables, ptr, bytes);
    if (r != NULL && r->users > 0) r->users--;
    if (r != NULL && r->users == 0 && (r->state == READY || r->state == COLD)) {
        if (r->state == COLD) count_resident(r->bytes);
        r->dirty = r->write || r->state == COLD;
        r->state = IDLE;
        zs_pager_append(&pager.idle, r);
        pthread_cond_broadcast(&pager.changed);
    }
    pthread_mutex_unlock(&pager.lock);
}

void zs_pager_zero(const void *ptr, size_t bytes)
{
    if (!usable()) return;
    pthread_mutex_lock(&pager.lock);
    zs_pager_range *r = zs_pager_range_of(&pager.tables, ptr, bytes);
    if (r != NULL && r->users == 0) {
        quiesce(r);
        zs_pager_clear(r->map, r->ptr, r->bytes);
    }
    pthread_mutex_unlock(&pager.lock);
}

zs_pager_counts zs_pager_count(void)
{
    if (!pager.running || pager.lifetime != zs_lifetime()) return (zs_pager_counts){0};
    pthread_mutex_lock(&pager.lock);
    zs_pager_counts counts = {pager.wanted, pager.ahead, pager.resident, pager.most};
    pthread_mutex_unlock(&pager.lock);
    return counts;
}
