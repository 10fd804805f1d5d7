// torch_shim.cpp - the only file that sees ATen and autograd; the implementation of tensor.h.
//
// The one idea: C++ ends here. Every function is extern "C", catches everything, and turns it into a zs_status with
// torch's own text; every object it hands out is a counted handle. It owns no flat memory and does not know units.
//
// Hooks run on autograd's threads without the GIL. When one fails, the raiser that the binding registered makes the
// Python exception, and it leaves through autograd as a python_error, so that backward() raises it unchanged.
#include <torch/csrc/python_headers.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>

extern "C" {
#include "tensor_py.h"
}

// A weak handle keeps only torch's weak count; its `tensor` is a borrowed pointer, given up uncounted at the end.
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
};

namespace {

namespace ag = torch::autograd;

void (*raise_from_record)(void) = nullptr;

zs_status fail_torch(const char *where, const char *what)
{
    return zs_fail_at(where, 0, ZS_ERR_TORCH, "%s", what);
}

// Runs `body`, turning any exception into a status. A python_error is left set as the current Python exception.
template <typename Body> zs_status guarded(const char *where, Body body) noexcept
{
    try {
        return body();
    } catch (python_error &error) {
        PyGILState_STATE gil = PyGILState_Ensure();
        error.restore();
        PyGILState_Release(gil);
        return fail_torch(where, "a Python exception was raised");
    } catch (const c10::Error &error) {
        return fail_torch(where, error.what_without_backtrace());
    } catch (const std::exception &error) {
        return fail_torch(where, error.what());
    } catch (...) {
        return fail_torch(where, "unknown C++ exception");
    }
}

// A counted reference to the hook's context.
class HookRef {
  public:
    explicit HookRef(const zs_hook &hook) : hook_(hook) { hook_.retain(hook_.ctx); }
    HookRef(const HookRef &other) : hook_(other.hook_) { hook_.retain(hook_.ctx); }
    HookRef &operator=(const HookRef &) = delete;
    ~HookRef() { hook_.release(hook_.ctx); }

    bool same_as(const zs_hook &other) const { return hook_.ctx == other.ctx && hook_.arg == other.arg; }

    void run() const
    {
        zs_clear_error();
        if (hook_.call(hook_.ctx, hook_.arg) == ZS_OK) return;
        PyGILState_STATE gil = PyGILState_Ensure();
        if (!PyErr_Occurred()) raise_from_record();
        python_error error;
        error.persist();
        PyGILState_Release(gil);
        throw error;
    }

  private:
    zs_hook hook_;
};

struct BeforeBackward final : ag::FunctionPreHook {
    explicit BeforeBackward(const zs_hook &hook) : ref(hook) {}
    ag::variable_list operator()(const ag::variable_list &grads) override
    {
        ref.run();
        return grads;
    }
    HookRef ref;
};

// torch has one slot per tensor for this kind of hook; a user's goes on living in `users`.
struct GradReady final : ag::PostAccumulateGradHook {
    GradReady(const zs_hook &hook, std::unique_ptr<ag::PostAccumulateGradHook> users_)
        : ref(hook), users(std::move(users_))
    {
    }
    void operator()(const ag::Variable &) override { ref.run(); }
    HookRef ref;
    std::unique_ptr<ag::PostAccumulateGradHook> users;
};

GradReady *our_hook(const at::Tensor &tensor)
{
    if (ag::impl::get_autograd_meta(tensor) == nullptr) return nullptr;
    return dynamic_cast<GradReady *>(ag::impl::post_acc_grad_hooks(tensor).get());
}

zs_dtype dtype_of(at::ScalarType type)
{
    switch (type) {
    case at::kFloat:
        return ZS_F32;
    case at::kDouble:
        return ZS_F64;
    case at::kBFloat16:
        return ZS_BF16;
    case at::kHalf:
        return ZS_F16;
    default:
        return ZS_BYTES;
    }
}

at::ScalarType scalar_type_of(zs_dtype dtype, at::ScalarType otherwise)
{
    switch (dtype) {
    case ZS_F32:
        return at::kFloat;
    case ZS_F64:
        return at::kDouble;
    case ZS_BF16:
        return at::kBFloat16;
    case ZS_F16:
        return at::kHalf;
    default:
        return otherwise;
    }
}

void row_major(int ndim, const int64_t *sizes, int64_t *strides)
{
    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        strides[d] = step;
        step *= std::max<int64_t>(sizes[d], 1);
    }
}

