/* device_cuda.h - GPUs as devices of the core: see device.h.
 *
 * Each of the device's streams is a CUDA stream. The compute stream is torch's current one on the calling thread; the
 * others are our own, of high priority, which wait for it, and it for them, by events on the GPU.
 */
#ifndef ZS_DEVICE_CUDA_H
#define ZS_DEVICE_CUDA_H

#include "device/cuda_api.h"
#include "device/device.h"

/* GPU number `index`; its streams are made, and the kernels loaded, when it is first asked for. ZS_ERR_CUDA where
 * there is no driver, GPU or kernel for it; ZS_ERR_VALUE for an index that there cannot be. on_host: for tests, with
 * a driver that stands in for CUDA's and whose memory is the host's: torch's tensors are then on the CPU, and the
 * compute stream is the fake's default stream, which runs at once, or as the test says. */
zs_status zs_device_cuda(int index, bool on_host, const zs_device **out);

/* The CUDA stream behind one of the device's streams, on this thread and now. Sees to the thread's context as well. */
zs_status zs_device_cuda_stream(const zs_device *device, zs_stream stream, zs_cu_stream *out);

/* New event, for order alone. */
zs_status zs_device_cuda_event_new(const zs_device *device, zs_cu_event *out);

/* Frees it; NULL allowed. */
void zs_device_cuda_event_free(zs_cu_event event);

/* Records it in a stream. / Later work in a stream comes after the work that the event was recorded behind. */
zs_status zs_device_cuda_record(const zs_device *device, zs_stream stream, zs_cu_event event);
zs_status zs_device_cuda_await(const zs_device *device, zs_stream stream, zs_cu_event event);

/* Has an event passed? For a thread that only polls: its capture mode becomes relaxed for good, as a query in the
 * default mode would invalidate another thread's capture. True if the driver cannot tell, and no record: other calls
 * report its failures. */
bool zs_device_cuda_passed(const zs_device *device, zs_cu_event event);

/* --- cuda_trail.c ------------------------------------------------------------------------------------------------- */

/* zs_device_follow, zs_device_end_pass and zs_device_end_trail; `now` is the compute stream, whose context is
 * current. */
zs_status zs_cuda_trail_follow(zs_trail *trail, zs_cu_stream now);
zs_status zs_cuda_trail_end_pass(zs_trail *trail, zs_cu_stream now);
void zs_cuda_trail_end(zs_trail *trail);

/* --- cuda_memory.c ------------------------------------------------------------------------------------------------ */

/* As zs_device_mem_new, _lend, and in pinned memory of the host. */
zs_status zs_cuda_mem_new(const zs_device *device, size_t bytes, zs_mem **out);
zs_status zs_cuda_mem_lend(const zs_device *device, size_t bytes, zs_mem **out);
zs_status zs_cuda_mem_new_host(const zs_device *device, size_t bytes, zs_mem **out);

#endif
