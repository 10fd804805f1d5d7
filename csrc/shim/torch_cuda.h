/* torch_cuda.h - what the core asks of torch's CUDA side: memory of its caching allocator, and its current stream.
 *
 * Torch is asked through its device-generic interfaces, so that these files compile against a torch without CUDA and
 * fail in order there. Memory that is asked for here stands in torch's statistics, and a lack of it is torch's own
 * exception, after torch has emptied its cache.
 */
#ifndef ZS_TORCH_CUDA_H
#define ZS_TORCH_CUDA_H

#include "base/status.h"

/* Has the torch of this process CUDA, with a GPU? */
bool zs_torch_has_cuda(void);

/* New device memory on GPU `index`, not zeroed, for use in the order of the current stream; *owner is to be given back.
 * torch.OutOfMemoryError is set, and ZS_ERR_TORCH returned, where there is none. */
zs_status zs_torch_cuda_alloc(int index, size_t bytes, void **ptr, void **owner);

/* Gives it back, in the order of the stream on which it was taken. */
void zs_torch_cuda_free(void *owner);

/* torch's current stream on this thread for GPU `index`, a CUstream. */
zs_status zs_torch_cuda_stream(int index, void **stream);

#endif
