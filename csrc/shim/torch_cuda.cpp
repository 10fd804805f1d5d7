// torch_cuda.cpp - see torch_cuda.h.
#include "shim/torch_internal.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

extern "C" {
#include "shim/torch_cuda.h"
}

using zs::guarded;

namespace {

c10::Device gpu(int index)
{
    return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

// As torch's own operators raise it.
zs_status out_of_memory(const char *text)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *kind = torch != nullptr ? PyObject_GetAttrString(torch, "OutOfMemoryError") : nullptr;
    if (kind != nullptr) PyErr_SetString(kind, text);
    Py_XDECREF(kind);
    Py_XDECREF(torch);
    PyGILState_Release(gil);
    return zs::fail_torch(text);
}

} // namespace

extern "C" {

zs_status zs_torch_cuda_alloc(int index, size_t bytes, void **ptr, void **owner)
{
    return guarded([&] {
        try {
            const c10::DeviceGuard guard(gpu(index));
            auto data = std::make_unique<c10::DataPtr>(c10::GetAllocator(at::kCUDA)->allocate(bytes));
            *ptr = data->get();
            *owner = data.release();
            return ZS_OK;
        } catch (const c10::OutOfMemoryError &error) {
            return out_of_memory(error.what_without_backtrace());
        }
    });
}

void zs_torch_cuda_free(void *owner)
{
    try {
        delete static_cast<c10::DataPtr *>(owner);
    } catch (...) { // the driver has shut down: the process is exiting
    }
}

zs_status zs_torch_cuda_stream(int index, void **stream)
{
    return guarded([&] {
        *stream = c10::impl::VirtualGuardImpl(at::kCUDA).getStream(gpu(index)).native_handle();
        return ZS_OK;
    });
}
}
