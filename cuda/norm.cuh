/* norm.cuh - sums of |x|^p, and whether two ranges of bytes differ.
 *
 * A norm has the same bits on every run and on every GPU. Which thread takes which elements follows from the
 * length alone, each keeps its own double, and a second kernel adds those up in a fixed order; no atomics anywhere.
 */
#include "kernel.cuh"

namespace zs {

/* Adds `value` to `total`, or takes the larger; NaN comes through. */
ZS_DEVICE double fold(uint32_t kind, double total, double value)
{
    if (kind != ZS_CUDA_MAX) return total + value;
    return total >= value || total != total ? total : value;
}

/* An element's contribution to the norm. */
ZS_DEVICE double measure(uint32_t kind, double value)
{
    return kind == ZS_CUDA_SQUARE ? value * value : fabs(value);
}

/* The norm of this thread's elements. They follow from the length alone: packs are not cut to be aligned here. */
template <class D> ZS_DEVICE void norm(const zs_cuda_norm_args &args)
{
    const int64_t step = thread_count() * ZS_CUDA_NORM_PACK;
    double total = 0;
#pragma unroll 2
    for (int64_t at = thread_number() * ZS_CUDA_NORM_PACK; at < args.numel; at += step) {
        const int64_t left = args.numel - at;
        if (args.aligned && left >= ZS_CUDA_NORM_PACK) {
            const Words<D, ZS_CUDA_NORM_PACK> words = load<D, ZS_CUDA_NORM_PACK, By::STREAM>(args.x, at);
#pragma unroll
            for (int i = 0; i < ZS_CUDA_NORM_PACK; i++)
                total = fold(args.kind, total, measure(args.kind, D::load(words.at[i])));
        } else {
            for (int i = 0; i < ZS_CUDA_NORM_PACK && i < left; i++) {
                const Words<D, 1> word = load<D, 1, By::CACHE>(args.x, at + i);
                total = fold(args.kind, total, measure(args.kind, D::load(word.at[0])));
            }
        }
    }
    args.partial[thread_number()] = total;
}

struct Bytes { // moved and compared, no number
    using Word = uint8_t;
};

struct Differs {
    const zs_cuda_differs_args &args;

    template <int N> ZS_DEVICE void run(int64_t at) const
    {
        const Words<Bytes, N> a = load<Bytes, N, By::PEER>(args.a, at), b = load<Bytes, N, By::PEER>(args.b, at);
        bool differs = false;
#pragma unroll
        for (int i = 0; i < N; i++)
            differs = differs || a.at[i] != b.at[i];
        if (differs) *args.flag = 1; // all who write it write the same
    }
};

} // namespace zs

#define NORM(d, D)                               \
    ZS_KERNEL(zs_norm_##d, zs_cuda_norm_args, 4) \
    {                                            \
        zs::norm<zs::D>(args);                   \
    }

/* By dtype. */
NORM(f32, F32)
NORM(f64, F64)
NORM(bf16, BF16)
NORM(f16, F16)

#undef NORM

/* Adds up one level. */
ZS_KERNEL(zs_fold, zs_cuda_fold_args, 4)
{
    const int64_t at = zs::thread_number();
    if (at >= args.n_out) return;
    double total = 0;
#pragma unroll 8
    for (int64_t i = at; i < args.n_in; i += args.n_out)
        total = zs::fold(args.kind, total, args.in[i]);
    args.out[at] = total;
}

/* Compares bytes. */
ZS_KERNEL(zs_differs, zs_cuda_differs_args, 4)
{
    zs::over<zs::pack_of<zs::Bytes>>(args.cut, zs::Differs{args});
}
