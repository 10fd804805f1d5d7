/* cuda_launch.h - launches of kernels: their numbers, and the division of elements among threads. Shared by
 * cuda_kernels.c and cuda_update.c.
 */
#ifndef ZS_CUDA_LAUNCH_H
#define ZS_CUDA_LAUNCH_H

#include "base/status.h"
#include "device/cuda_args.h"
#include "shim/tensor.h"

enum {
    ZS_CUDA_DTYPES = ZS_BYTES,
    ZS_CUDA_DITHERED = ZS_CUDA_DTYPES, /* bfloat16, rounded at random: one kind more */
    ZS_CUDA_KINDS,
    ZS_CUDA_RULES = 4, /* 2 * zs_rule + full */
};

/* The first number of each kind of kernel. */
enum {
    ZS_KERNEL_SUM = 0, /* + DTYPES * to + from */
    ZS_KERNEL_CAST = ZS_KERNEL_SUM + ZS_CUDA_DTYPES * ZS_CUDA_DTYPES,
    ZS_KERNEL_SCALE = ZS_KERNEL_CAST + ZS_CUDA_DTYPES * ZS_CUDA_DTYPES, /* + dtype */
    ZS_KERNEL_NORM = ZS_KERNEL_SCALE + ZS_CUDA_DTYPES,
    ZS_KERNEL_FOLD = ZS_KERNEL_NORM + ZS_CUDA_DTYPES,
    ZS_KERNEL_DIFFERS,
    ZS_KERNEL_CONSTANTS,
    ZS_KERNEL_ENCODE,
    ZS_KERNEL_STEP,                                                      /* + KINDS * rule + kind */
    ZS_KERNEL_LIVE = ZS_KERNEL_STEP + ZS_CUDA_KINDS * ZS_CUDA_RULES,     /* + DTYPES * rule + dtype */
    ZS_KERNEL_COMPACT = ZS_KERNEL_LIVE + ZS_CUDA_DTYPES * ZS_CUDA_RULES, /* + rule; Adam without amsgrad only */
    ZS_KERNEL_COUNT = ZS_KERNEL_COMPACT + ZS_CUDA_RULES,
};

/* Queues `blocks` blocks of a kernel, and loads all kernels before the first. The driver copies the arguments before
 * it returns. */
zs_status zs_cuda_launch(int kernel, int64_t blocks, void *args, void *stream);

/* An array that takes part; NULL ones do not. */
typedef struct zs_cuda_array {
    const void *at;
    size_t item; /* bytes in an element */
} zs_cuda_array;

/* Elements of a pack where the widest array has `item` bytes in each. */
int64_t zs_cuda_pack_of(size_t item);

/* Cuts `numel` elements so that packs of `pack` can be accessed at once in all arrays; if that cannot be, none. */
zs_cuda_cut zs_cuda_cut_of(const zs_cuda_array *arrays, int n, int64_t numel, int64_t pack);

/* Blocks with a thread for each pack of the cut, or for each element that is in none. A grid that only fills the GPU
 * and goes round is a tenth slower on an H200. */
int64_t zs_cuda_blocks_for(const zs_cuda_cut *cut, int64_t pack);

#endif
