/* pager.c - see pager.h. Decides when to move pages; pager_io.c and pager_direct.c move them, on the threads of
 * pager_threads.c. */
#include "pager/pager.h"

#include "base/file.h"
#include "pager/pager_direct.h"
#include "pager/pager_io.h"
#include "pager/pager_threads.h"

#include <errno.h>
#include <stdatomic.h>

enum { FURTHEST = 64 }; /* ranges that are fetched ahead, at most */

static _Atomic int n_maps_now; /* read by zs_pager_active */

static _Thread_local bool nested; /* zs_pager_nest */

/* --- mappings ----------------------------------------------------------------------------------------------------- */

/* A forked child has no threads, and the lock may stay locked. */
static bool usable(void)
{
    return atomic_load_explicit(&n_maps_now, memory_order_relaxed) > 0 && zs_pager.lifetime == zs_lifetime();
}

bool zs_pager_active(void)
{
    return usable();
}

/* Or is there nothing yet that could be a parent's? */
static bool ours(void)
{
    return !zs_pager.running || zs_pager.lifetime == zs_lifetime();
}

static size_t bytes_of(const zs_pager_map *map)
{
    return map->part_bytes * (size_t)map->n_parts;
}

zs_status zs_pager_add(const zs_pager_map *map)
{
    if (!ours())
        return ZS_FAIL(ZS_ERR_STATE, "offload: a process forked from one that offloads to disk cannot offload to disk "
                                     "itself; start it with 'spawn'");
    pthread_mutex_lock(&zs_pager.lock);
    zs_status status = zs_pager_start_threads();
    ZS_THEN(status, zs_pager_add_map(&zs_pager.tables, map));
    if (status == ZS_OK) zs_pager.mapped += bytes_of(map);
    atomic_store(&n_maps_now, (int)zs_pager.tables.n_maps);
    pthread_mutex_unlock(&zs_pager.lock);
    return status;
}

/* Waits until no thread is at work on the range, and takes it off all lists. */
static void quiesce(zs_pager_range *r)
{
    while (r->state == FETCHING || r->state == LEAVING)
        pthread_cond_wait(&zs_pager.changed, &zs_pager.lock);
    if (r->state == QUEUED) zs_pager_take_off(&zs_pager.queue, r);
    if (r->state == IDLE) zs_pager_take_off(&zs_pager.idle, r);
    if (r->lent && r->users > 0) zs_pager.n_at_work--;
    zs_pager_make_cold(r);
}

void zs_pager_remove(const char *ptr)
{
    if (!usable()) return;
    pthread_mutex_lock(&zs_pager.lock);
    zs_pager_map *map = zs_pager_find_map(&zs_pager.tables, ptr);
    for (zs_pager_range *r; map != NULL && (r = zs_pager_any_of(&zs_pager.tables, map)) != NULL;) {
        quiesce(r);
        zs_pager_drop_range(&zs_pager.tables, r);
    }
    if (map != NULL) {
        zs_pager.mapped -= bytes_of(map);
        zs_pager_drop_map(&zs_pager.tables, map);
    }
    if (zs_pager.tables.n_maps == 0) zs_pager.write_errno = 0; /* lost data has no user any more */
    atomic_store(&n_maps_now, (int)zs_pager.tables.n_maps);
    pthread_cond_broadcast(&zs_pager.changed);
    pthread_mutex_unlock(&zs_pager.lock);
}

void zs_pager_set_limit(size_t bytes)
{
    if (!ours()) return;
    pthread_mutex_lock(&zs_pager.lock);
    zs_pager.limit = bytes;
    pthread_cond_broadcast(&zs_pager.changed);
    pthread_mutex_unlock(&zs_pager.lock);
}

/* --- the way of a step -------------------------------------------------------------------------------------------- */

/* Queues fetches of the next ranges within half of the room; the other half is for ranges in use and on their way
 * out. */
static void look_ahead(void)
{
    const zs_pager_range *before = zs_pager.tables.last[1], *at = zs_pager.tables.last[0];
    size_t bytes = 0;
    for (int i = 0; i < FURTHEST; i++) {
        zs_pager_range *next = zs_pager_next(before, at);
        if (next == NULL || next == zs_pager.tables.last[0]) return;
        if (next->lent && zs_pager.windows == 0) return; /* it may change before it is lent */
        bytes += next->bytes;
        if (bytes > zs_pager.limit / 2) return;
        if (next->state == COLD) zs_pager_enqueue(next, false);
        if (next->state == IDLE) { /* it will be wanted soon: others may go first */
            zs_pager_take_off(&zs_pager.idle, next);
            zs_pager_append(&zs_pager.idle, next);
        }
        before = at;
        at = next;
    }
}

