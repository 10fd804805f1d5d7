// torch_shim.cpp - tensors, storages, autocast: ATen's part of tensor.h.
//
// C++ ends here. Every function is extern "C", catches all exceptions, and turns them into a zs_status with torch's
// text; every object that it returns is a counted handle. The shim (torch_*.cpp) owns no flat memory and does not
// know units.
#include "shim/torch_internal.hpp"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

// As in ATen/autocast_mode.h, which includes every operator: a third more to compile.
namespace at::autocast {
TORCH_API void clear_cache();
}

namespace {

// torch 2.11 can mark a storage as having no bytes, but has no call that removes the mark. To name a private member
// as a template argument is the only way that the language leaves.
template <auto Flag, auto Refresh> struct StorageMark {
    friend void take_mark_away(c10::StorageImpl &impl)
    {
        impl.*Flag = false;
        impl.get_extra_meta().custom_data_ptr_error_msg_ = std::nullopt;
        (impl.*Refresh)();
    }
};
void take_mark_away(c10::StorageImpl &impl);
template struct StorageMark<&c10::StorageImpl::throw_on_immutable_data_ptr_,
                            &c10::StorageImpl::refresh_has_data_ptr_check>;

template <typename Impl> void clear_mark(Impl &impl)
{
    if constexpr (requires { impl.clear_data_ptr_access_error_msg_(); }) {
        impl.clear_data_ptr_access_error_msg_();
    } else {
        take_mark_away(impl);
    }
}

using zs::copy_bytes;
using zs::dtype_of;
using zs::guarded;

void row_major(int ndim, const int64_t *sizes, int64_t *strides)
{
    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        strides[d] = step;
        step *= std::max<int64_t>(sizes[d], 1);
    }
}

void set_geometry(c10::TensorImpl *impl, const zs_place &place)
{
    int64_t strides[ZS_MAX_DIM];
    row_major(place.ndim, place.sizes, strides);
    auto length = static_cast<size_t>(place.ndim);
    const int64_t *chosen = place.strides != nullptr ? place.strides : strides;
    impl->set_sizes_and_strides({place.sizes, length}, {chosen, length}, place.offset);
}

void put(const at::Tensor &tensor, const zs_place &place)
{
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    const at::ScalarType type = zs::scalar_type_of(place.dtype, tensor.scalar_type());
    impl->set_storage_and_dtype(place.storage->storage, c10::scalarTypeToTypeMeta(type));
    if (zs::is_lazy(tensor)) { // its elements have been written there
        impl->_set_neg(false);
        impl->_set_conj(false);
    }
    set_geometry(impl, place);
}

c10::weak_intrusive_ptr<at::TensorImpl> weak_to(const at::Tensor &tensor)
{
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    c10::raw::intrusive_ptr::incref(impl);
    return c10::weak_intrusive_ptr<at::TensorImpl>(c10::intrusive_ptr<at::TensorImpl>::reclaim(impl));
}

// Is there more than one reference from C++, or any from Python? A tensor that Python has used keeps its object,
// which then holds one reference itself: torch 2.12 and later count it both ways, earlier versions record which owns
// which. The same holds for a storage.
template <typename Slot> bool held_by_python(Slot *slot, size_t uses)
{
    if constexpr (requires { slot->load_pyobj(); }) {
        PyObject *object = slot->load_pyobj();
        return uses > (object != nullptr ? 2 : 1) || (object != nullptr && Py_REFCNT(object) > 1);
    } else {
        return uses > 1;
    }
}

// Did Python use it, and does Python no longer hold it? Its object then has one of the references from C++.
template <typename Slot> bool has_idle_object(Slot *slot)
{
    if constexpr (requires { slot->load_pyobj(); }) {
        PyObject *object = slot->load_pyobj();
        return object != nullptr && Py_REFCNT(object) == 1;
    } else {
        return false;
    }
}

// While it lives, torch does not call __torch_function__ of subclasses on this thread.
class Plain {
    using TLS = at::impl::PythonTorchFunctionTLS;

  public:
    Plain()
    {
        if (before_ == at::impl::TorchFunctionDisabledState::ENABLED)
            TLS::set_disabled_state(at::impl::TorchFunctionDisabledState::SUBCLASSES_DISABLED);
    }
    ~Plain() { TLS::set_disabled_state(before_); }
    Plain(const Plain &) = delete;
    Plain &operator=(const Plain &) = delete;

