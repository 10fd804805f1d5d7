/* fake_device.hpp - nvcc's built-ins for a host compiler: cuda/'s kernels become functions, a call for each thread.
 *
 * Kernels that talk to no other thread do not notice that the threads of a grid come one after the other. Where lanes
 * of a warp meet, each runs until it gets there before any continues (fake_cuda_warp.cpp). The compiler checks each access of a pack for its alignment (-fsanitize=alignment), as the GPU would.
 */
#ifndef FAKE_DEVICE_HPP
#define FAKE_DEVICE_HPP

#include <math.h>
#include <string.h>

#include "fake_cuda.h"

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct alignas(8) uint2 {
    unsigned x, y;
};

struct fake_index {
    unsigned x;
};

/* The place of the one running thread. */
inline thread_local fake_index blockIdx, threadIdx, blockDim, gridDim;

#define __device__
#define __forceinline__ inline __attribute__((always_inline))

template <class Type> Type __ldcs(const Type *from)
{
    return *from;
}

template <class Type> Type __ldcv(const Type *from)
{
    return *from;
}

template <class Type> void __stcs(Type *to, Type value)
{
    *to = value;
}

/* The largest `value` of all lanes of this warp. */
unsigned fake_warp_max(unsigned value);

inline unsigned __reduce_max_sync(unsigned, unsigned value)
{
    return fake_warp_max(value);
}

/* Runs `run(args)` for 32 threads of this block, from number `first` on, which may meet. */
void fake_warp_run(void (*run)(const void *), const void *args, unsigned first);

/* Enters a kernel into the list. */
struct fake_registration : fake_kernel {
    fake_registration(const char *its_name, void (*its_run)(const void *), size_t its_bytes);
};

#define ZS_KERNEL(name, Args, blocks)                                                           \
    static void name(const Args &args);                                                         \
    static fake_registration name##_entry(                                                      \
        #name, [](const void *args) { name(*static_cast<const Args *>(args)); }, sizeof(Args)); \
    static_assert((blocks) > 0, "");                                                            \
    static void name(const Args &args)

#endif
