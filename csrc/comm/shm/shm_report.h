/* shm_report.h - texts for messages about waits. */
#ifndef ZS_SHM_REPORT_H
#define ZS_SHM_REPORT_H

#include "comm/shm/shm.h"

enum { ZS_SHM_PHRASE = 192 }; /* bytes of the text of what one rank does */

/* What this rank waits for, without the numbers that change from step to step: "reduce gradients of unit 'a'". */
void zs_shm_describe(const zs_shm *shm, zs_shm_act act, char *text, size_t size);

/* Failures with their messages: a peer's death, an orderly exit, a deadline, a circle. `missing` is the rank waited
 * for; `moments` [world] are those of the proof, as the ranks may have moved on by the time of the message. */
zs_status zs_shm_fail_dead(const zs_shm *shm, zs_shm_act act, int dead, int missing);
zs_status zs_shm_fail_left(const zs_shm *shm, zs_shm_act act, int left);
zs_status zs_shm_fail_timeout(const zs_shm *shm, zs_shm_act act, int missing, double waited);
zs_status zs_shm_fail_circle(const zs_shm *shm, const zs_shm_moment *moments);

/* Rank `r` has reached an exchange of another kind. */
zs_status zs_shm_fail_apart(const zs_shm *shm, zs_shm_act act, int r);

/* Prints a line on stderr about a long wait, and one for each rank that says where it is. */
void zs_shm_print_stall(zs_shm *shm, zs_shm_act act, double waited);

#endif
