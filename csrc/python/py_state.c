/* py_state.c - optimizer state that the ranks of one host read from each other's memory. */
#include "base/file.h"
#include "python/py_util.h"

#include <stdlib.h>

/* The comm that `object` wraps; NULL with an exception if its peers cannot read this rank's memory. */
static zs_comm *sharing(PyObject *object)
{
    zs_comm *comm = zs_py_comm(object);
    if (comm == NULL || comm->ops->state != NULL) return comm;
    PyErr_Format(PyExc_NotImplementedError, "ranks over transport '%s' do not share memory", comm->ops->name);
    return NULL;
}

static PyObject *shares_state(PyObject *module, PyObject *object)
{
    (void)module;
    const zs_comm *comm = zs_py_comm(object);
    return comm == NULL ? NULL : PyBool_FromLong(comm->ops->state != NULL);
}

static zs_status new_memory(zs_comm *comm, size_t bytes, zs_mem **out)
{
    if (comm != NULL) return comm->ops->state->state_new(comm, bytes, out);
    if (!zs_mem_is_diverted()) return ZS_FAIL(ZS_ERR_STATE, "call keep_memory() first");
    return zs_kept_new(bytes, out);
}

static zs_status new_zeros(zs_comm *comm, const zs_tensor *like, int64_t numel, zs_tensor **out)
{
    zs_tensor_info info;
    zs_mem *mem = NULL;
    ZS_TRY(zs_tensor_describe(like, &info));
    ZS_TRY(new_memory(comm, (size_t)numel * info.itemsize, &mem));
    zs_status status = zs_tensor_new_in(mem, mem->ptr, 1, &numel, like, out);
    zs_mem_release(mem);
    return status;
}

static PyObject *shared_zeros(PyObject *module, PyObject *args)
{
    PyObject *object, *prototype;
    long long numel;
    if (!PyArg_ParseTuple(args, "OLO:shared_zeros", &object, &numel, &prototype)) return NULL;
    zs_comm *comm = object == Py_None ? NULL : sharing(object);
    if (comm == NULL && object != Py_None) return NULL;
    zs_tensor *like = NULL, *made = NULL;
    zs_clear_error();
    zs_status status = zs_py_tensor(prototype, &like);
    if (status == ZS_OK) ZS_PY_NOGIL(status, new_zeros(comm, like, numel, &made));
    zs_tensor_free(like);
    if (status != ZS_OK) return zs_py_raise(module);
    return zs_py_wrap_new(made);
}

static PyObject *state_place(PyObject *module, PyObject *args)
{
    PyObject *object, *value;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:state_place", &object, &value)) return NULL;
    const zs_comm *comm = sharing(object);
    if (comm == NULL) return NULL;
    zs_tensor *tensor = NULL;
    void *data = NULL;
    uint64_t offset = 0;
    zs_clear_error();
    if (zs_py_tensor(value, &tensor) != ZS_OK) return zs_py_raise(NULL);
    const zs_mem *mem = zs_tensor_mem(tensor);
    bool found = mem != NULL && comm->ops->state->state_offset(comm, mem, &offset);
    zs_status status = found ? zs_tensor_data(tensor, &data) : ZS_OK;
    zs_tensor_free(tensor);
    if (status != ZS_OK) return zs_py_raise(NULL);
    if (!found) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(offset + (uint64_t)((char *)data - (char *)mem->ptr));
}

static PyObject *post(PyObject *module, PyObject *args)
{
    PyObject *object;
    const char *text;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oy#:post", &object, &text, &size)) return NULL;
    zs_comm *comm = sharing(object);
    if (comm == NULL) return NULL;
    zs_clear_error();
    return zs_py_none(comm->ops->state->post(comm, text, (size_t)size));
}

