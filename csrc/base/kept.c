/* kept.c - memory that outlives its process.
 *
 * With keeping on, blocks that would be private lie in one file of memory, so that a descriptor of it is enough to read
 * them when the process has been killed. Shared blocks lie in files anyway; mappings.c lists all these. See file.h. */

#include <pthread.h>

#include "base/file.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* while it begins */
static zs_file *own;                                     /* NULL: keeping is off */

zs_status zs_kept_begin(void)
{
    pthread_mutex_lock(&lock);
    zs_status status = own == NULL ? zs_file_new("zshard-kept", &own) : ZS_OK;
    if (status == ZS_OK) zs_mem_divert(zs_kept_new);
    pthread_mutex_unlock(&lock);
    return status;
}

zs_status zs_kept_new(size_t bytes, zs_mem **out)
{
    zs_region region;
    return zs_file_map_bucket(own, bytes, &region, out);
}
