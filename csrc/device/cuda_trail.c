/* cuda_trail.c - a model's passes in several streams of torch's: see zs_trail in device.h.
 *
 * The one idea: slots, buckets and the forks of side streams know one compute stream. So where torch's current stream is another
 * one than at the model's last hook, it first waits for what that one has been given: nothing else has to know. A stream that a
 * script made may be gone by its next pass, so the end of a pass is kept as an event, and the stream is not touched again.
 */
#include "device/cuda_driver.h"
#include "device/cuda_trail.h"
#include "device/device_cuda.h"

/* The compute stream comes after what the trail's event stands for. A capture waits for nothing outside of it, nor anything outside for a capture:
 * who captures has synchronized before, and orders the replays. */
static zs_status wait_for(const zs_device *device, const zs_trail *trail)
{
    bool captured = false;
    ZS_TRY(zs_device_capturing(device, &captured));
    return captured == trail->captured ? zs_device_cuda_await(device, ZS_STREAM_COMPUTE, trail->event) : ZS_OK;
}

/* The event comes to stand for all that the trail's stream has been given. */
static zs_status mark(zs_trail *trail)
{
    zs_cu_capture_status status = ZS_CU_STREAM_CAPTURE_STATUS_NONE;
    ZS_TRY(ZS_CU(cuStreamIsCapturing, trail->stream, &status));
    trail->captured = status != ZS_CU_STREAM_CAPTURE_STATUS_NONE;
    return ZS_CU(cuEventRecord, trail->event, trail->stream);
}

zs_status zs_device_cuda_follow(const zs_device *device, zs_trail *trail)
{
    zs_cu_stream now;
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_COMPUTE, &now));
    if (trail->event == NULL) {
        zs_cu_event made;
        ZS_TRY(zs_device_cuda_event_new(device, &made));
        trail->event = made;
    } else if (now != trail->stream) {
        if (trail->open) ZS_TRY(mark(trail));
        if (trail->open || trail->pending) ZS_TRY(wait_for(device, trail));
    }
    trail->stream = now;
    trail->open = true;
    return ZS_OK;
}

/* What is captured ends with its capture: no later pass may wait for it. */
zs_status zs_device_cuda_rest(const zs_device *device, zs_trail *trail)
{
    ZS_TRY(zs_device_cuda_follow(device, trail));
    ZS_TRY(mark(trail));
    trail->open = false;
    trail->pending = !trail->captured;
    return ZS_OK;
}

void zs_device_cuda_end_trail(zs_trail *trail)
{
    zs_device_cuda_event_free(trail->event);
    trail->event = NULL;
}
