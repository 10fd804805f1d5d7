/* py_shards.c - questions about tensors: is this a shard, whose gradient is that?
 *
 * The block of memory under a tensor identifies it, by naming its unit; no registry is needed. */
#include "engine/engine.h"
#include "python/py_unit.h"
#include "reduce/local_grads.h"

PyObject *zs_py_describe_param(const zs_unit *unit, const zs_param *param)
{
    PyObject *shape = PyTuple_New(param->ndim);
    if (shape == NULL) return NULL;
    for (int d = 0; d < param->ndim; d++) {
        PyObject *size = PyLong_FromLongLong(param->sizes[d]);
        if (size == NULL) {
            Py_DECREF(shape);
            return NULL;
        }
        PyTuple_SET_ITEM(shape, d, size);
    }
    return Py_BuildValue("{s:s,s:s,s:N,s:L,s:L}", "name", param->name, "unit", unit->name, "shape", shape, "begin",
                         (long long)param->owned.begin, "numel", (long long)param->owned.numel);
}

/* The unit that uses the memory under a tensor in `role`; NULL without exception if none does. */
static zs_unit *user_of(PyObject *object, zs_mem_role role, zs_tensor **handle)
{
    zs_clear_error();
    if (zs_py_tensor(object, handle) != ZS_OK) {
        zs_py_raise(NULL);
        return NULL;
    }
    const zs_mem *mem = zs_tensor_mem(*handle);
    return mem != NULL && mem->role == role ? mem->user : NULL;
}

static PyObject *shard_info(PyObject *module, PyObject *object)
{
    (void)module;
    zs_tensor *handle = NULL;
    zs_unit *unit = user_of(object, ZS_MEM_SHARD, &handle);
    PyObject *result = NULL;
    for (int64_t i = 0; unit != NULL && result == NULL && i < unit->n_params; i++) {
        if (!zs_tensor_same(unit->params[i].tensor, handle)) continue;
        result = zs_py_describe_param(unit, &unit->params[i]);
        if (result == NULL) break;
    }
    zs_tensor_free(handle);
    if (result == NULL && !PyErr_Occurred()) Py_RETURN_NONE;
    return result;
}

static PyObject *is_shard(PyObject *module, PyObject *object)
{
    (void)module;
    zs_tensor *handle = NULL;
    bool found = user_of(object, ZS_MEM_SHARD, &handle) != NULL;
    zs_tensor_free(handle);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(found);
}

/* -1 with an exception for a gradient that has not been reduced. */
static int check_reduced(PyObject *object)
{
    zs_tensor *handle = NULL;
    const zs_unit *unit = user_of(object, ZS_MEM_LOCAL_GRAD, &handle);
    zs_tensor_free(handle);
    if (unit != NULL)
        PyErr_Format(PyExc_RuntimeError,
                     "a gradient of unit '%s' was accumulated in no_sync() and has not been reduced: run the last "
                     "backward outside of no_sync() before gradient clipping or optimizer.step()",
                     zs_unit_label(unit->name));
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *grad_owner(PyObject *module, PyObject *object)
{
    (void)module;
    if (check_reduced(object) < 0) return NULL;
    zs_tensor *handle = NULL;
    zs_unit *unit = user_of(object, ZS_MEM_GRAD_SHARD, &handle);
    zs_tensor_free(handle);
    if (PyErr_Occurred()) return NULL;
    if (unit == NULL) Py_RETURN_NONE;
    return zs_py_engine_wrap(zs_engine_of(unit));
}

static PyObject *has_local_grads(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(zs_local_grads_any());
}

static PyObject *has_held_units(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(zs_pinned_any());
}

static PyObject *mappings(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromLong(zs_mem_mappings());
}

static PyMethodDef functions[] = {
    {"mappings", mappings, METH_NOARGS,
     "mappings($module, /)\n--\n\nReturn how often this process has mapped memory for parameters, gradients and the "
     "like."},
    {"has_held_units", has_held_units, METH_NOARGS,
     "has_held_units($module, /)\n--\n\nWhether any unit is kept unsharded by unshard()."},
    {"has_local_grads", has_local_grads, METH_NOARGS,
     "has_local_grads($module, /)\n--\n\nWhether any unit has unreduced gradients from no_sync() on this rank."},
    {"shard_info", shard_info, METH_O,
     "shard_info($module, tensor, /)\n--\n\nReturn the facts of a sharded parameter, as Unit.param() does, or None for "
     "any other tensor."},
    {"is_shard", is_shard, METH_O,
     "is_shard($module, tensor, /)\n--\n\nWhether the tensor is in a unit's shard (or in its mapped full buffer)."},
    {"grad_owner", grad_owner, METH_O,
     "grad_owner($module, tensor, /)\n--\n\nReturn the Engine whose gradient shard contains the tensor, or None."},
    {0},
};

int zs_py_shards_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
