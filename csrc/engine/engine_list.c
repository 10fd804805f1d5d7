/* engine_list.c - the engines of this process whose forwards created graph nodes: a backward may enter any of them. */

#include "engine/engine_inside.h"

#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static zs_engine *first;

void zs_engine_list_add(zs_engine *engine)
{
    pthread_mutex_lock(&lock);
    engine->next_listed = first;
    first = engine;
    pthread_mutex_unlock(&lock);
}

void zs_engine_list_remove(zs_engine *engine)
{
    pthread_mutex_lock(&lock);
    for (zs_engine **link = &first; *link != NULL; link = &(*link)->next_listed) {
        if (*link != engine) continue;
        *link = engine->next_listed;
        break;
    }
    pthread_mutex_unlock(&lock);
}

zs_status zs_engine_list_take(zs_engine ***out, size_t *n)
{
    size_t most = 0;
    *n = 0;
    pthread_mutex_lock(&lock);
    for (const zs_engine *engine = first; engine != NULL; engine = engine->next_listed)
        most++;
    *out = malloc((most + 1) * sizeof **out);
    for (zs_engine *engine = first; *out != NULL && engine != NULL; engine = engine->next_listed)
        if (zs_refs_take_if_any(&engine->refs)) (*out)[(*n)++] = engine;
    pthread_mutex_unlock(&lock);
    return *out != NULL ? ZS_OK : ZS_FAIL(ZS_ERR_MEMORY, "out of memory beginning a backward");
}
