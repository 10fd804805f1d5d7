/* compact.cuh - optimizer steps by groups of 32 elements, a thread for each group (csrc/update/compact.h).
 *
 * The arithmetic is the CPU's, from the same header. No thread talks to another, so the tests run these lines on the
 * CPU.
 */
#include "kernel.cuh"
#include "update/compact.h"

namespace zs {

/* Calls update(group, n elements, kind, coded) with constants for the last two. */
template <class Update> ZS_DEVICE void over_groups(const zs_cuda_compact_args &args, const Update &update)
{
    for (int64_t i = thread_number(); i * ZS_GROUP < args.cut.numel; i += thread_count()) {
        const bool coded = args.coded != 0;
        const zs_group group = zs_group_at(&args.group, i * ZS_GROUP, static_cast<int>(args.kind), coded);
        const int64_t left = args.cut.numel - i * ZS_GROUP;
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
    const zs_cuda_compact_args &args;
    ZS_DEVICE void operator()(const zs_group *group, int n, int kind, bool coded) const
    {
        zs_group_adam(group, &args.rule.adam, n, kind, coded);
    }
};

/* SGD. */
template <bool MOMENTUM> struct CompactSgd {
    const zs_cuda_compact_args &args;
    ZS_DEVICE void operator()(const zs_group *group, int n, int kind, bool coded) const
    {
        zs_group_sgd(group, &args.rule.sgd, n, kind, MOMENTUM, MOMENTUM && coded);
    }
};

} // namespace zs

/* A kernel for each rule. */
ZS_KERNEL(zs_compact_adam, zs_cuda_compact_args, 1)
{
    zs::over_groups(args, zs::CompactAdam{args});
}
/* Without momentum. */
ZS_KERNEL(zs_compact_sgd, zs_cuda_compact_args, 1)
{
    zs::over_groups(args, zs::CompactSgd<false>{args});
}
/* With momentum. */
ZS_KERNEL(zs_compact_momentum, zs_cuda_compact_args, 1)
{
    zs::over_groups(args, zs::CompactSgd<true>{args});
}
