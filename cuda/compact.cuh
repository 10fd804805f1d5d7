/* compact.cuh - optimizer steps by groups of 32 elements, a warp for each group (csrc/update/compact.h).
 *
 * The arithmetic is the CPU's, from the same header. Lanes have neighbouring elements, so a warp's accesses are to
 * neighbouring bytes. These kernels alone have threads that talk to each other: they ask for the group's largest
 * magnitude.
 */
#include "pieces.cuh"

#define ZS_WARPS
#include "update/compact.h"

namespace zs {

/* The first group of a piece. */
ZS_DEVICE zs_group group_of(const zs_cuda_piece &piece, uint64_t round)
{
    zs_group group;
    group.param = piece.param;
    group.grad = piece.grad;
    group.low = static_cast<int8_t *>(piece.state[5]);
    group.first = piece.state[0];
    group.second = piece.state[1];
    for (int i = 0; i < 2; i++)
        group.scales[i] = static_cast<uint8_t *>(piece.state[3 + i]);
    group.number = piece.number;
    group.round = round;
    group.factor = 1;
    return group;
}

/* Calls update(group, n elements, kind, coded) with constants for the last two. */
template <class Update> ZS_DEVICE void over_groups(const zs_cuda_update_args &args, const Update &update)
{
    const uint32_t number = piece_number(args);
    const zs_cuda_piece &piece = args.piece[number];
    const zs_group first = group_of(piece, args.round);
    const int64_t i = thread_in(args, number) / ZS_GROUP;
    if (i < piece.packs) {
        const bool coded = args.coded != 0;
        const zs_group group = zs_group_at(&first, i * ZS_GROUP, static_cast<int>(args.kind), coded);
        const int64_t left = piece.numel - i * ZS_GROUP;
        const int n = left < ZS_GROUP ? static_cast<int>(left) : ZS_GROUP;
        if (args.kind == ZS_IN_F32)
            coded ? update(&group, n, ZS_IN_F32, true) : update(&group, n, ZS_IN_F32, false);
        else if (args.kind == ZS_IN_BF16)
            coded ? update(&group, n, ZS_IN_BF16, true) : update(&group, n, ZS_IN_BF16, false);
        else
            coded ? update(&group, n, ZS_IN_BF16_LOW, true) : update(&group, n, ZS_IN_BF16_LOW, false);
    }
}

/* Adam and AdamW. */
struct CompactAdam {
    const zs_cuda_update_args &args;
    ZS_DEVICE void operator()(const zs_group *group, int n, int kind, bool coded) const
    {
        zs_group_adam(group, &args.rule.adam_f32, n, kind, coded);
    }
};

/* SGD. */
template <bool MOMENTUM> struct CompactSgd {
    const zs_cuda_update_args &args;
    ZS_DEVICE void operator()(const zs_group *group, int n, int kind, bool coded) const
    {
        zs_group_sgd(group, &args.rule.sgd_f32, n, kind, MOMENTUM, MOMENTUM && coded);
    }
};

} // namespace zs

/* A kernel for each rule. */
ZS_KERNEL(zs_compact_adam, zs_cuda_update_args, 5)
{
    zs::over_groups(args, zs::CompactAdam{args});
}
/* Without momentum. */
ZS_KERNEL(zs_compact_sgd, zs_cuda_update_args, 5)
{
    zs::over_groups(args, zs::CompactSgd<false>{args});
}
/* With momentum. */
ZS_KERNEL(zs_compact_momentum, zs_cuda_update_args, 5)
{
    zs::over_groups(args, zs::CompactSgd<true>{args});
}
