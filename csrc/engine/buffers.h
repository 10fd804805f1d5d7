/* buffers.h - the model's buffers, which all ranks get from rank 0, as in DDP: see zs_engine_sync_buffers. */
#ifndef ZS_BUFFERS_H
#define ZS_BUFFERS_H

#include "engine/engine.h"

/* A forward begins: copies the buffers if it is due. */
zs_status zs_buffers_sync(zs_engine *engine, const zs_entry *entry);

/* Releases the tensors. */
void zs_buffers_free(zs_engine *engine);

#endif