static PyObject *posted(PyObject *module, PyObject *args)
{
    PyObject *object;
    int rank;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oi:posted", &object, &rank)) return NULL;
    zs_comm *comm = sharing(object);
    if (comm == NULL) return NULL;
    char *text = NULL;
    size_t bytes = 0;
    zs_clear_error();
    if (comm->ops->state->posted(comm, rank, &text, &bytes) != ZS_OK) return zs_py_raise(NULL);
    PyObject *found = PyBytes_FromStringAndSize(text, (Py_ssize_t)bytes);
    free(text);
    return found;
}

static PyObject *has_left(PyObject *module, PyObject *args)
{
    PyObject *object;
    int rank;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oi:has_left", &object, &rank)) return NULL;
    const zs_comm *comm = sharing(object);
    if (comm == NULL) return NULL;
    if (rank < 0 || rank >= comm->world) return PyErr_Format(PyExc_ValueError, "there is no rank %d", rank);
    return PyBool_FromLong(comm->ops->state->left(comm, rank));
}

static zs_status read_one(zs_comm *comm, int rank, uint64_t place, PyObject *target)
{
    zs_tensor *tensor = NULL;
    zs_tensor_info info;
    void *data = NULL;
    zs_status status = zs_py_tensor(target, &tensor);
    ZS_THEN(status, zs_tensor_describe(tensor, &info));
    if (status == ZS_OK && !(info.contiguous && info.where.type == ZS_ON_CPU))
        status = ZS_FAIL(ZS_ERR_VALUE, "read_state() expects contiguous CPU tensors");
    if (status == ZS_OK && info.numel > 0) {
        status = zs_tensor_data(tensor, &data);
        size_t bytes = (size_t)info.numel * info.itemsize;
        if (status == ZS_OK) ZS_PY_NOGIL(status, comm->ops->state->read(comm, rank, place, data, bytes));
    }
    zs_tensor_free(tensor);
    return status;
}

static PyObject *read_state(PyObject *module, PyObject *args)
{
    PyObject *object, *places, *targets;
    int rank;
    (void)module;
    if (!PyArg_ParseTuple(args, "OiO!O!:read_state", &object, &rank, &PyList_Type, &places, &PyList_Type, &targets))
        return NULL;
    zs_comm *comm = sharing(object);
    if (comm == NULL) return NULL;
    zs_status status = ZS_OK;
    zs_clear_error();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(places) && i < PyList_GET_SIZE(targets) && status == ZS_OK; i++) {
        uint64_t place = PyLong_AsUnsignedLongLongMask(PyList_GET_ITEM(places, i));
        if (PyErr_Occurred()) return NULL;
        status = read_one(comm, rank, place, PyList_GET_ITEM(targets, i));
    }
    return zs_py_none(status);
}

static PyMethodDef functions[] = {
    {"shares_state", shares_state, METH_O,
     "shares_state($module, comm, /)\n--\n\nWhether peers can read optimizer state in place."},
    {"shared_zeros", shared_zeros, METH_VARARGS,
     "shared_zeros($module, comm, numel, like, /)\n--\n\nReturn a new tensor of `numel` zeros in memory that the peers "
     "can read, with the dtype of `like`, which is on the CPU."},
    {"state_place", state_place, METH_VARARGS,
     "state_place($module, comm, tensor, /)\n--\n\nReturn where a tensor of shared_zeros() begins, in bytes, for "
     "read_state(); None for any other memory."},
    {"post", post, METH_VARARGS, "post($module, comm, text, /)\n--\n\nReplace the bytes that peers get from posted()."},
    {"posted", posted, METH_VARARGS,
     "posted($module, comm, rank, /)\n--\n\nReturn what a rank has posted last, b'' at first."},
    {"has_left", has_left, METH_VARARGS,
     "has_left($module, comm, rank, /)\n--\n\nWhether a rank has closed its Comm, so that it reads no more."},
    {"read_state", read_state, METH_VARARGS,
     "read_state($module, comm, rank, places, tensors, /)\n--\n\nFill contiguous CPU tensors from the memory of a "
     "rank; "
     "places: from its state_place()."},
    {0},
};

int zs_py_state_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
