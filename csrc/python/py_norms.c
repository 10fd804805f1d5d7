/* py_norms.c - norms of gradients, their reduction over the ranks, and scaling, for Python.
 *
 * Each exists twice. On the CPU a norm is a number; on a GPU it is a queued one-element tensor that later kernels
 * read, so the host does not wait during a step. */
#include "python/py_util.h"

#include <math.h>

#include "device/device.h"
#include "device/pending.h"
#include "engine/engine.h"
#include "optim/optim.h"
#include "pager/pager.h"

/* --- norms on the host -------------------------------------------------------------------------------------------- */

/* Arrays of one device, to compute their norm. */
typedef struct norm_batch {
    const zs_device *device;
    zs_numbers *numbers; /* [n] */
    size_t n;
    double p, total;
} norm_batch;

/* Computes the norm of the arrays so far. */
static zs_status flush(norm_batch *batch)
{
    double part = 0;
    if (batch->n == 0) return ZS_OK;
    ZS_TRY(zs_device_norm(batch->device, batch->numbers, batch->n, batch->p, &part));
    batch->total = zs_norm_join(batch->total, part, batch->p);
    batch->n = 0;
    return ZS_OK;
}

/* Memory on a disk is valid only between `want` and `done`; everything else can wait for more. */
static zs_status add_numbers(norm_batch *batch, const zs_device *device, zs_numbers numbers)
{
    if (batch->device != device) ZS_TRY(flush(batch));
    batch->device = device;
    batch->numbers[batch->n++] = numbers;
    if (device->ops->queues) return ZS_OK;
    size_t bytes = (size_t)numbers.numel * zs_dtype_size(numbers.dtype);
    ZS_TRY(zs_pager_want(numbers.data, bytes, ZS_PAGER_READ));
    zs_status status = flush(batch);
    zs_pager_done(numbers.data, bytes);
    return status;
}

static zs_status add_tensor(norm_batch *batch, PyObject *object)
{
    zs_tensor *tensor;
    zs_tensor_info info;
    const zs_device *device = NULL;
    void *data = NULL;
    ZS_TRY(zs_py_tensor(object, &tensor));
    zs_pending_settle(zs_tensor_mem(tensor));
    zs_status status = zs_tensor_describe(tensor, &info);
    ZS_THEN(status, zs_optim_device_of(tensor, &info, &device));
    if (status == ZS_OK && (device == NULL || !info.contiguous || info.dtype == ZS_BYTES)) {
        status = ZS_FAIL(ZS_ERR_TYPE, "power_sum() expects contiguous floating-point tensors on the CPU or a GPU");
    }
    if (status == ZS_OK && info.numel > 0) status = zs_tensor_data(tensor, &data);
    if (status == ZS_OK && info.numel > 0)
        status = add_numbers(batch, device, (zs_numbers){data, info.numel, info.dtype});
    zs_tensor_free(tensor);
    return status;
}

static PyObject *power_sum(PyObject *module, PyObject *args)
{
    PyObject *tensors;
    double p;
    if (!PyArg_ParseTuple(args, "O!d:power_sum", &PyList_Type, &tensors, &p)) return NULL;
    if (p != 1 && p != 2 && p != (double)INFINITY) {
        return PyErr_Format(PyExc_ValueError, "power_sum() requires p = 1, 2 or inf");
    }
    zs_clear_error();
    Py_ssize_t n = PyList_GET_SIZE(tensors);
    norm_batch batch = {.p = p, .numbers = PyMem_Calloc((size_t)n + 1, sizeof *batch.numbers)};
    if (batch.numbers == NULL) return PyErr_NoMemory();
    zs_status status = ZS_OK;
    for (Py_ssize_t i = 0; i < n && status == ZS_OK; i++)
        status = add_tensor(&batch, PyList_GET_ITEM(tensors, i));
    ZS_THEN(status, flush(&batch));
    PyMem_Free(batch.numbers);
    return status == ZS_OK ? PyFloat_FromDouble(batch.total) : zs_py_raise(module);
}

/* --- norms on a GPU ----------------------------------------------------------------------------------------------- */

/* A tensor of the list on the GPU; its handle is owned. */
typedef struct on_gpu {
    zs_tensor *tensor;
    const zs_device *device; /* NULL: it is elsewhere, or is not dense floating-point memory */
    zs_numbers numbers;
} on_gpu;

static zs_status look_at_gpu(PyObject *object, on_gpu *out)
{
    zs_tensor_info info;
    *out = (on_gpu){0};
    ZS_TRY(zs_py_tensor(object, &out->tensor));
    zs_status status = zs_tensor_describe(out->tensor, &info);
    if (status == ZS_OK && info.strided) status = zs_optim_device_of(out->tensor, &info, &out->device);
    bool fits = status == ZS_OK && out->device != NULL && out->device->ops->queues && info.contiguous;
    if (!fits || info.dtype == ZS_BYTES)
        out->device = NULL;
    else if (info.numel > 0)
        status = zs_tensor_data(out->tensor, &out->numbers.data);
    out->numbers.numel = info.numel;
    out->numbers.dtype = info.dtype;
    if (status == ZS_OK) return ZS_OK;
    zs_tensor_free(out->tensor);
    return status;
}