void set_geometry(c10::TensorImpl *impl, int64_t offset, int ndim, const int64_t *sizes)
{
    int64_t strides[ZS_MAX_DIM];
    row_major(ndim, sizes, strides);
    auto length = static_cast<size_t>(ndim);
    impl->set_sizes_and_strides({sizes, length}, {strides, length}, offset);
}

void release_mem(void *context)
{
    zs_mem_release(static_cast<zs_mem *>(context));
}

c10::weak_intrusive_ptr<at::TensorImpl> weak_to(const at::Tensor &tensor)
{
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    c10::raw::intrusive_ptr::incref(impl);
    return c10::weak_intrusive_ptr<at::TensorImpl>(c10::intrusive_ptr<at::TensorImpl>::reclaim(impl));
}

bool plain_dense(const at::Tensor &tensor)
{
    return tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.is_contiguous();
}

// Large copies are split over torch's threads: one core does not reach the machine's memory bandwidth.
void copy_bytes(void *dst, const void *src, size_t bytes)
{
    constexpr int64_t grain = 1 << 20;
    at::parallel_for(0, static_cast<int64_t>(bytes), grain, [&](int64_t begin, int64_t end) {
        memcpy(static_cast<char *>(dst) + begin, static_cast<const char *>(src) + begin,
               static_cast<size_t>(end - begin));
    });
}

void copy_elements(void *dst, const at::Tensor &src, at::IntArrayRef sizes, at::ScalarType type, bool add)
{
    if (!add && plain_dense(src) && src.scalar_type() == type) {
        copy_bytes(dst, src.const_data_ptr(), src.nbytes());
        return;
    }
    at::NoGradGuard no_grad;
    at::Tensor target = at::from_blob(dst, sizes, at::TensorOptions().dtype(type));
    const bool sparse = src.layout() != at::kStrided;
    if (sparse && !add) target.zero_();
    if (sparse || add) {
        target.add_(src);
    } else {
        target.copy_(src);
    }
}

} // namespace

extern "C" {

// --- tensors ---------------------------------------------------------------------------------------------------------

zs_tensor *zs_tensor_retain(const zs_tensor *tensor)
{
    return new zs_tensor(tensor->tensor);
}

zs_tensor *zs_tensor_new_weak(const zs_tensor *tensor)
{
    return new zs_tensor(weak_to(tensor->tensor));
}

bool zs_tensor_alive(const zs_tensor *tensor)
{
    return !tensor->weak || !tensor->weak->expired();
}

bool zs_tensor_same(const zs_tensor *a, const zs_tensor *b)
{
    return a->tensor.unsafeGetTensorImpl() == b->tensor.unsafeGetTensorImpl();
}

void zs_tensor_free(zs_tensor *tensor)
{
    delete tensor;
}

zs_status zs_tensor_describe(const zs_tensor *handle, zs_tensor_info *info)
{
    return guarded("zs_tensor_describe", [&] {
        const at::Tensor &tensor = handle->tensor;
        info->dtype = dtype_of(tensor.scalar_type());
        info->itemsize = tensor.element_size();
        info->strided = tensor.layout() == at::kStrided && !tensor.is_quantized();
        info->on_cpu = tensor.device().is_cpu();
        info->is_meta = tensor.is_meta();
        info->requires_grad = tensor.requires_grad();
        info->is_leaf = tensor.is_leaf();
        info->numel = tensor.numel();
        if (tensor.dim() > ZS_MAX_DIM)
            return ZS_FAIL(ZS_ERR_UNSUPPORTED, "a tensor of %d dimensions; at most %d are supported",
                           static_cast<int>(tensor.dim()), ZS_MAX_DIM);
        info->ndim = static_cast<int>(tensor.dim());
        for (int d = 0; d < info->ndim; d++) info->sizes[d] = tensor.size(d);
        info->contiguous = info->strided && tensor.is_contiguous();
        return ZS_OK;
    });
}

zs_status zs_tensor_data(const zs_tensor *handle, void **data)
{
    return guarded("zs_tensor_data", [&] {
        *data = handle->tensor.data_ptr();
        return ZS_OK;
    });
}

zs_status zs_tensor_read(const zs_tensor *handle, int64_t begin, int64_t numel, void *dst)
{
    return guarded("zs_tensor_read", [&] {
        const at::Tensor source = handle->tensor.detach().contiguous();
        const size_t item = source.element_size();
        const char *data = static_cast<const char *>(source.const_data_ptr());
        copy_bytes(dst, data + static_cast<size_t>(begin) * item, static_cast<size_t>(numel) * item);
        return ZS_OK;
    });
}

zs_mem *zs_tensor_mem(const zs_tensor *handle)
{
    c10::TensorImpl *impl = handle->tensor.unsafeGetTensorImpl();
    if (!impl->has_storage()) return nullptr;
    const at::DataPtr &data = impl->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
    return data.get_deleter() == release_mem ? static_cast<zs_mem *>(data.get_context()) : nullptr;
}

void zs_tensor_bump_version(const zs_tensor *handle)
{
    ag::impl::bump_version(handle->tensor);
}

uint32_t zs_tensor_version(const zs_tensor *handle)
{
    const auto &counter = handle->tensor.unsafeGetTensorImpl()->version_counter();
    return counter.enabled() ? counter.current_version() : 0;
}

bool zs_tensor_requires_grad(const zs_tensor *handle)
{
    return handle->tensor.requires_grad();
}

// --- storages ----------------------------------------------------------------------------------------------------------

zs_status zs_storage_new(size_t bytes, const char *message, zs_storage **out)
{
    return guarded("zs_storage_new", [&] {
        auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                          static_cast<int64_t>(bytes),
                                                          at::DataPtr(nullptr, at::kCPU), nullptr, false);
        impl->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
        *out = new zs_storage{c10::Storage(std::move(impl))};
        return ZS_OK;
    });
}

