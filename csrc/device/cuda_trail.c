/* cuda_trail.c - a model's passes in several streams of torch's: see zs_trail in device.h.
 *
 * Slots, buckets and the forks of side streams know one compute stream. So where torch's current stream is another one
 * than at the model's last hook, it first waits for that one's work: nothing else has to know. A stream that a script
 * made may be destroyed by its next pass, so the end of a pass is kept as an event, and the stream is not touched
 * again.
 */
#include "device/device_cuda.h"

#include "device/cuda_driver.h"

static zs_status is_captured(zs_cu_stream stream, bool *out)
{
    zs_cu_capture_status status = ZS_CU_STREAM_CAPTURE_STATUS_NONE;
    ZS_TRY(ZS_CU(cuStreamIsCapturing, stream, &status));
    *out = status != ZS_CU_STREAM_CAPTURE_STATUS_NONE;
    return ZS_OK;
}

/* A capture waits for nothing outside of it, nor anything outside for a capture: the capturing thread has synchronized
 * before, and orders the replays. */
static zs_status wait_for(const zs_trail *trail, zs_cu_stream now)
{
    bool captured = false;
    ZS_TRY(is_captured(now, &captured));
    return captured == trail->captured ? ZS_CU(cuStreamWaitEvent, now, trail->event, 0) : ZS_OK;
}

/* Records the event after all work of the trail's stream. */
static zs_status mark(zs_trail *trail)
{
    ZS_TRY(is_captured(trail->stream, &trail->captured));
    return ZS_CU(cuEventRecord, trail->event, trail->stream);
}

zs_status zs_cuda_trail_follow(zs_trail *trail, zs_cu_stream now)
{
    if (trail->event == NULL) {
        zs_cu_event made;
        ZS_TRY(ZS_CU(cuEventCreate, &made, ZS_CU_EVENT_DISABLE_TIMING));
        trail->event = made;
    } else if (now != trail->stream) {
        if (trail->open) ZS_TRY(mark(trail));
        if (trail->open || trail->pending) ZS_TRY(wait_for(trail, now));
    }
    trail->stream = now;
    trail->open = true;
    return ZS_OK;
}

/* Captured work ends with its capture: no later pass may wait for it. */
zs_status zs_cuda_trail_end_pass(zs_trail *trail, zs_cu_stream now)
{
    ZS_TRY(zs_cuda_trail_follow(trail, now));
    ZS_TRY(mark(trail));
    trail->open = false;
    trail->pending = !trail->captured;
    return ZS_OK;
}

void zs_cuda_trail_end(zs_trail *trail)
{
    if (trail->event != NULL) ZS_CU_FREE(cuEventDestroy, trail->event);
    trail->event = NULL;
}
