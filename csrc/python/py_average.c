/* py_average.c - moving averages of parameters (optim/average.h) for Python. */
#include "optim/average.h"
#include "python/py_util.h"

/* Are the elements of both tensors in the same order in memory? */
static bool same_order(const zs_tensor_info *a, const zs_tensor_info *b)
{
    if (a->numel != b->numel || a->ndim > ZS_MAX_DIM) return false;
    if (a->contiguous && b->contiguous) return true;
    bool same = a->dense && b->dense && a->ndim == b->ndim;
    for (int d = 0; same && d < a->ndim; d++)
        same = a->sizes[d] == b->sizes[d] && a->strides[d] == b->strides[d];
    return same;
}

/* A tensor's memory; *fits: it is plain memory of the CPU. */
static zs_status look_at(PyObject *object, zs_tensor_info *info, void **data, bool *fits)
{
    zs_tensor *tensor = NULL;
    ZS_TRY(zs_py_tensor(object, &tensor));
    zs_status status = zs_tensor_describe(tensor, info);
    *fits = status == ZS_OK && info->where.type == ZS_ON_CPU && info->strided && info->dtype != ZS_BYTES;
    if (*fits && info->numel > 0) status = zs_tensor_data(tensor, data); /* an empty shard has no bytes to find */
    zs_tensor_free(tensor);
    return status;
}

/* Adds parameter `index` and its averages to the pass; *fits: in the same order in memory. */
static zs_status add(zs_averaging *pass, PyObject *params, PyObject *averages, Py_ssize_t index, bool *fits)
{
    zs_tensor_info info, own;
    void *data = NULL;
    ZS_TRY(look_at(PyList_GET_ITEM(params, index), &info, &data, fits));
    zs_averaged run = {.param = data, .numel = info.numel, .dtype = info.dtype};
    for (int k = 0; k < pass->count && *fits; k++) {
        PyObject *list = PyList_GET_ITEM(averages, k);
        if (!PyList_Check(list) || PyList_GET_SIZE(list) != PyList_GET_SIZE(params))
            return ZS_FAIL(ZS_ERR_TYPE, "average() expects a list of averages of each parameter, for each weight");
        ZS_TRY(look_at(PyList_GET_ITEM(list, index), &own, &run.average[k], fits));
        *fits = *fits && own.dtype == (info.dtype == ZS_F64 ? ZS_F64 : ZS_F32) && same_order(&info, &own);
    }
    if (*fits && run.numel > 0) zs_average_add(pass, &run);
    return ZS_OK;
}

static PyObject *average(PyObject *module, PyObject *args)
{
    PyObject *params, *averages, *weights;
    if (!PyArg_ParseTuple(args, "O!O!O!:average", &PyList_Type, &params, &PyList_Type, &averages, &PyList_Type,
                          &weights))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(params), count = PyList_GET_SIZE(weights);
    if (count > ZS_AVERAGES || PyList_GET_SIZE(averages) != count)
        return PyErr_Format(PyExc_ValueError, "average() expects as many lists as weights, at most %d", ZS_AVERAGES);
    zs_averaging pass = {.count = (int)count};
    for (Py_ssize_t k = 0; k < count; k++)
        pass.weights[k] = PyFloat_AsDouble(PyList_GET_ITEM(weights, k));
    if (PyErr_Occurred()) return NULL;
    pass.runs = PyMem_Calloc((size_t)n + 1, sizeof *pass.runs);
    if (pass.runs == NULL) return PyErr_NoMemory();
    bool fits = true;
    zs_status status = ZS_OK;
    zs_clear_error();
    for (Py_ssize_t i = 0; i < n && fits && status == ZS_OK; i++)
        status = add(&pass, params, averages, i, &fits);
    if (status == ZS_OK && fits) ZS_PY_NOGIL(status, zs_average_run(&pass));
    PyMem_Free(pass.runs);
    return status == ZS_OK ? PyBool_FromLong(fits) : zs_py_raise(module);
}

static PyMethodDef functions[] = {
    {"average", average, METH_VARARGS,
     "average($module, params, averages, weights, /)\n--\n\nMove averages towards parameters: for each weight k and "
     "parameter i, averages[k][i].lerp_(params[i], weights[k]), with torch's bits and in one pass."},
    {0},
};

int zs_py_average_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
