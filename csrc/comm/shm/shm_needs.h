/* shm_needs.h - what a rank needs of the system to meet its peers, compared with what is left.
 *
 * With many ranks, the limits of the process end the transport before memory does. What it will need is known, so a
 * rank that lacks it says so, with numbers, before anything is made.
 */
#ifndef ZS_SHM_NEEDS_H
#define ZS_SHM_NEEDS_H

#include "comm/shm/shm.h"

/* ZS_ERR_UNSUPPORTED, naming the limit, what is left of it and what is needed, if rank `rank` cannot join `world`
 * ranks. A limit that cannot be read (no /proc) is not checked. */
zs_status zs_shm_check_limits(int rank, int world);

#endif