  private:
    const at::impl::TorchFunctionDisabledState before_ = TLS::get_disabled_state();
};
} // namespace

extern "C" {

// --- tensors ---------------------------------------------------------------------------------------------------------

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
    return guarded([&] {
        const at::Tensor &tensor = handle->tensor;
        info->dtype = dtype_of(tensor.scalar_type());
        info->itemsize = tensor.element_size();
        info->strided = tensor.layout() == at::kStrided && !tensor.is_quantized();
        info->where = zs::where_of(tensor.device());
        info->requires_grad = tensor.requires_grad();
        info->is_leaf = tensor.is_leaf();
        info->numel = tensor.numel();
        info->ndim = static_cast<int>(tensor.dim());
        for (int d = 0; d < std::min<int>(info->ndim, ZS_MAX_DIM); d++)
            info->sizes[d] = tensor.size(d);
        const bool plain = info->strided && !zs::is_lazy(tensor);
        info->contiguous = plain && tensor.is_contiguous();
        info->dense = plain && info->numel > 1 && tensor.is_non_overlapping_and_dense();
        for (int d = 0; info->dense && d < std::min<int>(info->ndim, ZS_MAX_DIM); d++)
            info->strides[d] = tensor.stride(d);
        return ZS_OK;
    });
}

zs_status zs_tensor_data(const zs_tensor *handle, void **data)
{
    return guarded([&] {
        *data = handle->tensor.data_ptr();
        return ZS_OK;
    });
}

zs_status zs_tensor_read(const zs_tensor *handle, int64_t begin, int64_t numel, void *dst, zs_where where)
{
    return guarded([&] {
        const at::Tensor source = handle->tensor.detach().resolve_neg().resolve_conj().contiguous();
        if (where.type != ZS_ON_CPU || !source.device().is_cpu()) {
            const at::Tensor part = source.view({-1}).narrow(0, begin, numel);
            zs::view_of(dst, {numel}, source.scalar_type(), zs::device_of(where)).copy_(part);
            return ZS_OK;
        }
        const size_t item = source.element_size();
        const char *data = static_cast<const char *>(source.const_data_ptr());
        copy_bytes(dst, data + static_cast<size_t>(begin) * item, static_cast<size_t>(numel) * item);
        return ZS_OK;
    });
}

zs_status zs_tensor_write(const zs_tensor *handle, const void *src)
{
    return guarded([&] {
        const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks); // no script has asked for this
        const at::Tensor target = handle->tensor.variable_data();
        target.copy_(zs::view_of(const_cast<void *>(src), target.sizes(), target.scalar_type(), target.device()));
        return ZS_OK;
    });
}

zs_mem *zs_tensor_mem(const zs_tensor *handle)
{
    return zs::mem_under(handle->tensor);
}

void zs_tensor_bump_version(const zs_tensor *handle)
{
    torch::autograd::impl::bump_version(handle->tensor);
}

bool zs_tensor_is_kept(const zs_tensor *handle)
{
    c10::TensorImpl *impl = handle->tensor.unsafeGetTensorImpl();
    return held_by_python(impl->pyobj_slot(), static_cast<size_t>(handle->tensor.use_count()));
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

bool zs_tensor_has_own_grad_dtype(const zs_tensor *handle)
{
    return handle->tensor.grad_dtype() == handle->tensor.scalar_type();
}

// --- storages --------------------------------------------------------------------------------------------------------

zs_status zs_storage_new(zs_where where, size_t bytes, const char *message, zs_storage **out)
{
    return guarded([&] {
        const c10::Device device = zs::device_of(where);
        auto impl =
            c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes),
                                                  at::DataPtr(nullptr, device), nullptr, false);
        impl->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
        *out = new zs_storage{c10::Storage(std::move(impl)), device};
        return ZS_OK;
    });
}

void zs_storage_free(zs_storage *storage)
{
    delete storage;
}

int64_t zs_storage_users(const zs_storage *storage)
{
    int64_t users = static_cast<int64_t>(storage->storage.use_count());
    return users - (has_idle_object(storage->storage.unsafeGetStorageImpl()->pyobj_slot()) ? 1 : 0);
}

