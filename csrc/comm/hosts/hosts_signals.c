/* hosts_signals.c - signals between the ranks of one host: turns and arrivals. See hosts.h.
 *
 * Each rank has a page that the host's other ranks read, with one counter that they sleep on. Threads write there as
 * well: the one that receives the last part of a gather writes the gather's number. So others can use a rank's received
 * bytes before that rank finishes the gather. */
#define _GNU_SOURCE 1 /* syscall */
#include "comm/hosts/hosts.h"

#include "base/file.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    RING = 256, /* more gathers than are ever in flight: each has its own slot */
    WHY = 768,
};

/* A rank's page: only its owner writes it. */
typedef struct bell {
    _Atomic uint32_t rung;   /* raised with each change */
    _Atomic uint32_t off;    /* the rank sends no more; `why` is set first */
    _Atomic uint32_t closed; /* it receives no more turns of other hosts; `why_closed` is set first */
    _Atomic uint64_t sent, received;
    _Atomic uint64_t arrived[RING];
    char why[WHY], why_closed[WHY];
} bell;

_Static_assert(sizeof(bell) <= ZS_PAGE, "a bell fits on a page");

struct zs_hosts_arrival {
    zs_mem *bells; /* counted reference */
    bell *own;
    uint64_t gather;
    _Atomic int left;
    _Atomic bool failed;
};

static bell *bell_of(const zs_hosts_comm *self, int lane)
{
    return (bell *)(void *)(self->bells.full + (size_t)lane * ZS_PAGE);
}

zs_status zs_hosts_signals_new(zs_hosts_comm *self)
{
    return zs_comm_flat_new(self->local, ZS_PAGE, &self->bells);
}

static void ring(bell *own)
{
    atomic_fetch_add(&own->rung, 1);
    syscall(SYS_futex, &own->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

zs_status zs_hosts_arrival_new(zs_hosts_comm *self, uint64_t gather, int n, zs_hosts_arrival **out)
{
    zs_hosts_arrival *made = malloc(sizeof *made);
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory all-gathering parameters");
    made->bells = zs_mem_retain(self->bells.mem);
    made->own = bell_of(self, self->lane);
    made->gather = gather;
    atomic_init(&made->left, n);
    atomic_init(&made->failed, false);
    *out = made;
    return ZS_OK;
}

void zs_hosts_arrived(void *arrival, bool good)
{
    zs_hosts_arrival *it = arrival;
    if (!good) atomic_store(&it->failed, true);
    if (atomic_fetch_sub(&it->left, 1) > 1) return;
    if (!atomic_load(&it->failed)) {
        atomic_store(&it->own->arrived[it->gather % RING], it->gather);
        ring(it->own);
    }
    zs_mem_release(it->bells);
    free(it);
}

void zs_hosts_break_off(zs_hosts_comm *self, const char *why)
{
    zs_comm_abort(self->local, why);
    if (self->bells.mem == NULL) return;
    bell *own = bell_of(self, self->lane);
    if (atomic_load(&own->off) != 0) return;
    snprintf(own->why, sizeof own->why, "%s", why);
    atomic_store(&own->off, 1);
    ring(own);
}

void zs_hosts_mark(zs_hosts_comm *self, zs_hosts_event event, uint64_t number)
{
    bell *own = bell_of(self, self->lane);
    atomic_store(event == ZS_HOSTS_SENT ? &own->sent : &own->received, number);
    ring(own);
}

void zs_hosts_mark_failed(zs_hosts_comm *self, const char *why)
{
    bell *own = bell_of(self, self->lane);
    snprintf(own->why_closed, sizeof own->why_closed, "%s", why);
    atomic_store(&own->closed, 1);
    ring(own);
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

static bool has(const zs_hosts_awaited *it, const bell *each)
{
    if (it->event == ZS_HOSTS_SENT) return atomic_load(&each->sent) >= it->number;
    if (it->event == ZS_HOSTS_RECEIVED) return atomic_load(&each->received) >= it->number;
    return atomic_load(&each->arrived[it->number % RING]) >= it->number;
}

/* The bell of a rank that is missing; NULL: none is. */
static bell *find_missing(zs_hosts_awaited *it)
{
    for (int lane = 0; lane < zs_hosts_per_host(it->self); lane++) {
        bell *each = bell_of(it->self, lane);
        if (has(it, each)) continue;
        if (atomic_load(&each->off) != 0)
            it->why = each->why;
        else if (it->event == ZS_HOSTS_RECEIVED && atomic_load(&each->closed) != 0)
            it->why = each->why_closed;
        return each;
    }
    return NULL;
}

bool zs_hosts_poll(zs_hosts_awaited *it, double seconds)
{
    bell *missing = find_missing(it);
    if (missing == NULL || it->why != NULL) return true;
    uint32_t seen = atomic_load(&missing->rung);
    if (seconds > 0 && find_missing(it) == missing && it->why == NULL) {
        struct timespec t = {.tv_nsec = (long)(seconds * 1e9)};
        syscall(SYS_futex, &missing->rung, FUTEX_WAIT, seen, &t, NULL, 0); /* after any result, check again */
    }
    return find_missing(it) == NULL || it->why != NULL;
}

static bool look_again(void *arg, double seconds)
{
    return zs_hosts_poll(arg, seconds);
}

zs_status zs_hosts_await(zs_hosts_comm *self, const zs_turn *turn, uint64_t gather)
{
    zs_hosts_awaited it = {self, ZS_HOSTS_ARRIVED, gather, NULL};
    zs_c10d_arrival until = {look_again, &it, "another rank of this host has not finished its part", true};
    ZS_TRY(zs_c10d_watch(&self->c10d, turn, &until));
    if (it.why == NULL) return ZS_OK;
    return zs_c10d_fail(&self->c10d, turn, ZS_FAIL(ZS_ERR_PEER, "%s", it.why));
}

/* --- failures ----------------------------------------------------------------------------------------------------- */

/* If one rank of a host is unusable, the others need not wait for their deadline. */
zs_status zs_hosts_pass(zs_hosts_comm *self, zs_status status)
{
    const char *lost = self->c10d.base.lost;
    if (status != ZS_OK && lost != NULL) zs_hosts_break_off(self, lost);
    return status;
}