/* Writes and forgets all lent ranges that are not in use. */
static void finish_lent(void)
{
    for (zs_pager_range *r = zs_pager.queue.first, *next; r != NULL; r = next) {
        next = r->later;
        if (!r->lent || r->users > 0) continue;
        zs_pager_take_off(&zs_pager.queue, r);
        zs_pager_make_cold(r);
    }
    while (zs_pager.n_lent > zs_pager.n_at_work) {
        for (zs_pager_range *r = zs_pager.idle.first, *next; r != NULL; r = next) {
            next = r->later;
            if (!r->lent || r->dirty) continue;
            zs_pager_take_off(&zs_pager.idle, r);
            zs_pager_make_cold(r);
        }
        pthread_cond_broadcast(&zs_pager.changed);
        if (zs_pager.n_lent > zs_pager.n_at_work) pthread_cond_wait(&zs_pager.changed, &zs_pager.lock);
    }
    pthread_cond_broadcast(&zs_pager.changed);
}

/* An IDLE range has a user again. */
static void take_idle(zs_pager_range *r)
{
    zs_pager_take_off(&zs_pager.idle, r);
    r->state = READY;
}

static const char LOST[] = "offload: writing back to disk failed and the data is lost; restart from a checkpoint";

static zs_status check(zs_pager_range *r)
{
    errno = zs_pager.write_errno;
    if (errno != 0) return ZS_FAIL_ERRNO(LOST);
    errno = r->error;
    return errno != 0 ? ZS_FAIL_ERRNO("offload: cannot read back from disk") : ZS_OK;
}

/* Waits until the range is READY for its new user. */
static void bring_in(zs_pager_range *r)
{
    if (r->state == IDLE) take_idle(r);
    if (r->state == COLD) zs_pager_enqueue(r, true);
    if (r->state == QUEUED) { /* ahead of fetches for later */
        zs_pager_take_off(&zs_pager.queue, r);
        zs_pager_prepend(&zs_pager.queue, r);
    }
    look_ahead();
    pthread_cond_broadcast(&zs_pager.changed);
    while (r->state != READY) {
        if (r->state == COLD) zs_pager_enqueue(r, true); /* it was on its way out */
        pthread_cond_broadcast(&zs_pager.changed);
        pthread_cond_wait(&zs_pager.changed, &zs_pager.lock);
    }
}

/* Waits until lent buffers that overlap have reached the mapping. For a writer, also waits for writes of the file in
 * progress (zs_pager_send), and drops buffers that were read ahead. */
static void come_before_lent(const zs_pager_range *r)
{
    while (zs_pager.n_unsent > 0 && (r->write || zs_pager_overlaps_lent(&zs_pager.tables, r, false)))
        pthread_cond_wait(&zs_pager.changed, &zs_pager.lock);
    if (r->write && zs_pager.n_lent > zs_pager.n_at_work && zs_pager_overlaps_lent(&zs_pager.tables, r, true))
        finish_lent();
}

/* One more user of a range, which waits until it is there. */
static zs_status use_range(zs_pager_range *r, bool write)
{
    r->write = write || (r->users > 0 && r->write); /* a reader that joins a writer: the range is still written to */
    if (!r->lent) come_before_lent(r);
    while (r->lent && r->dirty && r->users == 0) /* from an earlier step */
        pthread_cond_wait(&zs_pager.changed, &zs_pager.lock);
    if (r->users++ == 0 && r->lent) zs_pager.n_at_work++;
    zs_pager_learn(&zs_pager.tables, r);
    bring_in(r);
    return check(r);
}

/* One user less. */
static void leave_range(zs_pager_range *r, bool changed)
{
    if (r->users > 0 && --r->users == 0 && r->lent) zs_pager.n_at_work--;
    if (r->users > 0 || (r->state != READY && r->state != COLD)) return;
    if (r->error != 0 || (r->lent && !changed)) {
        zs_pager_make_cold(r); /* where it could not be read, the next one tries again */
    } else {
        if (r->state == COLD) zs_pager.resident += r->bytes;
        if (r->lent) zs_pager.n_unsent++;
        r->dirty = changed;
        r->state = IDLE;
        zs_pager_append(&zs_pager.idle, r);
    }
    pthread_cond_broadcast(&zs_pager.changed);
}

