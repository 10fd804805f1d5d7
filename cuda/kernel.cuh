/* kernel.cuh - building blocks of all kernels: number types, packs of elements, and the walk over flat memory.
 *
 * A kernel's body is written once, for N elements at a place; `over` runs it with N = a pack, which is 16 bytes of the
 * widest array, wherever all arrays are aligned together, and with N = 1 at the edges. So the threads of a warp access
 * neighbouring bytes: with two accesses each (8 floats), an AdamW step took a fifth longer on an H200. Nothing here
 * talks to other threads (compact.cuh does), so the tests run the same lines on the CPU, a thread of the grid after the
 * other: they define ZS_KERNEL themselves (tests/c/fake_device.hpp).
 */
#ifndef ZS_KERNEL_CUH
#define ZS_KERNEL_CUH

#include "device/cuda_args.h"

#ifndef ZS_KERNEL
/* Head of a kernel that has at least `blocks` blocks on a multiprocessor at a time, which bounds its registers. */
#define ZS_KERNEL(name, Args, blocks) \
    extern "C" __global__ void __launch_bounds__(ZS_CUDA_BLOCK, blocks) name(const __grid_constant__ Args args)
#endif
#define ZS_DEVICE __device__ __forceinline__

namespace zs {

/* --- numbers: Word in memory, computed as Real; BLOCKS on a multiprocessor leave it enough registers
 * -------------------- */

struct F32 { // float32
    static constexpr int BLOCKS = 4;
    using Word = float;
    using Real = float;
    ZS_DEVICE static float load(float word) { return word; }
    ZS_DEVICE static float store(double value) { return static_cast<float>(value); }
    ZS_DEVICE static float store(float value) { return value; }
};

struct F64 { // float64
    static constexpr int BLOCKS = 2;
    using Word = double;
    using Real = double;
    ZS_DEVICE static double load(double word) { return word; }
    ZS_DEVICE static double store(double value) { return value; }
};

struct BF16 { // bfloat16
    static constexpr int BLOCKS = 4;
    using Word = zs_bf16;
    using Real = float;
    ZS_DEVICE static float load(zs_bf16 word) { return zs_from_bf16(word); }
    ZS_DEVICE static zs_bf16 store(double value) { return zs_to_bf16(static_cast<float>(value)); }
    ZS_DEVICE static zs_bf16 store(float value) { return zs_to_bf16(value); }
};

struct F16 { // float16
    static constexpr int BLOCKS = 3;
    using Word = zs_f16;
    using Real = float;
    ZS_DEVICE static float load(zs_f16 word) { return zs_from_f16(word); }
    ZS_DEVICE static zs_f16 store(double value) { return zs_to_f16(static_cast<float>(value)); }
    ZS_DEVICE static zs_f16 store(float value) { return zs_to_f16(value); }
};

/* The precision for two dtypes together: double if either is computed in it. */
template <class A, class B> using Wider = decltype(typename A::Real() + typename B::Real());

/* Blocks on a multiprocessor for kernels of two dtypes. */
template <class A, class B> constexpr int blocks_of()
{
    return A::BLOCKS < B::BLOCKS ? A::BLOCKS : B::BLOCKS;
}

/* --- packs -------------------------------------------------------------------------------------------------------- */

/* N elements next to one another, in registers. */
template <class D, int N> struct Words {
    typename D::Word at[N];
};

/* The cache policy of a load or store. */
enum class By {
    CACHE,  // will be wanted again soon
    STREAM, // passes once: first to be evicted
    PEER,   // may have been written by another device or process: never out of this one's caches
};

/* The type that `BYTES` are accessed as. */
template <int BYTES> struct Access;
template <> struct Access<4> {
    using Type = unsigned;
};
template <> struct Access<8> {
    using Type = uint2;
};
template <> struct Access<16> {
    using Type = uint4;
};

/* N words, in as many accesses as they need. */
template <class D, int N> struct Accesses {
    static constexpr int ALL = N * static_cast<int>(sizeof(typename D::Word));
    static constexpr int EACH = ALL < ZS_CUDA_QUAD ? ALL : ZS_CUDA_QUAD;
    static constexpr int COUNT = ALL / EACH;
    using Type = typename Access<EACH>::Type;
};

/* One access. */
template <By by, class Type> ZS_DEVICE Type load_one(const Type *from)
{
    if constexpr (by == By::STREAM) return __ldcs(from);
    if constexpr (by == By::PEER) return __ldcv(from);
    return *from;
}

/* Elements [at, at + N) of `array`; N = 1, or the access is aligned. */
template <class D, int N, By by> ZS_DEVICE Words<D, N> load(const void *array, int64_t at)
{
    Words<D, N> words;
    const typename D::Word *from = static_cast<const typename D::Word *>(array) + at;
    if constexpr (N == 1) {
        words.at[0] = by == By::PEER ? *static_cast<const volatile typename D::Word *>(from) : *from;
    } else {
        using Way = Accesses<D, N>;
#pragma unroll
        for (int i = 0; i < Way::COUNT; i++) {
            const auto one = load_one<by>(reinterpret_cast<const typename Way::Type *>(from) + i);
            memcpy(reinterpret_cast<char *>(words.at) + i * Way::EACH, &one, sizeof one);
        }
    }
    return words;
}

/* Writes them there. */
template <class D, int N, By by> ZS_DEVICE void store(void *array, int64_t at, const Words<D, N> &words)
{
    typename D::Word *to = static_cast<typename D::Word *>(array) + at;
    if constexpr (N == 1) {
        *to = words.at[0];
    } else {
        using Way = Accesses<D, N>;
#pragma unroll
        for (int i = 0; i < Way::COUNT; i++) {
            typename Way::Type one;
            memcpy(&one, reinterpret_cast<const char *>(words.at) + i * Way::EACH, sizeof one);
            typename Way::Type *place = reinterpret_cast<typename Way::Type *>(to) + i;
            if constexpr (by == By::STREAM) {
                __stcs(place, one);
            } else {
                *place = one;
            }
        }
    }
}

/* Elements of a pack of arrays of these dtypes. */
template <class A, class B = A>
constexpr int pack_of =
    ZS_CUDA_QUAD / static_cast<int>(sizeof(typename A::Word) > sizeof(typename B::Word) ? sizeof(typename A::Word)
                                                                                        : sizeof(typename B::Word));

/* --- the walk
 * ---------------------------------------------------------------------------------------------------------------- */

/* This thread's number in the grid. */
ZS_DEVICE int64_t thread_number()
{
    return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

/* Threads in the grid. */
ZS_DEVICE int64_t thread_count()
{
    return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

/* Thread `i` of those that share the cut runs body.run<N>(at) for pack i, with N = PACK, and for element i of those at
 * the ends, with N = 1. There is a thread for each (zs_cuda_blocks_for). */
template <int PACK, class Body> ZS_DEVICE void over(const zs_cuda_cut &cut, const Body &body, int64_t i)
{
    if (i < cut.packs) body.template run<PACK>(cut.head + i * PACK);
    const int64_t packed = cut.packs * PACK;
    if (i < cut.numel - packed) body.template run<1>(i < cut.head ? i : i + packed);
}

/* By all threads of the grid. */
template <int PACK, class Body> ZS_DEVICE void over(const zs_cuda_cut &cut, const Body &body)
{
    over<PACK>(cut, body, thread_number());
}

} // namespace zs

#endif