zs_status zs_storage_fill(zs_storage *storage, zs_mem *mem, void *data)
{
    return guarded([&] {
        c10::StorageImpl *impl = storage->storage.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(at::DataPtr(data, zs_mem_retain(mem), zs::release_mem, storage->device));
        clear_mark(*impl);
        return ZS_OK;
    });
}

zs_status zs_storage_clear(zs_storage *storage, const char *message)
{
    return guarded([&] {
        c10::StorageImpl *impl = storage->storage.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(at::DataPtr(nullptr, storage->device));
        impl->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
        return ZS_OK;
    });
}

zs_status zs_tensor_bind(zs_tensor *handle, const zs_place *place)
{
    return guarded([&] {
        put(handle->tensor, *place);
        return ZS_OK;
    });
}

zs_status zs_tensor_new_on(const zs_place *place, const zs_tensor *like, zs_tensor **out)
{
    return guarded([&] {
        at::NoGradGuard no_grad;
        at::Tensor tensor = at::empty({0}, like->tensor.options());
        put(tensor, *place);
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

bool zs_tensor_lies_at(const zs_tensor *handle, const zs_place *place)
{
    const c10::TensorImpl *impl = handle->tensor.unsafeGetTensorImpl();
    if (!zs_tensor_on_storage(handle, place->storage) || zs::is_lazy(handle->tensor)) return false;
    const auto length = static_cast<size_t>(place->ndim);
    const bool in_order =
        place->strides == nullptr ? impl->is_contiguous() : impl->strides() == at::IntArrayRef(place->strides, length);
    return impl->numel() == 0 || (impl->storage_offset() == place->offset && in_order);
}

// There may be casts even if autocast is off: its context may be inside one that has it on.
void zs_autocast_forget(void)
{
    (void)guarded([] {
        at::autocast::clear_cache();
        return ZS_OK;
    });
}

void zs_parallel_for(int64_t n, int64_t grain, void (*fn)(void *, int64_t, int64_t), void *ctx)
{
    at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { fn(ctx, begin, end); });
}

// --- PyObjects -------------------------------------------------------------------------------------------------------

bool zs_py_is_tensor(PyObject *object)
{
    return THPVariable_Check(object);
}

zs_status zs_py_tensor(PyObject *object, zs_tensor **out)
{
    if (!THPVariable_Check(object))
        return ZS_FAIL(ZS_ERR_TYPE, "expected a torch.Tensor, got %s", Py_TYPE(object)->tp_name);
    return guarded([&] {
        *out = new zs_tensor(THPVariable_Unpack(object));
        return ZS_OK;
    });
}

PyObject *zs_py_wrap(const zs_tensor *handle)
{
    return THPVariable_Wrap(handle->tensor);
}

int zs_py_sizes(PyObject *object, int64_t *sizes)
{
    if (!THPVariable_Check(object)) return -1;
    const at::IntArrayRef all = THPVariable_Unpack(object).unsafeGetTensorImpl()->sizes();
    std::copy_n(all.begin(), std::min<size_t>(all.size(), ZS_MAX_DIM), sizes);
    return static_cast<int>(std::min<size_t>(all.size(), ZS_MAX_DIM));
}

zs_mem *zs_py_mem(PyObject *object)
{
    return THPVariable_Check(object) ? zs::mem_under(THPVariable_Unpack(object)) : nullptr;
}

bool zs_py_is_asked(void)
{
    return at::impl::PythonTorchFunctionTLS::get_disabled_state() == at::impl::TorchFunctionDisabledState::ENABLED;
}

PyObject *zs_py_get_plain(PyObject *descriptor, PyObject *object)
{
    const Plain plain;
    return Py_TYPE(descriptor)->tp_descr_get(descriptor, object, reinterpret_cast<PyObject *>(Py_TYPE(object)));
}

int zs_py_set_plain(PyObject *descriptor, PyObject *object, PyObject *value)
{
    const Plain plain;
    return Py_TYPE(descriptor)->tp_descr_set(descriptor, object, value);
}

PyObject *zs_py_call_plain(PyObject *operation, PyObject *args, PyObject *kwargs)
{
    const Plain plain;
    return PyObject_Call(operation, args, kwargs);
}
}