zs_status zs_pager_want(const void *ptr, size_t bytes, zs_pager_use use)
{
    if (!usable()) return ZS_OK;
    pthread_mutex_lock(&zs_pager.lock);
    zs_pager_range *r = zs_pager_range_of(&zs_pager.tables, ptr, bytes, false);
    zs_status status = r != NULL ? use_range(r, use == ZS_PAGER_WRITE) : ZS_OK;
    if (status != ZS_OK) leave_range(r, r->write);
    pthread_mutex_unlock(&zs_pager.lock);
    return status;
}

void zs_pager_done(const void *ptr, size_t bytes)
{
    if (!usable()) return;
    pthread_mutex_lock(&zs_pager.lock);
    zs_pager_range *r = zs_pager_range_of(&zs_pager.tables, ptr, bytes, false);
    if (r != NULL) leave_range(r, r->write || r->state == COLD);
    pthread_mutex_unlock(&zs_pager.lock);
}

void zs_pager_zero(const void *ptr, size_t bytes)
{
    if (!usable()) return;
    pthread_mutex_lock(&zs_pager.lock);
    zs_pager_range *r = zs_pager_range_of(&zs_pager.tables, ptr, bytes, false);
    if (r != NULL && r->users == 0) {
        quiesce(r);
        zs_pager_clear(r->map, r->ptr, r->bytes);
    }
    pthread_mutex_unlock(&zs_pager.lock);
}

/* --- lending ------------------------------------------------------------------------------------------------------ */

/* The range to be lent; NULL: none. Nothing is lent if all memory on disk may stay resident, which saves more. */
static zs_pager_range *to_lend(const void *ptr, size_t bytes)
{
    if (zs_pager.windows == 0 || zs_pager.mapped <= zs_pager.limit) return NULL;
    return zs_pager_range_of(&zs_pager.tables, ptr, bytes, true);
}

zs_status zs_pager_lend(void *ptr, size_t bytes, void **at)
{
    *at = ptr;
    if (!usable()) return ZS_OK;
    pthread_mutex_lock(&zs_pager.lock);
    zs_pager_range *r = to_lend(ptr, bytes);
    zs_status status = r != NULL ? use_range(r, true) : ZS_OK;
    bool lent = r != NULL && status == ZS_OK && r->buffer != NULL;
    if (lent)
        *at = zs_pager_in_buffer(r->buffer, ptr);
    else if (r != NULL)
        leave_range(r, false);
    pthread_mutex_unlock(&zs_pager.lock);
    return lent || status != ZS_OK ? status : zs_pager_want(ptr, bytes, ZS_PAGER_WRITE);
}

void zs_pager_give_back(void *ptr, size_t bytes, bool changed)
{
    if (!usable()) return;
    pthread_mutex_lock(&zs_pager.lock);
    zs_pager_range *r = zs_pager_range_of(&zs_pager.tables, ptr, bytes, true);
    bool lent = r != NULL && r->users > 0;
    if (lent) leave_range(r, changed);
    pthread_mutex_unlock(&zs_pager.lock);
    if (!lent) zs_pager_done(ptr, bytes);
}

void zs_pager_nest(bool on)
{
    nested = on;
}

void zs_pager_open(void)
{
    if (nested || !ours()) return;
    pthread_mutex_lock(&zs_pager.lock);
    finish_lent(); /* what another step has had fetched ahead may be old by now */
    zs_pager.windows++;
    pthread_mutex_unlock(&zs_pager.lock);
}

zs_status zs_pager_close(void)
{
    if (nested || !ours()) return ZS_OK;
    pthread_mutex_lock(&zs_pager.lock);
    zs_pager.windows--;
    finish_lent();
    errno = zs_pager.write_errno;
    zs_status status = errno != 0 ? ZS_FAIL_ERRNO(LOST) : ZS_OK;
    if (zs_pager.windows == 0) zs_pager_buffers_free();
    pthread_mutex_unlock(&zs_pager.lock);
    return status;
}
