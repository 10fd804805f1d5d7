/* kept.h - memory that outlives its process.
 *
 * With keeping on, blocks that would be private lie in one file of memory, so that a descriptor of it is enough to read
 * them when the process has been killed. Shared blocks lie in files anyway; mappings.h lists all these. */
#ifndef ZS_KEPT_H
#define ZS_KEPT_H

#include "base/memory.h"

/* From now on, in this process, private blocks are made by zs_kept_new. Idempotent. */
zs_status zs_kept_begin(void);

/* New zeroed block in that file; when it is freed, its pages go back. */
zs_status zs_kept_new(size_t bytes, zs_mem **out);

#endif
