/* mappings.c - lists this process's mappings of memory files. See file.h. */
#include "base/file.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* over what follows */
static zs_mapping *mappings;                             /* [room] */
static size_t n_mappings, room;

static zs_status make_room(void)
{
    if (n_mappings < room) return ZS_OK;
    size_t wanted = room == 0 ? 64 : 2 * room;
    zs_mapping *grown = realloc(mappings, wanted * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory listing mappings");
    mappings = grown;
    room = wanted;
    return ZS_OK;
}

zs_status zs_mapping_note(const zs_mapping *mapping)
{
    pthread_mutex_lock(&lock);
    zs_status status = make_room();
    if (status == ZS_OK) mappings[n_mappings++] = *mapping;
    pthread_mutex_unlock(&lock);
    return status;
}

void zs_mapping_forget(const void *base)
{
    pthread_mutex_lock(&lock);
    for (size_t i = n_mappings; i-- > 0;) {
        if (mappings[i].base != base) continue;
        mappings[i] = mappings[--n_mappings];
        break;
    }
    pthread_mutex_unlock(&lock);
}

zs_status zs_mappings_copy(zs_mapping **out, size_t *n)
{
    pthread_mutex_lock(&lock);
    *n = n_mappings;
    *out = malloc((n_mappings + 1) * sizeof **out);
    if (*out != NULL && n_mappings > 0) memcpy(*out, mappings, n_mappings * sizeof **out);
    pthread_mutex_unlock(&lock);
    return *out != NULL ? ZS_OK : ZS_FAIL(ZS_ERR_MEMORY, "out of memory listing mappings");
}

bool zs_mapping_of(const void *at, size_t bytes, zs_mapping *out)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < n_mappings && !found; i++) {
        const char *end = mappings[i].base + mappings[i].bytes;
        found = (const char *)at >= mappings[i].base && (const char *)at + bytes <= end;
        if (found) *out = mappings[i];
    }
    pthread_mutex_unlock(&lock);
    return found;
}
