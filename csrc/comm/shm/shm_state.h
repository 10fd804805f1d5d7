/* shm_state.h - optimizer state that peers may read: it lies in the file of this rank's buckets.
 *
 * A rank posts a text (optim/shared_state.py) that says where each tensor lies, and replaces it as a whole. Texts
 * and tensors are copied out of the file by pread, so no mapping is needed, and a rank that has exited is read like any
 * other. */
#ifndef ZS_SHM_STATE_H
#define ZS_SHM_STATE_H

#include "comm/shm/shm.h"

/* See zs_state_ops. */
extern const zs_state_ops zs_shm_state;

#endif
