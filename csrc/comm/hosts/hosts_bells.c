/* hosts_bells.c - telling the ranks of one host that a part of a gather has come. See hosts.h.
 *
 * The one idea: the thread of torch's that ends a rank's last collective of a gather writes the gather's number where the host's
 * other ranks look. So a rank need not come to the end of a gather itself for others to use what it has brought.
 */
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
    RING = 256, /* more gathers than are ever under way: each has a slot of its own */
    WHY = 1024,
};

/* A rank's page: its owner alone writes it. */
typedef struct bell {
    _Atomic uint32_t rung; /* raised with each change */
    _Atomic uint32_t off;  /* nothing comes any more; set after `why` */
    _Atomic uint64_t arrived[RING];
    char why[WHY];
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

zs_status zs_hosts_bells_new(zs_hosts_comm *self)
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

/* --- waiting -------------------------------------------------------------------------------------------------------------- */

typedef struct awaited {
    zs_hosts_comm *self;
    uint64_t gather;
    bell *off; /* a rank's that will bring nothing; NULL: none was found */
} awaited;

/* The bell of a rank whose part has not come; NULL: all have. */
static bell *find_missing(awaited *it)
{
    for (int lane = 0; lane < zs_hosts_per_host(it->self); lane++) {
        bell *each = bell_of(it->self, lane);
        if (atomic_load(&each->arrived[it->gather % RING]) >= it->gather) continue;
        if (atomic_load(&each->off) != 0) it->off = each;
        return each;
    }
    return NULL;
}

static bool look(void *arg, double seconds)
{
    awaited *it = arg;
    bell *missing = find_missing(it);
    if (missing == NULL || it->off != NULL) return true;
    uint32_t seen = atomic_load(&missing->rung);
    if (find_missing(it) == missing && it->off == NULL) {
        struct timespec t = {.tv_nsec = (long)(seconds * 1e9)};
        syscall(SYS_futex, &missing->rung, FUTEX_WAIT, seen, &t, NULL, 0); /* every outcome means: look again */
    }
    return find_missing(it) == NULL || it->off != NULL;
}

zs_status zs_hosts_await(zs_hosts_comm *self, const zs_c10d_turn *turn, uint64_t gather)
{
    awaited it = {self, gather, NULL};
    ZS_TRY(zs_c10d_watch(&self->c10d, turn, look, &it));
    if (it.off == NULL) return ZS_OK;
    return zs_c10d_fail(&self->c10d, turn, ZS_FAIL(ZS_ERR_PEER, "%.*s", (int)WHY, it.off->why));
}
