/* cuda_trail.h - zs_device_follow and its kin on a GPU: see device.h. */
#ifndef ZS_CUDA_TRAIL_H
#define ZS_CUDA_TRAIL_H

#include "device/device.h"

/* zs_device_follow, zs_device_rest, zs_device_end_trail. */
zs_status zs_device_cuda_follow(const zs_device *device, zs_trail *trail);
zs_status zs_device_cuda_rest(const zs_device *device, zs_trail *trail);
void zs_device_cuda_end_trail(zs_trail *trail);

#endif
