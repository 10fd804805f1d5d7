/* pager_threads.c - see pager_threads.h. */
#define _GNU_SOURCE /* sigset_t */
#include "pager/pager_threads.h"

#include "base/file.h"
#include "pager/pager_direct.h"
#include "pager/pager_io.h"

#include <errno.h>
#include <signal.h>

enum { USUAL = 256 << 20 }; /* bytes that may be resident */

zs_pager_state zs_pager = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .limit = USUAL};

/* --- from one state to the next ----------------------------------------------------------------------------------- */

void zs_pager_enqueue(zs_pager_range *r, bool urgent)
{
    r->state = QUEUED;
    zs_pager.resident += r->bytes;
    if (r->lent) zs_pager.n_lent++;
    if (urgent)
        zs_pager_prepend(&zs_pager.queue, r);
    else
        zs_pager_append(&zs_pager.queue, r);
}

static void settle(zs_pager_range *r)
{
    r->state = r->users > 0 ? READY : IDLE;
    if (r->state == IDLE) zs_pager_append(&zs_pager.idle, r);
}

void zs_pager_make_cold(zs_pager_range *r)
{
    if (r->state != COLD) zs_pager.resident -= r->bytes;
    if (r->lent && r->state != COLD) zs_pager.n_lent--;
    if (r->lent && r->dirty) zs_pager.n_unsent--;
    zs_pager_buffer_give(r->buffer, r->ptr, r->bytes);
    r->buffer = NULL;
    r->error = 0;
    r->dirty = false;
    r->state = COLD;
}

/* --- the two threads ---------------------------------------------------------------------------------------------- */

/* Is there too much here, and something that may go? */
static bool crowded(void)
{
    return zs_pager.resident > zs_pager.limit && zs_pager.idle.first != NULL;
}

/* Reads the bytes of a range; no lock is held. The errno, or 0. */
static int fetch(zs_pager_range *r, bool write)
{
    if (!r->lent) return zs_pager_fetch(r->map, r->ptr, r->bytes, write);
    r->buffer = zs_pager_buffer_take(r->ptr, r->bytes);
    return r->buffer == NULL ? 0 : zs_pager_fill(r->map, r->ptr, r->bytes, r->buffer);
}

static void *read_thread(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&zs_pager.lock);
    for (;;) {
        zs_pager_range *r = zs_pager.queue.first;
        if (r == NULL || crowded()) {
            pthread_cond_wait(&zs_pager.changed, &zs_pager.lock);
            continue;
        }
        zs_pager_take_off(&zs_pager.queue, r);
        r->state = FETCHING;
        bool write = r->write;
        pthread_mutex_unlock(&zs_pager.lock);
        int error = fetch(r, write);
        pthread_mutex_lock(&zs_pager.lock);
        r->error = error;
        settle(r);
        pthread_cond_broadcast(&zs_pager.changed);
    }
    return NULL;
}

/* The next range to write to the disk. */
static zs_pager_range *dirty_one(void)
{
    for (zs_pager_range *r = zs_pager.idle.first; r != NULL; r = r->later)
        if (r->dirty) return r;
    return NULL;
}

static void write_behind(zs_pager_range *r)
{
    r->state = LEAVING; /* not freed or fetched meanwhile */
    zs_pager_take_off(&zs_pager.idle, r);
    if (!r->lent) r->dirty = false;
    pthread_mutex_unlock(&zs_pager.lock);
    int err = r->lent ? zs_pager_send(r->map, r->ptr, r->bytes, r->buffer) : zs_pager_write(r->map, r->ptr, r->bytes);
    pthread_mutex_lock(&zs_pager.lock);
    if (err != 0) zs_pager.write_errno = err;
    if (r->lent)
        zs_pager_make_cold(r); /* a step uses it once */
    else
        settle(r);
}

/* A unit is resharded, and then stepped piece by piece: its shard goes with the pieces. */
static bool steps_come(const zs_pager_range *r)
{
    if (r->map->n_parts > 1 && zs_pager_overlaps_used(&zs_pager.tables, r)) return true;
    return zs_pager.windows > 0 && zs_pager_is_lent_at_times(&zs_pager.tables, r);
}

static void evict(zs_pager_range *r)
{
    zs_pager_take_off(&zs_pager.idle, r);
    r->state = LEAVING;
    if (!r->lent) {
        bool keep_own = steps_come(r);
        pthread_mutex_unlock(&zs_pager.lock);
        int err = zs_pager_drop(r->map, r->ptr, r->bytes, keep_own);
        pthread_mutex_lock(&zs_pager.lock);
        if (err != 0) zs_pager.write_errno = err;
    }
    zs_pager_make_cold(r);
}

static void *write_thread(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&zs_pager.lock);
    for (;;) {
        zs_pager_range *r = dirty_one();
        if (crowded() && !zs_pager.idle.first->dirty)
            evict(zs_pager.idle.first);
        else if (r != NULL)
            write_behind(r);
        else {
            pthread_cond_wait(&zs_pager.changed, &zs_pager.lock);
            continue;
        }
        pthread_cond_broadcast(&zs_pager.changed);
    }
    return NULL;
}

/* Starts a thread that gets no signals of the process. */
static zs_status start_thread(void *(*run)(void *))
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    errno = pthread_create(&thread, NULL, run, NULL);
    bool made = errno == 0;
    zs_status status = made ? ZS_OK : ZS_FAIL_ERRNO("offload: cannot start an I/O thread");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (made) pthread_detach(thread);
    return status;
}

zs_status zs_pager_start_threads(void)
{
    if (zs_pager.running) return ZS_OK;
    ZS_TRY(start_thread(read_thread));
    ZS_TRY(start_thread(write_thread));
    zs_pager.lifetime = zs_lifetime();
    zs_pager.running = true;
    return ZS_OK;
}
