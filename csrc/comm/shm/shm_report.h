/* shm_report.h - words for messages about waits. */
#ifndef ZS_SHM_REPORT_H
#define ZS_SHM_REPORT_H

#include "comm/shm/shm.h"

enum { ZS_SHM_PHRASE = 192 }; /* bytes of what one rank does, in words */

/* What this rank waits for, without the numbers that differ from step to step: "reduce gradients of unit 'a'". */
void zs_shm_describe(const zs_shm *shm, zs_shm_act act, char *text, size_t size);

/* Failures, worded: a peer's death, an orderly leave, a deadline, a circle. `missing` is the rank waited for; `moments`
 * [world] are those of the proof, as the ranks may be elsewhere by the time that it is put into words. */
zs_status zs_shm_fail_dead(const zs_shm *shm, zs_shm_act act, int dead, int missing);
zs_status zs_shm_fail_left(const zs_shm *shm, zs_shm_act act, int left);
zs_status zs_shm_fail_timeout(const zs_shm *shm, zs_shm_act act, int missing, double waited);
zs_status zs_shm_fail_circle(const zs_shm *shm, const zs_shm_moment *moments);

/* Rank `r` has come to an exchange of another kind. */
zs_status zs_shm_fail_apart(const zs_shm *shm, zs_shm_act act, int r);

/* One line on stderr about a wait that takes long. */
void zs_shm_print_stall(const zs_shm *shm, zs_shm_act act, double waited);

#endif
