/* py_offload.c - memory on a disk for Python: tensors there for optimizers, and the pager's limit. */
#include "pager/pager.h"
#include "python/py_util.h"
#include "unit/offload.h"

/* The unit of a sharded model's parameter, if its optimizer's state goes to a disk; else NULL. */
static const zs_unit *offloader_of(const zs_tensor *param)
{
    const zs_mem *mem = zs_tensor_mem(param);
    const zs_unit *unit = mem != NULL ? mem->user : NULL;
    return unit != NULL && unit->offloads.state ? unit : NULL;
}

static PyObject *offloads_state(PyObject *module, PyObject *param)
{
    (void)module;
    zs_tensor *handle = NULL;
    zs_clear_error();
    if (zs_py_tensor(param, &handle) != ZS_OK) return zs_py_raise(NULL);
    bool found = offloader_of(handle) != NULL;
    zs_tensor_free(handle);
    return PyBool_FromLong(found);
}

static PyObject *offloaded_zeros(PyObject *module, PyObject *args)
{
    PyObject *param;
    long long numel;
    (void)module;
    if (!PyArg_ParseTuple(args, "OL:offloaded_zeros", &param, &numel)) return NULL;
    zs_tensor *handle = NULL, *made = NULL;
    zs_clear_error();
    if (zs_py_tensor(param, &handle) != ZS_OK) return zs_py_raise(NULL);
    const zs_unit *unit = offloader_of(handle);
    zs_status status;
    if (unit != NULL)
        ZS_PY_NOGIL(status, zs_offload_state_new(unit, numel, handle, &made));
    else
        status = ZS_FAIL(ZS_ERR_VALUE, "the optimizer state of this tensor is not offloaded");
    zs_tensor_free(handle);
    if (status != ZS_OK) return zs_py_raise(NULL);
    return zs_py_wrap_new(made);
}

static PyObject *set_pager_limit(PyObject *module, PyObject *object)
{
    (void)module;
    size_t bytes = PyLong_AsSize_t(object);
    if (PyErr_Occurred()) return NULL;
    zs_pager_set_limit(bytes);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"offloads_state", offloads_state, METH_O,
     "offloads_state($module, param, /)\n--\n\nWhether the optimizer state of this parameter is offloaded."},
    {"offloaded_zeros", offloaded_zeros, METH_VARARGS,
     "offloaded_zeros($module, param, numel, /)\n--\n\nReturn a new offloaded tensor of `numel` zeros, with the dtype "
     "of `param`, for which offloads_state() must hold."},
    {"set_pager_limit", set_pager_limit, METH_O,
     "set_pager_limit($module, bytes, /)\n--\n\nSet how many bytes of offloaded data may stay resident in memory while "
     "unused, over all models."},
    {0},
};

int zs_py_offload_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
