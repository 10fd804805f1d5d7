/* nccl_windows.h - memory that is registered with NCCL on all ranks, lent in blocks.
 *
 * The one idea: a registration is collective and addresses the same place on all ranks, so what is lent has to lie alike
 * everywhere, while ranks give memory back when their programs like. So nothing that is registered is given up as long as the
 * communicator lives; what is free is lent again where all ranks say that it is free on theirs.
 */
#ifndef ZS_NCCL_WINDOWS_H
#define ZS_NCCL_WINDOWS_H

#include "comm/nccl/nccl_comm.h"
#include "device/device.h"

typedef struct zs_nccl_windows zs_nccl_windows;

/* New and empty; `comm` is retained. The ranks talk over `control`, which is borrowed and outlives zs_nccl_windows_end. */
zs_status zs_nccl_windows_new(zs_nccl_comm *comm, zs_comm *control, zs_nccl_windows **out);

/* New block of `bytes` zeroed bytes of `device`. Collective: the same calls in the same order on all ranks. Small blocks share
 * a window; one window at least is as large as the driver's pages (2 MiB). Fails like zs_nccl_window_new. */
zs_status zs_nccl_windows_take(zs_nccl_windows *windows, const zs_device *device, size_t bytes, zs_mem **out);

/* Nothing is taken any more; windows go when their blocks have gone, all together. NULL allowed. */
void zs_nccl_windows_end(zs_nccl_windows *windows);

#endif
