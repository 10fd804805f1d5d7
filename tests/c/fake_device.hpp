/* fake_device.hpp - what nvcc would know, for a host compiler: cuda/'s kernels become functions, a call for each thread.
 *
 * Kernels that talk to no other thread do not notice that the threads of a grid come one after the other. The
 * compiler checks each access of a pack for its alignment (-fsanitize=alignment), as the GPU would.
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

/* Where the one thread is that runs now. */
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
