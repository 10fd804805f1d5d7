/* pieces.cuh - finds a block's piece of a table of runs, and its threads' part of that.
 */
#ifndef ZS_PIECES_CUH
#define ZS_PIECES_CUH

#include "kernel.cuh"

namespace zs {

/* The number of the piece that this block belongs to: the last that does not begin behind it. */
ZS_DEVICE uint32_t piece_number(const zs_cuda_update_args &args)
{
    uint32_t low = 0, high = args.n_pieces;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        (args.begin[middle] <= blockIdx.x ? low : high) = middle;
    }
    return low;
}

/* This thread's number among those of the piece. */
ZS_DEVICE uint32_t thread_in(const zs_cuda_update_args &args, uint32_t number)
{
    return (blockIdx.x - args.begin[number]) * blockDim.x + threadIdx.x;
}

} // namespace zs

#endif
