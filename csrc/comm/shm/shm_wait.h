/* shm_wait.h - waiting for peers, and telling them that there is something to see.
 *
 * The one idea: what a rank waits for is data (zs_shm_act), published while it waits. So the question "what is still
 * missing?" is one function of shared memory, which a rank asks for itself, and for all others when it suspects that
 * everybody waits for everybody; and messages can say what a late peer is doing.
 */
#ifndef ZS_SHM_WAIT_H
#define ZS_SHM_WAIT_H

#include "comm/shm/shm.h"

/* Stores `value` in an own state word and wakes the peers that sleep. */
void zs_shm_set(zs_shm *shm, _Atomic uint64_t *word, uint64_t value);

/* Wakes the peers that sleep, after a change made otherwise. */
void zs_shm_wake(zs_shm *shm);

/* Remembers, for the peers' messages, that this rank has now done `act`. */
void zs_shm_note(zs_shm *shm, zs_shm_act act);

/* The lowest rank that has not done what `who` needs for `act`; -1 if none is missing. */
int zs_shm_missing(const zs_shm *shm, int who, zs_shm_act act);

/* Has rank `r` not yet done what this rank needs for `act`? */
bool zs_shm_is_missing(const zs_shm *shm, int r, zs_shm_act act);

/* Waits until nobody is missing. Fails with ZS_ERR_PEER (one died, left or aborted), ZS_ERR_DIVERGED (proven: all ranks
 * wait for each other), ZS_ERR_TIMEOUT, or ZS_ERR_TORCH (interrupted). */
zs_status zs_shm_wait(zs_shm *shm, zs_shm_act act);

/* The same, but instead of ZS_ERR_DIVERGED it comes back with *reached false. */
zs_status zs_shm_wait_or_yield(zs_shm *shm, zs_shm_act act, bool *reached);

/* Has somebody aborted? For calls that do not wait. */
zs_status zs_shm_check_stop(const zs_shm *shm);

/* Tells the peers that this rank cannot go on; `status` is what their waits then fail with. Idempotent. */
void zs_shm_stop(zs_shm *shm, zs_status status, const char *reason);

/* --- shm_report.c: words for messages ---------------------------------------------------------------------------------- */

/* What a peer has to give for `act` of rank `who`, as in "rank 1's ...": "gradients of unit 'a' (round 2)". */
void zs_shm_describe(const zs_shm *shm, int who, zs_shm_act act, char *text, size_t size);

/* Where a rank was seen. */
typedef struct zs_shm_moment {
    zs_shm_act act;   /* as published: what it waits for, or has done last */
    uint64_t wait_id; /* odd: it waits */
    int missing;      /* the rank it waits for, -1: none */
} zs_shm_moment;

/* What rank `r` has published, without `missing`. */
zs_shm_moment zs_shm_look_at(const zs_shm *shm, int r);

/* What rank `r` was doing at that moment: "rank 1 (pid 7) waits for rank 0's ..." or "... has done nothing here since
 * its ...". */
void zs_shm_describe_rank(const zs_shm *shm, int r, const zs_shm_moment *moment, char *text, size_t size);

/* Failures, worded: a peer's death, an orderly leave, a deadline, a circle. `missing` is the rank waited for; `moments`
 * [world] are those of the proof, as the ranks may be elsewhere by the time that it is put into words. */
zs_status zs_shm_fail_dead(const zs_shm *shm, zs_shm_act act, int dead, int missing);
zs_status zs_shm_fail_left(const zs_shm *shm, zs_shm_act act, int left);
zs_status zs_shm_fail_timeout(const zs_shm *shm, zs_shm_act act, int missing, double waited);
zs_status zs_shm_fail_circle(const zs_shm *shm, const zs_shm_moment *moments);

/* One line on stderr about a wait that takes long. */
void zs_shm_print_stall(const zs_shm *shm, zs_shm_act act, double waited);

#endif
