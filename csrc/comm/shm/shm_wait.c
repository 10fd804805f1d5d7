/* shm_wait.c - waits for peers.
 *
 * A wait is data (zs_shm_act), published while it lasts. So "what is still missing?" is one function of shared memory.
 * A rank evaluates it for itself, and for all others when it suspects that all wait for each other; messages use it to
 * report a late peer's act.
 *
 * Proof of a circle: while a rank waits, none of its words changes. If all ranks are found in a wait, then each with a
 * missing rank, and after that all in the very same wait (wait_id), then no rank moved while the missing ones were
 * determined: the answers are of one moment, and no rank can ever continue. (Checking a rank before the next one is
 * known to wait would prove nothing: the next one may just be ending that wait.) */
#include "comm/shm/shm.h"

#include "base/clock.h"
#include "base/profile.h"
#include "comm/shm/shm_place.h"
#include "comm/where.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const double slice = 0.1;         /* longest sleep, seconds: dead peers are noticed after it */
static const double check_every = 0.05;  /* between two checks for dead peers */
static const double circle_after = 0.5;  /* a circle is rare and its proof costs W^2 reads */
static const double yield_slice = 0.002; /* of a wait that yields: all ranks are blocked until it does */
static const double grace = 1.0;         /* for others to finish when a rank died that was not missed */
static const double place_after = 0.25;  /* then this rank publishes its script's call */
static const double ask_before = 1.5;    /* the user is warned, the peers are asked where they are */

/* One wait that sleeps. */
typedef struct sleep_state {
    double start, checked; /* seconds on the monotonic clock */
    double died;           /* when a peer was seen dead that is not missed, 0: none */
    bool asked;            /* the peers, for that report */
    bool reported;         /* a stall was reported */
    bool placed;
    bool yielded;
} sleep_state;

static inline void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* --- trouble ------------------------------------------------------------------------------------------------------ */

static bool all_left_have_died(const zs_shm *shm)
{
    for (int r = 0; r < shm->base.world; r++)
        if (r != shm->base.rank && atomic_load(&shm->peers[r].control->left) != 0 && !shm->peers[r].dead) return false;
    return true;
}

