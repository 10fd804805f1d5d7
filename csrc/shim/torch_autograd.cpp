// torch_autograd.cpp - gradients and hooks: autograd's part of tensor.h.
//
// Hooks run on autograd's threads without the GIL and hold a reference to their context. When one fails, the raiser
// that the binding registered sets the Python exception, which passes through autograd as a python_error, so that
// backward() raises it unchanged.
#include "shim/torch_internal.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

namespace {

namespace ag = torch::autograd;
using zs::guarded;

void (*raise_from_record)(void) = nullptr;

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

    // For places that must not raise.
    void run_quietly(int64_t arg) const
    {
        zs_clear_error();
        (void)hook_.call(hook_.ctx, arg);
        zs_clear_error();
    }

  private:
    zs_hook hook_;
};

// Compiled autograd asks each hook for its code to compile.
[[noreturn]] void refuse_compiled()
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyErr_SetString(PyExc_NotImplementedError,
                    "compiled autograd cannot run zshard's hooks: use torch.compile(model), which compiles forward "
                    "and backward, and call backward() outside of torch._dynamo.compiled_autograd");
    python_error error;
    error.persist();
    PyGILState_Release(gil);
    throw error;
}

struct BeforeBackward final : ag::FunctionPreHook {
    explicit BeforeBackward(const zs_hook &hook) : ref(hook) {}
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override { refuse_compiled(); }
    ag::variable_list operator()(const ag::variable_list &grads) override
    {
        ref.run();
        return grads;
    }
    HookRef ref;
};

// torch has one slot per tensor for this kind of hook; `users` keeps the user's own hook.
struct GradReady final : ag::PostAccumulateGradHook {
    GradReady(const zs_hook &hook, std::unique_ptr<ag::PostAccumulateGradHook> users_)
        : ref(hook), users(std::move(users_))
    {
    }
    void operator()(const ag::Variable &) override { ref.run(); }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override { refuse_compiled(); }
    HookRef ref;
    std::unique_ptr<ag::PostAccumulateGradHook> users;
};

// The exception of the last abandoned backward on this thread; "" if unknown.
thread_local char failure[160];

void write_failure(const char *kind, const char *text)
{
    std::snprintf(failure, sizeof failure, "%s%s%s", kind, *text != 0 ? ": " : "", text);
}

// A Python exception, as in the last line of its traceback.
void describe_python(const python_error &error)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *text = error.value != nullptr ? PyObject_Str(error.value) : nullptr;
    const char *utf8 = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
    const bool named = error.type != nullptr && PyType_Check(error.type);
    const char *name = named ? reinterpret_cast<PyTypeObject *>(error.type)->tp_name : "an exception";
    write_failure(name, utf8 != nullptr ? utf8 : "");
    Py_XDECREF(text);
    PyErr_Clear();
    PyErr_Restore(kind, value, trace);
    PyGILState_Release(gil);
}

void describe_failure(std::exception_ptr pointer)
{
    try {
        std::rethrow_exception(std::move(pointer));
    } catch (const python_error &error) {
        describe_python(error);
    } catch (const c10::Error &error) {
        write_failure("RuntimeError", error.what_without_backtrace());
    } catch (const std::exception &error) {
        write_failure("RuntimeError", error.what());
    } catch (...) {
        write_failure("an exception", "");
    }
}

// The backward that is running on this thread. torch exposes only a part of it; this is the full object.
ag::GraphTask *running_task()
{
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof" // well defined without virtual bases
    constexpr std::size_t offset = offsetof(ag::GraphTask, exec_info_);
#pragma GCC diagnostic pop
    const auto *part = ag::get_current_graph_task_exec_info();
    if (part == nullptr) return nullptr;
    return reinterpret_cast<ag::GraphTask *>(reinterpret_cast<std::uintptr_t>(part) - offset);
}

// torch drops the callbacks of a backward that raises and never runs them: this notices when it is dropped.
class BackwardEnd {
  public:
    explicit BackwardEnd(const zs_hook &hook) : ref(hook)
    {
        if (ag::GraphTask *task = running_task()) outcome = task->future_result_;
    }
    BackwardEnd(const BackwardEnd &) = delete;
    BackwardEnd &operator=(const BackwardEnd &) = delete;
    ~BackwardEnd()
    {
        if (ran) return;
        failure[0] = 0;
        if (outcome && outcome->hasError()) describe_failure(outcome->exception_ptr());
        ref.run_quietly(ZS_BACKWARD_ABANDONED);
    }

    void run()
    {
        ran = true;
        ref.run();
    }

  private:
    HookRef ref;
    c10::intrusive_ptr<at::ivalue::Future> outcome; // of the backward; holds its exception
    bool ran = false;
};

