/* cast.cuh - from any dtype to any, copied or added; and scaling in place.
 *
 * What torch would do with one element, written once: both numbers are taken to the wider precision, added there,
 * and rounded once.
 */
#include "kernel.cuh"

namespace zs {

/* One cast. */
template <class From, class To> struct Cast {
    using Real = Wider<From, To>;
    const zs_cuda_cast_args &args;

    template <int N> ZS_DEVICE void run(int64_t at) const
    {
        const Words<From, N> in = load<From, N, By::STREAM>(args.src, at);
        Words<To, N> out;
        if (args.add) out = load<To, N, By::CACHE>(args.dst, at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const Real value = static_cast<Real>(From::load(in.at[i]));
            out.at[i] = To::store(args.add ? static_cast<Real>(To::load(out.at[i])) + value : value);
        }
        store<To, N, By::CACHE>(args.dst, at, out);
    }
};

/* One scaling, by a factor that is known now. */
template <class D> struct Scale {
    using Real = typename D::Real;
    const zs_cuda_scale_args &args;
    Real factor;

    template <int N> ZS_DEVICE void run(int64_t at) const
    {
        Words<D, N> words = load<D, N, By::STREAM>(args.x, at);
#pragma unroll
        for (int i = 0; i < N; i++)
            words.at[i] = D::store(D::load(words.at[i]) * factor);
        store<D, N, By::CACHE>(args.x, at, words);
    }
};

/* Finds the factor, then scales. */
template <class D> ZS_DEVICE void scale(const zs_cuda_scale_args &args)
{
    using Real = typename D::Real;
    const bool there = args.device_factor != nullptr;
    const Real factor = there ? static_cast<Real>(*args.device_factor) : static_cast<Real>(args.factor);
    over<pack_of<D>>(args.cut, Scale<D>{args, factor});
}

} // namespace zs

#define CAST(from, From, to, To)                                                             \
    ZS_KERNEL(zs_cast_##from##_##to, zs_cuda_cast_args, (zs::blocks_of<zs::From, zs::To>())) \
    {                                                                                        \
        zs::over<zs::pack_of<zs::From, zs::To>>(args.cut, zs::Cast<zs::From, zs::To>{args}); \
    }
#define CAST_TO(to, To)      \
    CAST(f32, F32, to, To)   \
    CAST(f64, F64, to, To)   \
    CAST(bf16, BF16, to, To) \
    CAST(f16, F16, to, To)
#define SCALE(d, D)                                            \
    ZS_KERNEL(zs_scale_##d, zs_cuda_scale_args, zs::D::BLOCKS) \
    {                                                          \
        zs::scale<zs::D>(args);                                \
    }

CAST_TO(f32, F32)
CAST_TO(f64, F64)
CAST_TO(bf16, BF16)
CAST_TO(f16, F16)
SCALE(f32, F32)
SCALE(f64, F64)
SCALE(bf16, BF16)
SCALE(f16, F16)

#undef CAST
#undef CAST_TO
#undef SCALE
