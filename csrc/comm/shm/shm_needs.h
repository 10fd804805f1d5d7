/* shm_needs.h - what a rank needs of the system to connect to its peers, compared with what is left.
 *
 * With many ranks, the process reaches its limits before memory runs out. Its needs are known, so a rank that lacks
 * something reports it, with numbers, before anything is created. */
#ifndef ZS_SHM_NEEDS_H
#define ZS_SHM_NEEDS_H

#include "comm/shm/shm.h"

/* ZS_ERR_UNSUPPORTED, with the limit, what is left of it and what is needed, if rank `rank` cannot join `world`
 * ranks. A limit that cannot be read (no /proc) is not checked. */
zs_status zs_shm_check_limits(int rank, int world);

#endif
