/* peer_end.c - a rank's end: when the memory that its peers have mapped may be freed. See peer.h.
 *
 * The one idea: who has closed its mappings says so in each peer's pad, the last number it writes there, and each rank waits
 * for that of all. What it has not heard of within seconds stays the process's, as freeing it would be undefined. The pad
 * itself is mapped until after that number, so it is never freed, but lent to the next transport.
 */
#include "comm/peer/peer.h"
#include "device/cuda_driver.h"
#include "device/device_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const double patience = 10.0; /* seconds, for peers that go on with something else */

/* --- pads of transports that have ended -------------------------------------------------------------------------------------- */

typedef struct spare {
    struct spare *next;
    zs_mem *pad;
} spare;

static struct {
    pthread_mutex_t lock;
    spare *first;
} spares = {.lock = PTHREAD_MUTEX_INITIALIZER};

static zs_mem *take_spare(const zs_device *device, size_t bytes)
{
    zs_mem *pad = NULL;
    pthread_mutex_lock(&spares.lock);
    spare **at = &spares.first;
    while (*at != NULL && !((*at)->pad->device == device && (*at)->pad->bytes >= bytes))
        at = &(*at)->next;
    spare *found = *at;
    if (found != NULL) {
        pad = found->pad;
        *at = found->next;
    }
    pthread_mutex_unlock(&spares.lock);
    free(found);
    return pad;
}

/* Without memory for that it is nobody's. */
static void give_spare(zs_mem *pad)
{
    spare *one = malloc(sizeof *one);
    if (one == NULL) return;
    pthread_mutex_lock(&spares.lock);
    *one = (spare){spares.first, pad};
    spares.first = one;
    pthread_mutex_unlock(&spares.lock);
}

zs_status zs_peer_pad_new(const zs_device *device, size_t bytes, zs_mem **out)
{
    zs_mem *pad = take_spare(device, bytes);
    if (pad == NULL) return zs_peer_mem_new(device, bytes, out);
    zs_status status = zs_device_zero(device, ZS_STREAM_COMPUTE, pad->ptr, pad->bytes);
    if (status == ZS_OK)
        *out = pad;
    else
        give_spare(pad);
    return status;
}

/* --- the end ----------------------------------------------------------------------------------------------------------------- */

/* From here on nothing is moved, and no peer's pad is written but for the end. False: something has failed before. */
static bool stop(zs_peer *self)
{
    zs_peer_watch *watch = &self->watch;
    pthread_mutex_lock(&watch->lock);
    bool good = watch->failure == ZS_OK && watch->rescue != NULL; /* all pads are mapped */
    if (good) {
        watch->closed = true;
        watch->failure = ZS_ERR_STATE;
        snprintf(watch->why, sizeof watch->why, "the transport of rank %d is closed", self->base.rank);
    }
    pthread_mutex_unlock(&watch->lock);
    return good;
}

/* Has every peer that lives said that it is at its end? In a stream where nothing waits. */
static zs_status heard(zs_peer *self, bool *all)
{
    int rank = self->base.rank, world = self->base.world;
    uint32_t said[world];
    const char *at = self->pads[rank] + zs_peer_end_words(self);
    ZS_TRY(ZS_CU(cuMemcpyDtoHAsync, said, (zs_cu_ptr)(uintptr_t)at, sizeof said, self->watch.rescue));
    ZS_TRY(ZS_CU(cuStreamSynchronize, self->watch.rescue));
    *all = true;
    for (int r = 0; r < world; r++)
        *all = *all && (r == rank || said[r] != 0 || zs_kin_left(self->kin, r));
    return ZS_OK;
}

void zs_peer_part(zs_peer *self)
{
    if (!stop(self)) return;
    double until = zs_watchdog_now() + patience;
    zs_peer_maps_close(self->maps, false);
    zs_status status = zs_peer_say(self, ZS_STREAM_COMPUTE, zs_peer_end_words(self), 1);
    ZS_THEN(status, zs_peer_drain(self, patience));
    while (status == ZS_OK && !self->parted && zs_watchdog_now() < until) {
        status = heard(self, &self->parted);
        if (status == ZS_OK && !self->parted) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

void zs_peer_give_back(zs_peer *self)
{
    zs_peer_maps_free(self->maps, self->parted);
    if (self->parted)
        give_spare(self->pad);
    else
        zs_mem_release(self->pad);
}