void zs_shm_outlive(zs_comm *comm, double seconds)
{
    zs_shm *shm = (zs_shm *)comm;
    for (double end = zs_clock() + seconds; zs_shm_live(shm) && zs_clock() < end;) {
        zs_shm_look_at_lives(shm);
        if (all_left_have_died(shm)) return;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
}

/* Fails if the wait can no longer succeed because a peer has exited. */
static zs_status check_lives(zs_shm *shm, zs_shm_act act, sleep_state *state, double time)
{
    zs_shm_look_at_lives(shm);
    int missing =
        zs_shm_missing(shm, shm->base.rank, act); /* after the check: a peer may have served us, then exited */
    if (missing < 0) return ZS_OK;
    for (int r = 0; r < shm->base.world; r++) {
        if (r == shm->base.rank) continue;
        bool left = atomic_load(&shm->peers[r].control->left) != 0;
        bool needed = zs_shm_is_missing(shm, r, act);
        if (!left && !shm->peers[r].dead) continue;
        ZS_TRY(zs_shm_check_stop(shm)); /* it may have published why since the check */
        if (left && needed) return zs_shm_fail_left(shm, act, r);
        if (left) continue;
        if (needed) return zs_shm_fail_dead(shm, act, r, r);
        if (state->died == 0) state->died = time;
        if (time - state->died > grace) return zs_shm_fail_dead(shm, act, r, missing);
    }
    return ZS_OK;
}

typedef enum circle { NO_CIRCLE, CIRCLE, CIRCLE_THAT_YIELDS } circle;

/* Do all ranks wait for each other, and if so, does one of them yield? */
static circle find_circle(const zs_shm *shm, zs_shm_moment *moments)
{
    circle found = CIRCLE;
    for (int r = 0; r < shm->base.world; r++) {
        moments[r] = zs_shm_state_of(shm, r);
        if (moments[r].wait_id % 2 == 0) return NO_CIRCLE;
        if (moments[r].act.yields) found = CIRCLE_THAT_YIELDS;
    }
    for (int r = 0; r < shm->base.world; r++) {
        moments[r].missing = zs_shm_missing(shm, r, moments[r].act);
        if (moments[r].missing < 0) return NO_CIRCLE;
    }
    for (int r = 0; r < shm->base.world; r++)
        if (atomic_load(&shm->peers[r].control->wait_id) != moments[r].wait_id) return NO_CIRCLE;
    for (int r = 0; r < shm->base.world && found == CIRCLE; r++)
        if (!zs_shm_has_place(shm, r)) return NO_CIRCLE; /* it is about to publish it, for the message */
    return found;
}

/* Ends the wait if it is part of a circle that no other rank will open. Then all ranks are informed, as the first to
 * fail hides the circle from the others. */
static zs_status check_circle(zs_shm *shm, zs_shm_act act, sleep_state *state)
{
    zs_shm_moment *moments = malloc((size_t)shm->base.world * sizeof *moments);
    if (moments == NULL) return ZS_OK; /* then the deadline decides */
    circle found = find_circle(shm, moments);
    state->yielded = found == CIRCLE_THAT_YIELDS && act.yields;
    zs_status status = ZS_OK;
    if (found == CIRCLE) {
        status = zs_shm_fail_circle(shm, moments);
        zs_shm_stop(shm, status, zs_last_message());
    }
    free(moments);
    return status;
}

/* Seconds that a wait may take. */
static double limit_of(const zs_shm *shm)
{
    return shm->base.timeout + shm->base.patience;
}

/* All that can end a wait except success. */
static zs_status check_trouble(zs_shm *shm, zs_shm_act act, sleep_state *state)
{
    ZS_TRY(zs_shm_check_stop(shm));
    zs_shm_answer(shm);
    if (act.yields) {
        ZS_TRY(check_circle(shm, act, state));
        if (state->yielded) return ZS_OK;
    }
    double time = zs_clock(), waited = time - state->start;
    if (time - state->checked < check_every) return ZS_OK;
    state->checked = time;
    if (!state->placed && waited >= place_after) {
        zs_shm_publish_place(shm);
        state->placed = true;
    }
    ZS_TRY(check_lives(shm, act, state, time));
    if (waited >= circle_after) ZS_TRY(check_circle(shm, act, state));
    if (zs_comm_interrupted()) return ZS_FAIL(ZS_ERR_TORCH, "interrupted while waiting for another rank");
    int missing = waited >= limit_of(shm) ? zs_shm_missing(shm, shm->base.rank, act) : -1;
    if (missing >= 0) return zs_shm_fail_timeout(shm, act, missing, waited);
    if (waited >= zs_report_after() - ask_before && !state->asked) {
        zs_shm_ask(shm);
        state->asked = true;
    }
    if (waited >= zs_report_after() && !state->reported) {
        zs_shm_print_stall(shm, act, waited);
        state->reported = true;
    }
    return ZS_OK;
}

/* --- the wait ----------------------------------------------------------------------------------------------------- */

static zs_status sleep_until_done(zs_shm *shm, zs_shm_act act, bool *reached)
{
    sleep_state state = {.start = zs_clock()};
    state.checked = state.start;
    for (;;) {
        uint32_t seen;
        *reached = !zs_shm_prepare_sleep(shm, act, &seen);
        if (*reached) return ZS_OK;
        ZS_TRY(check_trouble(shm, act, &state));
        if (state.yielded) return ZS_OK;
        double left = state.start + limit_of(shm) - zs_clock(), most = act.yields ? yield_slice : slice;
        zs_shm_sleep(shm, seen, left < most ? (left > 0.001 ? left : 0.001) : most);
    }
}

/* Begins the range that a profiler shows of a wait. */
static zs_profile *profile(const zs_shm *shm, zs_shm_act act)
{
    int missing = zs_profile_shows_waits() ? zs_shm_missing(shm, shm->base.rank, act) : -1;
    if (missing < 0) return NULL;
    char phrase[ZS_SHM_PHRASE];
    zs_shm_describe(shm, act, phrase, sizeof phrase);
    return zs_profile_begin_wait("zshard::wait for rank %d to %s", missing, phrase);
}

static zs_status wait_for(zs_shm *shm, zs_shm_act act, bool *reached)
{
    *reached = true;
    for (int i = 0; i <= shm->spins; i++) {
        if (zs_shm_missing(shm, shm->base.rank, act) < 0) return ZS_OK;
        pause_cpu();
    }
    zs_shm_control *own = shm->own;
    ZS_TRY(zs_comm_hold(&shm->base)); /* a rank has one act, and one place to sleep */
    zs_shm_note(shm, act);
    atomic_fetch_add(&own->wait_id, 1); /* odd: from here on the act above is a wait */
    zs_profile *range = profile(shm, act);
    int64_t begun = zs_clock_ns();
    zs_status status = sleep_until_done(shm, act, reached);
    zs_profile_waited(begun);
    zs_profile_end(range);
    if (status != ZS_OK) shm->base.failed = true;
    zs_shm_get_up(shm);
    atomic_fetch_add(&own->wait_id, 1);
    zs_comm_unhold(&shm->base);
    return zs_comm_locate(&shm->base, status);
}

zs_status zs_shm_wait(zs_shm *shm, zs_shm_act act)
{
    bool reached;
    return wait_for(shm, act, &reached);
}

zs_status zs_shm_wait_or_yield(zs_shm *shm, zs_shm_act act, bool *reached)
{
    act.yields = true;
    zs_status status = wait_for(shm, act, reached);
    *reached = *reached && status == ZS_OK;
    return status;
}