// The node that accumulates into a leaf is created once and keeps the leaf's shape and dtype. One created while a
// parameter was sharded would refuse all later full gradients. It stays the same node: scripts have hooks on it, ask
// whether a backward runs it (register_multi_grad_hook), or have an edge to it in a custom Function's forward.
void follow_form(const at::Tensor &tensor)
{
    if (ag::impl::get_autograd_meta(tensor) == nullptr) return;
    auto node = ag::impl::try_get_grad_accumulator(tensor);
    if (!node) return;
    const auto &seen = node->input_metadata(0);
    if (seen.is_same_shape(tensor) && seen.options().dtype() == tensor.dtype()) return;
    node->clear_input_metadata();
    node->add_input_metadata(tensor);
}

GradReady *our_hook(const at::Tensor &tensor)
{
    if (ag::impl::get_autograd_meta(tensor) == nullptr) return nullptr;
    return dynamic_cast<GradReady *>(ag::impl::post_acc_grad_hooks(tensor).get());
}

void copy_elements(void *dst, const at::Tensor &src, at::IntArrayRef sizes, at::ScalarType type, bool add)
{
    if (!add && zs::plain_dense(src) && src.device().is_cpu() && src.scalar_type() == type) {
        zs::copy_bytes(dst, src.const_data_ptr(), src.nbytes());
        return;
    }
    at::NoGradGuard no_grad;
    at::Tensor target = zs::view_of(dst, sizes, type, src.device());
    const bool sparse = src.layout() != at::kStrided;
    if (sparse && !add) target.zero_();
    if (sparse || add) {
        target.add_(src);
    } else {
        target.copy_(src);
    }
}

// Walks a graph from its roots, without recursion, as a graph may be as deep as it is large.
class GraphWalk {
  public:
    explicit GraphWalk(const zs_graph_visitor &visitor) : visitor_(visitor) { places_.reserve(1024); }

    zs_status go_from(ag::Node *root)
    {
        if (root == nullptr || accumulates(root)) return ZS_OK;
        ZS_TRY(step(nullptr, root));
        while (!waiting_.empty()) {
            ag::Node *node = waiting_.back();
            waiting_.pop_back();
            const zs_node_at from = at(node, places_.find(node)->second);
            for (const ag::Edge &edge : node->next_edges())
                if (edge.function && !accumulates(edge.function.get())) ZS_TRY(step(&from, edge.function.get()));
        }
        return ZS_OK;
    }

  private:
    static bool accumulates(const ag::Node *node) { return node->sequence_nr() == UINT64_MAX; }

    static zs_node_at at(const ag::Node *node, int64_t place)
    {
        return {node->thread_id(), static_cast<int64_t>(node->sequence_nr()), place};
    }

    zs_status step(const zs_node_at *from, ag::Node *node)
    {
        auto [found, is_new] = places_.emplace(node, -1);
        if (is_new) {
            found->second = visitor_.place(visitor_.ctx, node->thread_id(), static_cast<int64_t>(node->sequence_nr()));
            waiting_.push_back(node);
        }
        if (found->second == (from != nullptr ? from->place : -1)) return ZS_OK;
        const zs_node_at to = at(node, found->second);
        return visitor_.edge(visitor_.ctx, from, &to, reinterpret_cast<zs_node *>(node));
    }

    const zs_graph_visitor &visitor_;
    ska::flat_hash_map<ag::Node *, int64_t> places_; // of all visited nodes
    std::vector<ag::Node *> waiting_;                // whose edges are still to be followed
};

// torch 2.13 holds nodes from Python by counted references, earlier versions hold some by weak ones.
template <typename Held> ag::Node *held_node(const Held &held)
{
    return held.get();
}

template <typename T> ag::Node *held_node(const std::weak_ptr<T> &held)
{
    return held.lock().get();
}

// The node where a backward begins: of a tensor, or of the first element of a GradientEdge; nullptr: none.
ag::Node *root_node(PyObject *root)
{
    if (THPVariable_Check(root)) return THPVariable_Unpack(root).grad_fn().get();
    if (!PyTuple_Check(root) || PyTuple_GET_SIZE(root) == 0) return nullptr;
    PyObject *node = PyTuple_GET_ITEM(root, 0);
    if (THPFunction_Check(node)) return held_node(reinterpret_cast<THPFunction *>(node)->cdata);
    if (ag::THPCppFunction_Check(node)) return held_node(reinterpret_cast<ag::THPCppFunction *>(node)->cdata);
    return nullptr;
}
} // namespace

