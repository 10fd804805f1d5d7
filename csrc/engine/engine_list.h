/* engine_list.h - the engines of this process whose forwards have made nodes of autograd's graph. A backward may enter
 * them all.
 */
#ifndef ZS_ENGINE_LIST_H
#define ZS_ENGINE_LIST_H

#include "engine/engine.h"

/* Adds an engine, once / takes it off, if it is listed: it is being freed. Any thread may do that. */
void zs_engine_list_add(zs_engine *engine);
void zs_engine_list_remove(zs_engine *engine);

/* *out: [*n] new references to those that are listed; freed by the caller with free(). ZS_ERR_MEMORY. */
zs_status zs_engine_list_take(zs_engine ***out, size_t *n);

#endif
