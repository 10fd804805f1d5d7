/* buffers.h - buffers of the model that all ranks get from rank 0, as DDP has them: see zs_engine_sync_buffers.
 */
#ifndef ZS_BUFFERS_H
#define ZS_BUFFERS_H

#include "engine/engine.h"

/* A forward begins: they are copied if it is one for which they are to be. */
zs_status zs_buffers_sync(zs_engine *engine, const zs_entry *entry);

/* Gives the tensors back. */
void zs_buffers_free(zs_engine *engine);

#endif
