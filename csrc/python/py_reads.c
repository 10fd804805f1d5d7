/* py_reads.c - see py_guard.h.
 *
 * Code in a forward means the full parameter, whichever module owns it. So an operation that would read this rank's
 * shard first gathers the unit, like a call of its module; one that writes to the parameter itself uses the shard. */
#include "python/py_guard.h"

static struct {
    PyObject *unit, *read, *unread;
} names; /* of a Part, and methods of its Unit */

/* Calls a method of the unit of a sharded parameter, with one argument or NULL; 0 for any other object. -1 with an
 * exception. */
static int call_unit(PyObject *object, PyObject *method, PyObject *argument)
{
    PyObject *part = zs_py_part_of_param(object);
    if (part == NULL) return PyErr_Occurred() ? -1 : 0;
    PyObject *unit = PyObject_GetAttr(part, names.unit);
    if (unit == NULL) return -1;
    PyObject *done = Py_NewRef(Py_None);
    if (unit != Py_None) Py_SETREF(done, PyObject_CallMethodObjArgs(unit, method, argument, NULL));
    Py_DECREF(unit);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

static int read_operand(PyObject *object, PyObject *operation)
{
    if (!PyList_Check(object) && !PyTuple_Check(object)) return call_unit(object, names.read, operation);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); i++)
        if (call_unit(PySequence_Fast_GET_ITEM(object, i), names.read, operation) < 0) return -1;
    return 0;
}

static int read_all(PyObject *args, PyObject *kwargs, PyObject *operation)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (read_operand(PyTuple_GET_ITEM(args, i), operation) < 0) return -1;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (kwargs != NULL && PyDict_Next(kwargs, &at, &key, &value))
        if (read_operand(value, operation) < 0) return -1;
    return 0;
}

/* Operations are numbered, so that one that reads several units keeps them all unsharded. */
int zs_py_read_operands(PyObject *args, PyObject *kwargs)
{
    static unsigned long long count;
    PyObject *operation = PyLong_FromUnsignedLongLong(++count);
    int result = operation != NULL ? read_all(args, kwargs, operation) : -1;
    Py_XDECREF(operation);
    return result;
}

int zs_py_before_write(PyObject *target)
{
    return call_unit(target, names.unread, NULL);
}

int zs_py_reads_init(void)
{
    names.unit = PyUnicode_InternFromString("unit");
    names.read = PyUnicode_InternFromString("read");
    names.unread = PyUnicode_InternFromString("unread");
    return names.unit != NULL && names.read != NULL && names.unread != NULL ? 0 : -1;
}