extern "C" {

// --- gradients -------------------------------------------------------------------------------------------------------

zs_status zs_grad_describe(const zs_tensor *handle, zs_grad_info *info)
{
    return guarded([&] {
        const at::Tensor &grad = handle->tensor.grad();
        *info = zs_grad_info{grad.defined(), ZS_BYTES, 0, false, {}, nullptr, nullptr, 0};
        if (!grad.defined()) return ZS_OK;
        info->dtype = zs::dtype_of(grad.scalar_type());
        info->numel = grad.numel();
        info->dense = zs::plain_dense(grad);
        info->where = zs::where_of(grad.device());
        info->data = info->dense ? grad.data_ptr() : nullptr;
        info->mem = zs::mem_under(grad);
        info->version = grad.is_inference() ? 0 : grad._version();
        return ZS_OK;
    });
}

zs_status zs_grad_copy(const zs_tensor *handle, void *dst, zs_dtype dtype, bool add)
{
    return guarded([&] {
        const at::Tensor &grad = handle->tensor.grad();
        copy_elements(dst, grad, handle->tensor.sizes(), zs::scalar_type_of(dtype, grad.scalar_type()), add);
        return ZS_OK;
    });
}

zs_status zs_grad_set(zs_tensor *handle, const zs_tensor *grad)
{
    return guarded([&] {
        handle->tensor.mutable_grad() = grad == nullptr ? at::Tensor() : grad->tensor;
        return ZS_OK;
    });
}

zs_status zs_grad_cast(zs_tensor *handle, zs_dtype dtype)
{
    return guarded([&] {
        at::Tensor &grad = handle->tensor.mutable_grad();
        if (grad.defined()) grad = grad.to(zs::scalar_type_of(dtype, grad.scalar_type()));
        return ZS_OK;
    });
}

zs_status zs_grad_is(const zs_tensor *handle, const zs_tensor *grad, bool *same)
{
    return guarded([&] {
        *same = handle->tensor.grad().is_same(grad->tensor);
        return ZS_OK;
    });
}

// --- hooks -----------------------------------------------------------------------------------------------------------

zs_status zs_hook_grad_ready(zs_tensor *handle, const zs_hook *hook)
{
    return guarded([&] {
        const at::Tensor &tensor = handle->tensor;
        follow_form(tensor);
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

zs_status zs_hook_grad_remove(zs_tensor *handle)
{
    return guarded([&] {
        GradReady *ours = our_hook(handle->tensor);
        if (ours == nullptr) return ZS_OK;
        std::unique_ptr<ag::PostAccumulateGradHook> users = std::move(ours->users);
        ag::impl::set_post_acc_grad_hooks(handle->tensor, std::move(users));
        return ZS_OK;
    });
}

bool zs_hook_has_users(const zs_tensor *handle)
{
    GradReady *ours = our_hook(handle->tensor);
    return ours != nullptr && ours->users != nullptr;
}

zs_status zs_hook_run_users(zs_tensor *handle)
{
    return guarded([&] {
        GradReady *ours = zs::has_raised() ? nullptr : our_hook(handle->tensor);
        if (ours != nullptr && ours->users != nullptr) (*ours->users)(handle->tensor);
        return ZS_OK;
    });
}

zs_status zs_hook_backward_end(const zs_hook *hook)
{
    return guarded([&] {
        auto end = std::make_shared<BackwardEnd>(*hook);
        ag::Engine::get_default_engine().queue_callback([end] { end->run(); });
        return ZS_OK;
    });
}

const char *zs_backward_failure(void)
{
    return failure;
}

bool zs_in_backward(void)
{
    return ag::get_current_graph_task_id() != -1;
}

int64_t zs_next_node(void)
{
    return static_cast<int64_t>(at::sequence_number::peek());
}

bool zs_grad_mode(void)
{
    return at::GradMode::is_enabled();
}

void zs_py_set_raiser(void (*raise)(void))
{
    raise_from_record = raise;
}

uint64_t zs_node_thread(void)
{
    return at::RecordFunction::currentThreadId();
}

zs_status zs_hook_node(zs_node *handle, const zs_hook *hook)
{
    return guarded([&] {
        auto *node = reinterpret_cast<ag::Node *>(handle);
        for (const auto &each : node->pre_hooks()) {
            auto *ours = dynamic_cast<BeforeBackward *>(each.get());
            if (ours != nullptr && ours->ref.same_as(*hook)) return ZS_OK;
        }
        node->add_pre_hook(std::make_unique<BeforeBackward>(*hook));
        return ZS_OK;
    });
}

zs_status zs_py_visit_graph(PyObject *roots, const zs_graph_visitor *visitor)
{
    return guarded([&] {
        GraphWalk walk(*visitor);
        for (Py_ssize_t i = 0; PyTuple_Check(roots) && i < PyTuple_GET_SIZE(roots); i++)
            ZS_TRY(walk.go_from(root_node(PyTuple_GET_ITEM(roots, i))));
        return ZS_OK;
    });
}
}
