/* py_rows.c - memory that the ranks of one host share, as a tensor: a row of bytes for each rank. */
#include "python/py_util.h"

/* *new* tensor of `world` rows on the memory of a flat, of the dtype of `like`, whose elements are bytes. */
static zs_status new_rows(zs_comm *comm, size_t row, const zs_tensor *like, zs_tensor **out)
{
    zs_tensor_info info;
    zs_flat_mem flat = {0};
    ZS_TRY(zs_tensor_describe(like, &info));
    if (info.itemsize != 1 || info.where.type != ZS_ON_CPU)
        return ZS_FAIL(ZS_ERR_VALUE, "shared_rows() expects a uint8 tensor on the CPU");
    if (!zs_comm_shares_memory(comm))
        return ZS_FAIL(ZS_ERR_UNSUPPORTED, "ranks over transport '%s' do not share memory", comm->ops->name);
    size_t row_bytes = zs_round_up(row, comm->ops->shard_align);
    ZS_TRY(zs_comm_flat_new(comm, row_bytes, &flat));
    int64_t sizes[] = {comm->world, (int64_t)row_bytes};
    zs_status status = zs_tensor_new_in(flat.mem, flat.full, 2, sizes, like, out);
    zs_comm_flat_free(comm, &flat);
    return status;
}

static PyObject *shared_rows(PyObject *module, PyObject *args)
{
    PyObject *object, *prototype;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "OnO:shared_rows", &object, &bytes, &prototype)) return NULL;
    zs_comm *comm = zs_py_comm(object);
    if (comm == NULL) return NULL;
    if (bytes < 1) return PyErr_Format(PyExc_ValueError, "shared_rows() expects a positive number of bytes");
    zs_tensor *like = NULL, *made = NULL;
    zs_clear_error();
    zs_status status = zs_py_tensor(prototype, &like);
    if (status == ZS_OK) ZS_PY_NOGIL(status, new_rows(comm, (size_t)bytes, like, &made));
    zs_tensor_free(like);
    if (status != ZS_OK) return zs_py_raise(module);
    return zs_py_wrap_new(made);
}

static PyMethodDef functions[] = {
    {"shared_rows", shared_rows, METH_VARARGS,
     "shared_rows($module, comm, bytes, like, /)\n--\n\nReturn a new tensor of shape (ranks, at least `bytes`) that "
     "all ranks of a shared-memory transport map, with the dtype of `like`, uint8. Collective."},
    {0},
};

int zs_py_rows_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
