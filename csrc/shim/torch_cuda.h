/* torch_cuda.h - the parts of torch's CUDA side that the core uses: its caching allocator, and its current stream.
 *
 * The files use torch's device-generic interfaces, so that they compile against a torch without CUDA and fail
 * properly there. The memory appears in torch's statistics, and a lack of it raises torch's own exception, after
 * torch has emptied its cache. */
#ifndef ZS_TORCH_CUDA_H
#define ZS_TORCH_CUDA_H

#include "base/status.h"

/* *new* device memory on GPU `index`, not zeroed, for use in the order of the current stream; free it with *owner.
 * If there is none, sets torch.OutOfMemoryError and returns ZS_ERR_TORCH. */
zs_status zs_torch_cuda_alloc(int index, size_t bytes, void **ptr, void **owner);

/* Frees it, in the order of the stream on which it was allocated. */
void zs_torch_cuda_free(void *owner);

/* torch's current stream on this thread for GPU `index`, a CUstream. */
zs_status zs_torch_cuda_stream(int index, void **stream);

#endif
