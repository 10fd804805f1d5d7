/* peer_memory.h - device memory that processes of one host map into each other (CUDA IPC).
 *
 * The one idea: the driver wants the mappings of an allocation closed before it is freed, and the peers do not free at the
 * same time. So an allocation belongs to whoever counts a reference: the blocks cut from it, and each transport that has told
 * its peers of it. It has a number that is never used again, by which the peers know it.
 */
#ifndef ZS_PEER_MEMORY_H
#define ZS_PEER_MEMORY_H

#include "device/cuda_api.h"
#include "device/device.h"

typedef struct zs_peer_alloc zs_peer_alloc;

/* Where something lies in another process. */
typedef struct zs_peer_address {
    uint64_t number; /* of the allocation, in its process; 0: nowhere */
    uint64_t offset; /* in bytes */
    zs_cu_ipc_mem handle;
} zs_peer_address;

/* New block of `bytes` zeroed bytes. Small ones share an allocation of 2 MiB, which the driver would have them do anyway,
 * telling nobody. ZS_ERR_MEMORY, ZS_ERR_CUDA. */
zs_status zs_peer_mem_new(const zs_device *device, size_t bytes, zs_mem **out);

/* The allocation that `ptr` lies in, with a new reference; NULL: none of these. */
zs_peer_alloc *zs_peer_alloc_at(const void *ptr);

/* Gives a reference back; the last one frees. NULL allowed. */
void zs_peer_alloc_release(zs_peer_alloc *alloc);

/* Are all blocks gone that were cut from it? Then none will be cut any more. */
bool zs_peer_alloc_idle(zs_peer_alloc *alloc);

/* Its number. */
uint64_t zs_peer_alloc_number(const zs_peer_alloc *alloc);

/* Where `ptr`, which lies in it, is for a peer. */
zs_status zs_peer_alloc_address(zs_peer_alloc *alloc, const void *ptr, zs_peer_address *out);

#endif
