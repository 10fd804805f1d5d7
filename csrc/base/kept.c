/* kept.c - see kept.h. */
#include "base/kept.h"

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