void zs_storage_free(zs_storage *storage)
{
    delete storage;
}

zs_status zs_storage_fill(zs_storage *storage, zs_mem *mem, void *data)
{
    return guarded("zs_storage_fill", [&] {
        c10::StorageImpl *impl = storage->storage.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(at::DataPtr(data, zs_mem_retain(mem), release_mem, at::kCPU));
        impl->clear_data_ptr_access_error_msg_();
        return ZS_OK;
    });
}

zs_status zs_storage_clear(zs_storage *storage, const char *message)
{
    return guarded("zs_storage_clear", [&] {
        c10::StorageImpl *impl = storage->storage.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
        impl->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
        return ZS_OK;
    });
}

zs_status zs_tensor_bind(zs_tensor *handle, const zs_storage *storage, int64_t offset, int ndim, const int64_t *sizes)
{
    return guarded("zs_tensor_bind", [&] {
        c10::TensorImpl *impl = handle->tensor.unsafeGetTensorImpl();
        impl->set_storage_keep_dtype(storage->storage);
        set_geometry(impl, offset, ndim, sizes);
        return ZS_OK;
    });
}

zs_status zs_tensor_new_on(const zs_storage *storage, const zs_tensor *like, int64_t offset, int ndim,
                           const int64_t *sizes, zs_tensor **out)
{
    return guarded("zs_tensor_new_on", [&] {
        at::NoGradGuard no_grad;
        at::Tensor tensor = at::empty({0}, like->tensor.options());
        tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage->storage);
        set_geometry(tensor.unsafeGetTensorImpl(), offset, ndim, sizes);
        *out = new zs_tensor(std::move(tensor));
        return ZS_OK;
    });
}

bool zs_tensor_on_storage(const zs_tensor *handle, const zs_storage *storage)
{
    return handle->tensor.unsafeGetTensorImpl()->has_storage() &&
           handle->tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() ==
               storage->storage.unsafeGetStorageImpl();
}

// --- gradients -----------------------------------------------------------------------------------------------------------

zs_status zs_grad_describe(const zs_tensor *handle, zs_grad_info *info)
{
    return guarded("zs_grad_describe", [&] {
        const at::Tensor &grad = handle->tensor.grad();
        *info = zs_grad_info{};
        if (!grad.defined()) return ZS_OK;
        info->defined = true;
        info->dtype = dtype_of(grad.scalar_type());
        info->numel = grad.numel();
        info->dense = plain_dense(grad);
        if (info->dense) info->data = grad.data_ptr();
        return ZS_OK;
    });
}

