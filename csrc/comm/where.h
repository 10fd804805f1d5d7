/* where.h - places of all ranks: the lines after an error's message, for ranks that wait or have diverged.
 *
 *   rank 0: train.py:41 in train(), in clip_grad_norm_(), step 12
 *   ranks 1-3: data.py:17 in __next__(), step 12; last unit 'blocks.3'
 *
 * No rank looks for this before something fails, or a rank has waited for long. */
#ifndef ZS_WHERE_H
#define ZS_WHERE_H

#include "comm/comm.h"

/* Seconds of waiting after which a rank writes where the others are to stderr, once; it asks them a little earlier. /
 * Sets them, for tests, and returns the former ones. */
double zs_report_after(void);
double zs_set_report_after(double seconds);

/* Writes such lines, with a line break before each; ranks with the same text share one. texts [world]; "": nothing is
 * known of that rank. */
void zs_where_lines(char (*texts)[ZS_WHERE], int world, char *text, size_t size);

/* Adds them to this thread's record of a failure `status` that is ZS_ERR_TIMEOUT or ZS_ERR_DIVERGED. Returns `status`.
 * If ranks exchange texts, they have done so: zs_comm_look, then the exchange. */
zs_status zs_comm_locate(zs_comm *comm, zs_status status);

/* Sets the text that this rank exchanges. */
void zs_comm_look(zs_comm *comm);

/* Writes the lines for a failure that Python reports on all ranks. Collective. */
void zs_comm_locate_all(zs_comm *comm, char *text, size_t size);

/* All ranks are about to fail in the same way: where they exchange texts, they do so now. Collective. */
void zs_comm_look_at_all(zs_comm *comm);

#endif