static PyObject *all_on_gpu(PyObject *module, PyObject *list)
{
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "on_gpu() expects a list of tensors");
    const zs_device *device = NULL;
    bool all = PyList_GET_SIZE(list) > 0;
    zs_clear_error();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list) && all; i++) {
        on_gpu one;
        if (look_at_gpu(PyList_GET_ITEM(list, i), &one) != ZS_OK) return zs_py_raise(module);
        if (i == 0) device = one.device;
        all = one.device != NULL && one.device == device;
        zs_tensor_free(one.tensor);
    }
    return PyBool_FromLong(all);
}

static PyObject *any_capturing(PyObject *module, PyObject *list)
{
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "capturing() expects a list of tensors");
    const zs_device *device = NULL;
    bool captured = false;
    zs_clear_error();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list) && !captured; i++) {
        on_gpu one;
        if (look_at_gpu(PyList_GET_ITEM(list, i), &one) != ZS_OK) return zs_py_raise(module);
        zs_tensor_free(one.tensor);
        if (one.device == NULL || one.device == device) continue;
        device = one.device;
        if (zs_device_capturing(device, &captured) != ZS_OK) return zs_py_raise(module);
    }
    return PyBool_FromLong(captured);
}

/* Allocates numbers on a GPU. */
static zs_status find_room(PyObject *object, int64_t numel, double **out)
{
    zs_tensor *tensor;
    zs_tensor_info info;
    void *data = NULL;
    ZS_TRY(zs_py_tensor(object, &tensor));
    zs_status status = zs_tensor_describe(tensor, &info);
    if (status == ZS_OK && (!info.contiguous || info.dtype != ZS_F64 || info.numel < numel))
        status =
            ZS_FAIL(ZS_ERR_TYPE, "expected a contiguous float64 workspace of at least %lld elements", (long long)numel);
    ZS_THEN(status, zs_tensor_data(tensor, &data));
    zs_tensor_free(tensor);
    *out = data;
    return status;
}

/* Fills `numbers` [n] from a list of tensors of one GPU. */
static zs_status list_numbers(PyObject *list, zs_numbers *numbers, const zs_device **device)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        on_gpu one;
        ZS_TRY(look_at_gpu(PyList_GET_ITEM(list, i), &one));
        zs_tensor_free(one.tensor);
        if (i == 0) *device = one.device;
        if (one.device == NULL || one.device != *device)
            return ZS_FAIL(ZS_ERR_TYPE, "expected contiguous floating-point tensors on one GPU");
        numbers[i] = one.numbers;
    }
    return ZS_OK;
}

static PyObject *queue_power_sum(PyObject *module, PyObject *args)
{
    PyObject *list, *room;
    zs_norm_job job = {0};
    if (!PyArg_ParseTuple(args, "O!dO:queue_power_sum", &PyList_Type, &list, &job.p, &room)) return NULL;
    job.n = (size_t)PyList_GET_SIZE(list);
    if (job.n == 0) return PyErr_Format(PyExc_ValueError, "queue_power_sum() expects at least one tensor");
    zs_numbers *numbers = PyMem_Calloc(job.n, sizeof *numbers);
    if (numbers == NULL) return PyErr_NoMemory();
    const zs_device *device = NULL;
    zs_clear_error();
    zs_status status = list_numbers(list, numbers, &device);
    ZS_THEN(status, find_room(room, 1 + ZS_NORM_ROOM + (int64_t)job.n, &job.result));
    job.x = numbers;
    job.room = job.result + 1;
    ZS_THEN(status, zs_device_norm_queued(device, &job));
    PyMem_Free(numbers);
    if (status != ZS_OK) return zs_py_raise(module);
    Py_RETURN_NONE;
}

static PyObject *norm_room(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromLong(ZS_NORM_ROOM + 1);
}

/* Gathers one number from each rank behind numbers[0], and combines them into it. */
static zs_status join_ranks(zs_comm *comm, double *numbers, double p)
{
    zs_norm_job job = {.parts = numbers + 1, .n = (size_t)comm->world, .p = p, .result = numbers};
    if (comm->world == 1) return ZS_OK;
    if (!zs_comm_gathers_device(comm))
        return ZS_FAIL(ZS_ERR_UNSUPPORTED, "transport '%s' cannot queue work on a GPU", comm->ops->name);
    ZS_TRY(zs_comm_gather_device(comm, numbers, sizeof *numbers, numbers + 1));
    return zs_device_norm_join(comm->device, &job);
}

static PyObject *gpu_ranks(PyObject *module, PyObject *object)
{
    (void)module;
    zs_engine *engine = zs_py_engine(object);
    if (engine == NULL) return NULL;
    const zs_comm *all = zs_engine_ranks(engine)->all;
    return PyLong_FromLong(all->device->ops->queues ? all->world : 0);
}

