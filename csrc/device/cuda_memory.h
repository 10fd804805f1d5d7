/* cuda_memory.h - memory of a GPU, and pinned memory of its host: the functions of device.h.
 *
 * It is torch's, so torch's statistics see it, and what is freed goes to tensors. Memory goes back in the order of the
 * compute stream: other streams' work on it comes first. A failure at that is ignored, as the process may be ending,
 * and an earlier failure that is being returned stays on record.
 */
#ifndef ZS_CUDA_MEMORY_H
#define ZS_CUDA_MEMORY_H

#include "device/device.h"

/* As zs_device_mem_new, _lend, and in pinned memory of the host. */
zs_status zs_cuda_mem_new(const zs_device *device, size_t bytes, zs_mem **out);
zs_status zs_cuda_mem_lend(const zs_device *device, size_t bytes, zs_mem **out);
zs_status zs_cuda_mem_new_host(const zs_device *device, size_t bytes, zs_mem **out);

#endif
