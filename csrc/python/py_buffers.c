/* py_buffers.c - buffers that are broadcast from rank 0.
 *
 * A script may replace a module's buffers, so the engine keeps no list of them: Python lists them when a pass
 * begins. */
#include "python/py_engine.h"
#include "python/py_unit.h"

#include <stdlib.h>

int zs_py_list_buffers(const unit_object *self)
{
    if (self->buffers == NULL) return 0;
    PyObject *result = PyObject_CallNoArgs(self->buffers);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static void free_handles(zs_tensor **handles, size_t n)
{
    for (size_t i = 0; i < n; i++)
        zs_tensor_free(handles[i]);
    free(handles);
}

const char zs_py_sync_buffers_doc[] = PyDoc_STR("sync_buffers($self, tensors, in_training, /)\n--\n\nBroadcast these "
                                                "buffers from rank 0 at the start of each forward; "
                                                "in_training: of those with gradients only.");

PyObject *zs_py_sync_buffers(engine_object *self, PyObject *args)
{
    PyObject *list;
    int in_training;
    if (!PyArg_ParseTuple(args, "O!p:sync_buffers", &PyList_Type, &list, &in_training)) return NULL;
    size_t n = (size_t)PyList_GET_SIZE(list);
    zs_tensor **handles = calloc(n + 1, sizeof(zs_tensor *));
    if (handles == NULL) return PyErr_NoMemory();
    zs_clear_error();
    for (size_t i = 0; i < n; i++) {
        zs_tensor *strong = NULL;
        if (zs_py_tensor(PyList_GET_ITEM(list, (Py_ssize_t)i), &strong) != ZS_OK) {
            free_handles(handles, n);
            return zs_py_raise(NULL);
        }
        handles[i] = zs_tensor_new_weak(strong);
        zs_tensor_free(strong);
    }
    zs_engine_sync_buffers(self->engine, handles, n, in_training != 0);
    Py_RETURN_NONE;
}

const char zs_py_broadcast_buffers_doc[] = PyDoc_STR(
    "broadcast_buffers($self, /)\n--\n\nBroadcast the buffers of sync_buffers() now. Collective, between passes.");

PyObject *zs_py_broadcast_buffers(engine_object *self, PyObject *unused)
{
    (void)unused;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_broadcast_buffers(self->engine));
    return zs_py_none(status);
}
