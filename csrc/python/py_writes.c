/* py_writes.c - see py_guard.h: other ranks may read a parameter's shard, so a write to it waits for them.
 *
 * A Part knows whether a tensor is the parameter's own memory or a copy; this calls its methods around the
 * operation, also if that fails. */
#include "device/pending.h"
#include "python/py_guard.h"
#include "python/py_util.h"
#include "reduce/squares.h"
#include "shim/tensor_py.h"

static struct {
    PyObject *begin_write, *note_write, *end_write;
} names; /* of Part's methods */

/* Waits until no other rank reads the object. *begun: a list of the Parts whose write must be ended; NULL: none. */
static int begin_write(PyObject *object, PyObject **begun)
{
    PyObject *part;
    if (zs_py_slice_part(object, &part) < 0) return -1;
    if (part == NULL) return 0;
    PyObject *due = PyObject_CallMethodOneArg(part, names.begin_write, object);
    if (due == NULL) return -1;
    bool is_due = due == Py_True;
    Py_DECREF(due);
    if (!is_due) return 0;
    if (*begun == NULL && (*begun = PyList_New(0)) == NULL) return -1;
    return PyList_Append(*begun, part);
}

int zs_py_note_written(PyObject *operation, PyObject *object)
{
    PyObject *part = NULL;
    if (object != NULL && zs_py_slice_part(object, &part) < 0) return -1;
    if (part == NULL) return 0;
    PyObject *done = PyObject_CallMethodObjArgs(part, names.note_write, object, operation, NULL);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

/* Ends the writes that have begun, also with an exception, which stays. */
static int end_writes(PyObject *begun)
{
    PyObject *type, *value, *trace;
    if (begun == NULL) return 0;
    PyErr_Fetch(&type, &value, &trace);
    int result = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(begun); i++) {
        PyObject *done = PyObject_CallMethodNoArgs(PyList_GET_ITEM(begun, i), names.end_write);
        if (done == NULL) result = -1;
        Py_XDECREF(done);
    }
    Py_DECREF(begun);
    if (type != NULL) PyErr_Restore(type, value, trace);
    return result;
}

PyObject *zs_py_run_writing(PyObject *operation, PyObject *args, PyObject *kwargs, PyObject *targets)
{
    bool many = targets != NULL && (PyList_Check(targets) || PyTuple_Check(targets));
    Py_ssize_t n = many ? PySequence_Fast_GET_SIZE(targets) : targets != NULL;
    PyObject *begun = NULL, *result = NULL;
    int status = 0;
    for (Py_ssize_t i = 0; i < n && status == 0; i++)
        status = begin_write(many ? PySequence_Fast_GET_ITEM(targets, i) : targets, &begun);
    if (status == 0) result = zs_py_call_plain(operation, args, kwargs);
    for (Py_ssize_t i = 0; i < n && result != NULL; i++)
        if (zs_py_note_written(operation, many ? PySequence_Fast_GET_ITEM(targets, i) : targets) < 0) Py_CLEAR(result);
    if (end_writes(begun) < 0) Py_CLEAR(result);
    return result;
}

static void settle_gradients(PyObject *object, bool writes)
{
    if (PyList_Check(object) || PyTuple_Check(object)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); i++)
            settle_gradients(PySequence_Fast_GET_ITEM(object, i), writes);
    } else if (zs_py_is_guarded(object)) {
        zs_mem *mem = zs_py_mem(object);
        zs_pending_settle(mem);
        if (writes) zs_squares_spoil(mem);
    }
}

void zs_py_settle_gradients(PyObject *args, PyObject *kwargs, bool writes)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    settle_gradients(args, writes);
    while (kwargs != NULL && PyDict_Next(kwargs, &at, &key, &value))
        settle_gradients(value, writes);
}

zs_unit *zs_py_unit_of(PyObject *grad)
{
    const zs_mem *mem = grad != NULL ? zs_py_mem(grad) : NULL;
    Py_XDECREF(grad);
    return mem != NULL && mem->role == ZS_MEM_GRAD_SHARD ? mem->user : NULL;
}

int zs_py_writes_init(void)
{
    names.begin_write = PyUnicode_InternFromString("begin_write");
    names.note_write = PyUnicode_InternFromString("note_write");
    names.end_write = PyUnicode_InternFromString("end_write");
    return names.begin_write != NULL && names.note_write != NULL && names.end_write != NULL ? 0 : -1;
}
