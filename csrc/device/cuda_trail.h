/* cuda_trail.h - zs_device_follow and the like on a GPU: see device.h. */
#ifndef ZS_CUDA_TRAIL_H
#define ZS_CUDA_TRAIL_H

#include "device/cuda_api.h"
#include "device/device.h"

/* zs_device_follow, zs_device_end_pass and zs_device_end_trail; `now` is the compute stream, whose context is
 * current. */
zs_status zs_cuda_trail_follow(zs_trail *trail, zs_cu_stream now);
zs_status zs_cuda_trail_end_pass(zs_trail *trail, zs_cu_stream now);
void zs_cuda_trail_end(zs_trail *trail);

#endif
