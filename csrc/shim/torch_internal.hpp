// torch_internal.hpp - shared by the C++ files of the shim: the handles, and how an exception becomes a status.
#ifndef ZS_TORCH_INTERNAL_HPP
#define ZS_TORCH_INTERNAL_HPP

// ATen's headers then include only the operators that they use: a file compiles in half the time.
#define AT_PER_OPERATOR_HEADERS
#include <torch/csrc/python_headers.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/Exceptions.h>

#include <cstring>
#include <optional>

extern "C" {
#include "shim/tensor_py.h"
}

// A weak handle holds only torch's weak count; its `tensor` is a borrowed pointer, released without a count at the
// end.
struct zs_tensor {
    explicit zs_tensor(at::Tensor strong) : tensor(std::move(strong)) {}
    explicit zs_tensor(c10::weak_intrusive_ptr<at::TensorImpl> target)
        : tensor(c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>::reclaim(target._unsafe_get_target())),
          weak(std::move(target))
    {
    }
    zs_tensor(const zs_tensor &) = delete;
    zs_tensor &operator=(const zs_tensor &) = delete;
    ~zs_tensor()
    {
        if (weak) tensor.unsafeReleaseIntrusivePtr().release();
    }

    at::Tensor tensor;
    std::optional<c10::weak_intrusive_ptr<at::TensorImpl>> weak;
};

struct zs_storage {
    c10::Storage storage;
    c10::Device device; // of the bytes, which may change
};

namespace zs {

// Records a failure inside torch.
inline zs_status fail_torch(const char *what)
{
    return zs_fail(ZS_ERR_TORCH, "%s", what);
}

// Has a hook or step raised a Python exception on this thread, which is still to be reported?
inline bool has_raised()
{
    PyGILState_STATE gil = PyGILState_Ensure();
    const bool raised = PyErr_Occurred() != nullptr;
    PyGILState_Release(gil);
    return raised;
}

// Runs `body`, and turns any exception into a status. A python_error stays set as the current Python exception.
template <typename Body> zs_status guarded(Body body) noexcept
{
    try {
        return body();
    } catch (python_error &error) {
        PyGILState_STATE gil = PyGILState_Ensure();
        error.restore();
        PyGILState_Release(gil);
        return fail_torch("a Python exception was raised");
    } catch (const c10::Error &error) {
        return fail_torch(error.what_without_backtrace());
    } catch (const std::exception &error) {
        return fail_torch(error.what());
    } catch (...) {
        return fail_torch("unknown C++ exception");
    }
}

// The core's name for the element type.
inline zs_dtype dtype_of(at::ScalarType type)
{
    switch (type) {
    case at::kFloat: return ZS_F32;
    case at::kDouble: return ZS_F64;
    case at::kBFloat16: return ZS_BF16;
    case at::kHalf: return ZS_F16;
    default: return ZS_BYTES;
    }
}

// Its inverse; `otherwise` for ZS_BYTES, which is not a type.
inline at::ScalarType scalar_type_of(zs_dtype dtype, at::ScalarType otherwise)
{
    switch (dtype) {
    case ZS_F32: return at::kFloat;
    case ZS_F64: return at::kDouble;
    case ZS_BF16: return at::kBFloat16;
    case ZS_F16: return at::kHalf;
    default: return otherwise;
    }
}

// The core's name for a device.
inline zs_where where_of(const c10::Device &device)
{
    if (device.is_cpu()) return {ZS_ON_CPU, 0};
    if (device.is_meta()) return {ZS_ON_META, 0};
    return {device.is_cuda() ? ZS_ON_CUDA : ZS_ON_OTHER, device.has_index() ? device.index() : 0};
}

// Its inverse, for the kinds that have memory of ours.
inline c10::Device device_of(zs_where where)
{
    if (where.type != ZS_ON_CUDA) return at::kCPU;
    return {at::kCUDA, static_cast<c10::DeviceIndex>(where.index)};
}

// A row-major tensor on memory with another owner.
inline at::Tensor view_of(void *data, at::IntArrayRef sizes, at::ScalarType type, c10::Device device)
{
    const auto options = at::TensorOptions().dtype(type).device(device);
    return at::for_blob(data, sizes).options(options).target_device(device).make_tensor();
}

// The deleter of a storage on a block.
inline void release_mem(void *context)
{
    zs_mem_release(static_cast<zs_mem *>(context));
}

// The block under a tensor, as zs_tensor_mem.
inline zs_mem *mem_under(const at::Tensor &tensor)
{
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage()) return nullptr;
    const at::DataPtr &data = impl->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
    return data.get_deleter() == release_mem ? static_cast<zs_mem *>(data.get_context()) : nullptr;
}

// Do the bytes differ from the elements, because a view negates or conjugates them when it is read?
inline bool is_lazy(const at::Tensor &tensor)
{
    return tensor.is_neg() || tensor.is_conj();
}

// Is the memory row-major, with the elements as they are?
inline bool plain_dense(const at::Tensor &tensor)
{
    return tensor.layout() == at::kStrided && tensor.is_contiguous() && !is_lazy(tensor);
}

// Large copies are split over torch's threads: one core does not reach the machine's memory bandwidth.
inline void copy_bytes(void *dst, const void *src, size_t bytes)
{
    constexpr int64_t grain = 1 << 20;
    at::parallel_for(0, static_cast<int64_t>(bytes), grain, [&](int64_t begin, int64_t end) {
        memcpy(static_cast<char *>(dst) + begin, static_cast<const char *>(src) + begin,
               static_cast<size_t>(end - begin));
    });
}

} // namespace zs

#endif