static PyObject *queue_over_ranks(PyObject *module, PyObject *args)
{
    PyObject *object, *room;
    double p, *numbers = NULL;
    if (!PyArg_ParseTuple(args, "OdO:queue_over_ranks", &object, &p, &room)) return NULL;
    zs_engine *engine = zs_py_engine(object);
    if (engine == NULL) return NULL;
    zs_comm *comm = isinf(p) ? zs_engine_ranks(engine)->all : zs_engine_ranks(engine)->shards;
    zs_clear_error();
    zs_status status = find_room(room, 1 + comm->world, &numbers);
    if (status == ZS_OK) ZS_PY_NOGIL(status, join_ranks(comm, numbers, p));
    if (status != ZS_OK) return zs_py_raise(module);
    Py_RETURN_NONE;
}

/* --- scaling ------------------------------------------------------------------------------------------------------ */

/* Scales neighbors together: `run` is not queued yet. */
static zs_status scale_next(const zs_device *device, zs_numbers *run, const zs_numbers *next, const float *factor)
{
    const char *end = (const char *)run->data + (size_t)run->numel * zs_dtype_size(run->dtype);
    bool follows = run->numel > 0 && next->data == end && next->dtype == run->dtype;
    if (follows) {
        run->numel += next->numel;
        return ZS_OK;
    }
    ZS_TRY(zs_device_scale_by(device, run, factor));
    *run = *next;
    return ZS_OK;
}

static zs_status scale_all(PyObject *list, zs_numbers *numbers, const float *factor)
{
    const zs_device *device = NULL;
    zs_numbers run = {0};
    ZS_TRY(list_numbers(list, numbers, &device));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        zs_tensor *tensor;
        if (numbers[i].numel > 0) ZS_TRY(scale_next(device, &run, &numbers[i], factor));
        ZS_TRY(zs_py_tensor(PyList_GET_ITEM(list, i), &tensor));
        zs_tensor_bump_version(tensor);
        zs_tensor_free(tensor);
    }
    return device != NULL ? zs_device_scale_by(device, &run, factor) : ZS_OK;
}

static PyObject *scale_by(PyObject *module, PyObject *args)
{
    PyObject *list, *factor;
    if (!PyArg_ParseTuple(args, "O!O:scale_by", &PyList_Type, &list, &factor)) return NULL;
    zs_tensor *tensor = NULL;
    zs_tensor_info info;
    void *data = NULL;
    zs_numbers *numbers = PyMem_Calloc((size_t)PyList_GET_SIZE(list) + 1, sizeof *numbers);
    if (numbers == NULL) return PyErr_NoMemory();
    zs_clear_error();
    zs_status status = zs_py_tensor(factor, &tensor);
    ZS_THEN(status, zs_tensor_describe(tensor, &info));
    if (status == ZS_OK && (info.dtype != ZS_F32 || info.numel != 1 || !info.contiguous))
        status = ZS_FAIL(ZS_ERR_TYPE, "scale_by() expects a factor of one float32 element");
    ZS_THEN(status, zs_tensor_data(tensor, &data));
    ZS_THEN(status, scale_all(list, numbers, data));
    zs_tensor_free(tensor);
    PyMem_Free(numbers);
    if (status != ZS_OK) return zs_py_raise(module);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"power_sum", power_sum, METH_VARARGS,
     "power_sum($module, tensors, p, /)\n--\n\nReturn the sum of |x|**p (p = 1 or 2), or the maximum of |x| (p = inf), "
     "over all elements of a list of contiguous CPU or GPU tensors."},
    {"on_gpu", all_on_gpu, METH_O,
     "on_gpu($module, tensors, /)\n--\n\nWhether these are contiguous floating-point tensors on one GPU (at least "
     "one), as queue_power_sum and scale_by require."},
    {"capturing", any_capturing, METH_O,
     "capturing($module, tensors, /)\n--\n\nWhether any of these tensors is on a GPU whose current torch stream is "
     "being captured into a CUDA graph."},
    {"queue_power_sum", queue_power_sum, METH_VARARGS,
     "queue_power_sum($module, tensors, p, room, /)\n--\n\nQueue power_sum of contiguous tensors on one GPU, without "
     "synchronizing; the result goes to room[0]."},
    {"norm_room", norm_room, METH_NOARGS,
     "norm_room($module, /)\n--\n\nReturn the workspace size of queue_power_sum in float64 elements, without the two "
     "per tensor."},
    {"gpu_ranks", gpu_ranks, METH_O,
     "gpu_ranks($module, engine, /)\n--\n\nReturn the number of ranks that reduce this model's gradients on GPUs; 0 if "
     "the model is not on a GPU."},
    {"queue_over_ranks", queue_over_ranks, METH_VARARGS,
     "queue_over_ranks($module, engine, p, numbers, /)\n--\n\nQueue the reduction of numbers[0] over the ranks of one "
     "replica, in place and without synchronizing: the sum in rank order (p = 1 or 2), or the maximum (p = inf; NaN if "
     "any is). Collective."},
    {"scale_by", scale_by, METH_VARARGS,
     "scale_by($module, tensors, factor, /)\n--\n\nMultiply contiguous tensors on one GPU in place by a float32 scalar "
     "tensor on that GPU."},
    {NULL, NULL, 0, NULL},
};

int zs_py_norms_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
