/* engine_list.h - the engines of this process whose forwards created graph nodes. A backward may enter any of them. */
#ifndef ZS_ENGINE_LIST_H
#define ZS_ENGINE_LIST_H

#include "engine/engine.h"

/* Adds an engine, once / removes it before it is freed, if it is listed. From any thread. */
void zs_engine_list_add(zs_engine *engine);
void zs_engine_list_remove(zs_engine *engine);

/* *out: [*n] new references to the listed engines; the caller frees the array with free(). ZS_ERR_MEMORY. */
zs_status zs_engine_list_take(zs_engine ***out, size_t *n);

#endif
