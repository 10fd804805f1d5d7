/* fake_cuda_kernels.cpp - the kernels of cuda/, compiled for the host, by their names. See fake_device.hpp. */
#include "fake_device.hpp"

#include "../../cuda/kernels.cu"

static fake_kernel *&all()
{
    static fake_kernel *first;
    return first;
}

fake_registration::fake_registration(const char *its_name, void (*its_run)(const void *), size_t its_bytes)
    : fake_kernel{its_name, its_run, its_bytes, all()}
{
    all() = this;
}

const fake_kernel *fake_kernel_find(const char *name)
{
    for (const fake_kernel *one = all(); one != nullptr; one = one->next)
        if (strcmp(one->name, name) == 0) return one;
    return nullptr;
}

/* Only these have lanes that meet; others need not be fibers, which take longer. */
static bool meets(const fake_kernel *kernel)
{
    return strncmp(kernel->name, "zs_compact_", strlen("zs_compact_")) == 0;
}

void fake_kernel_run(const fake_kernel *kernel, unsigned blocks, unsigned threads, const void *args)
{
    const bool warps = meets(kernel);
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (unsigned i = 0; i < threads; i += warps ? 32 : 1) {
            threadIdx.x = i;
            warps ? fake_warp_run(kernel->run, args, i) : kernel->run(args);
        }
    }
}
