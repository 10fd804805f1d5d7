/* shm_wake.c - sleeps until a wait can end, without needless wake-ups.
 *
 * At any time it is one rank's turn to wake a sleeper: a rank that the sleeper still misses. When that rank has done
 * its part, it checks which other rank is missing, and passes the turn on to it; if none is, it wakes the sleeper. So a
 * wait that sleeps costs two futex calls, one to sleep and one to wake, for any number of ranks.
 *
 * No wake-up is lost. A rank that gives a turn (the sleeper, or one that passes it on) stores it in the sleeper's
 * `asleep` and then checks whether the chosen rank is still missing. A rank that changes something stores that and then
 * reads `asleep`. All sequentially consistent: either it sees that it is its turn, or the giver sees the change, and
 * continues with the next rank. A turn is passed on by compare-and-swap; a rank that fails has been overtaken by
 * another giver, which checks after its own store.
 *
 * `asleep` contains the number of the wait. So a turn that is passed on late, when the sleeper is in another wait,
 * changes nothing, and a state of the wait (zs_shm_state_of) read before a successful exchange belongs to that very
 * wait. */
#define _GNU_SOURCE 1 /* syscall */
#include "comm/shm/shm.h"

#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { TURN_BITS = 16, TURN_MASK = (1 << TURN_BITS) - 1 };

static uint64_t with_turn(uint64_t asleep, int rank)
{
    return (asleep & ~(uint64_t)TURN_MASK) | ((uint64_t)rank + 1);
}

static bool has_turn(uint64_t asleep, int rank)
{
    return (asleep & TURN_MASK) == (uint64_t)rank + 1;
}

static void wake(zs_shm_control *peer)
{
    atomic_fetch_add(&peer->wake, 1);
    syscall(SYS_futex, &peer->wake, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* This rank has changed something, and peer `r` sleeps: if it is this rank's turn, wakes it or passes the turn on. */
static void take_turn(zs_shm *shm, int r)
{
    zs_shm_control *peer = shm->peers[r].control;
    int turn = shm->base.rank;
    for (uint64_t asleep = atomic_load(&peer->asleep); has_turn(asleep, turn);) {
        int missing = zs_shm_missing_from(shm, r, zs_shm_state_of(shm, r).act, turn);
        if (missing == turn) return; /* not yet: its next change continues */
        uint64_t next = missing < 0 ? 0 : with_turn(asleep, missing);
        if (!atomic_compare_exchange_strong(&peer->asleep, &asleep, next)) return;
        if (missing < 0) {
            wake(peer); /* once: it is no longer asleep */
            return;
        }
        turn = missing;
        asleep = next;
    }
}

void zs_shm_set(zs_shm *shm, _Atomic uint64_t *word, uint64_t value)
{
    atomic_store(word, value);
    for (int r = 0; r < shm->base.world; r++)
        if (r != shm->base.rank && has_turn(atomic_load(&shm->peers[r].control->asleep), shm->base.rank))
            take_turn(shm, r);
}

void zs_shm_wake_all(zs_shm *shm)
{
    for (int r = 0; r < shm->base.world; r++)
        if (r != shm->base.rank && atomic_load(&shm->peers[r].control->asleep) != 0) wake(shm->peers[r].control);
}

void zs_shm_stop(zs_shm *shm, zs_status status, const char *reason)
{
    zs_shm_control *own = shm->own;
    if (atomic_load(&own->stopped) != 0) return;
    snprintf(own->stop_text, sizeof own->stop_text, "%s", reason);
    atomic_store(&own->stopped, (uint32_t)status);
    zs_shm_wake_all(shm);
}

bool zs_shm_prepare_sleep(zs_shm *shm, zs_shm_act act, uint32_t *seen)
{
    zs_shm_control *own = shm->own;
    int rank = shm->base.rank, missing = zs_shm_missing_from(shm, rank, act, rank);
    *seen = atomic_load(&own->wake); /* before any rank has the turn */
    while (missing >= 0) {
        atomic_store(&own->asleep, with_turn(atomic_load(&own->wait_id) << TURN_BITS, missing));
        int now = zs_shm_missing_from(shm, rank, act, missing);
        if (now == missing) return true;
        missing = now;
    }
    return false;
}

void zs_shm_sleep(zs_shm *shm, uint32_t seen, double seconds)
{
    struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    syscall(SYS_futex, &shm->own->wake, FUTEX_WAIT, seen, &t, NULL, 0); /* after any result, check again */
}

void zs_shm_get_up(zs_shm *shm)
{
    atomic_store(&shm->own->asleep, 0);
}