zs_status zs_grad_copy(const zs_tensor *handle, void *dst, zs_dtype dtype, bool add)
{
    return guarded("zs_grad_copy", [&] {
        const at::Tensor &grad = handle->tensor.grad();
        copy_elements(dst, grad, handle->tensor.sizes(), scalar_type_of(dtype, grad.scalar_type()), add);
        return ZS_OK;
    });
}

void zs_grad_set(zs_tensor *handle, const zs_tensor *grad)
{
    handle->tensor.mutable_grad() = grad == nullptr ? at::Tensor() : grad->tensor;
}

bool zs_grad_is(const zs_tensor *handle, const zs_tensor *grad)
{
    return handle->tensor.grad().is_same(grad->tensor);
}

// --- hooks -----------------------------------------------------------------------------------------------------------------

zs_status zs_hook_grad_ready(zs_tensor *handle, const zs_hook *hook)
{
    return guarded("zs_hook_grad_ready", [&] {
        const at::Tensor &tensor = handle->tensor;
        GradReady *ours = our_hook(tensor);
        if (ours != nullptr && ours->ref.same_as(*hook)) return ZS_OK;
        std::unique_ptr<ag::PostAccumulateGradHook> users;
        if (ours != nullptr) {
            users = std::move(ours->users);
        } else if (ag::impl::get_autograd_meta(tensor) != nullptr) {
            users = std::move(ag::impl::post_acc_grad_hooks(tensor));
        }
        ag::impl::set_post_acc_grad_hooks(tensor, std::make_unique<GradReady>(*hook, std::move(users)));
        return ZS_OK;
    });
}

void zs_hook_grad_remove(zs_tensor *handle)
{
    GradReady *ours = our_hook(handle->tensor);
    if (ours == nullptr) return;
    std::unique_ptr<ag::PostAccumulateGradHook> users = std::move(ours->users);
    ag::impl::set_post_acc_grad_hooks(handle->tensor, std::move(users));
}

bool zs_hook_has_users(const zs_tensor *handle)
{
    GradReady *ours = our_hook(handle->tensor);
    return ours != nullptr && ours->users != nullptr;
}

zs_status zs_hook_run_users(zs_tensor *handle)
{
    return guarded("zs_hook_run_users", [&] {
        GradReady *ours = our_hook(handle->tensor);
        if (ours != nullptr && ours->users != nullptr) (*ours->users)(handle->tensor);
        return ZS_OK;
    });
}

zs_status zs_hook_backward_end(const zs_hook *hook)
{
    return guarded("zs_hook_backward_end", [&] {
        HookRef ref(*hook);
        ag::Engine::get_default_engine().queue_callback([ref] { ref.run(); });
        return ZS_OK;
    });
}

bool zs_in_backward(void)
{
    return ag::get_current_graph_task_id() != -1;
}

bool zs_grad_mode(void)
{
    return at::GradMode::is_enabled();
}

void zs_parallel_for(int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t), void *ctx)
{
    at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { fn(ctx, begin, end); });
}

// --- PyObjects ---------------------------------------------------------------------------------------------------------------

void zs_py_set_raiser(void (*raise)(void))
{
    raise_from_record = raise;
}

bool zs_py_is_tensor(PyObject *object)
{
    return THPVariable_Check(object);
}

zs_status zs_py_tensor(PyObject *object, zs_tensor **out)
{
    if (!THPVariable_Check(object))
        return ZS_FAIL(ZS_ERR_TYPE, "expected a torch.Tensor, got %s", Py_TYPE(object)->tp_name);
    return guarded("zs_py_tensor", [&] {
        *out = new zs_tensor(THPVariable_Unpack(object));
        return ZS_OK;
    });
}

PyObject *zs_py_wrap(const zs_tensor *handle)
{
    return THPVariable_Wrap(handle->tensor);
}

zs_status zs_py_hook_before_backward(PyObject *object, const zs_hook *hook, bool *hooked)
{
    return guarded("zs_py_hook_before_backward", [&] {
        const auto &node = THPVariable_Unpack(object).grad_fn();
        *hooked = node != nullptr;
        if (node) node->add_pre_hook(std::make_unique<BeforeBackward>(*hook));
        return ZS_OK;
    });
}
}
