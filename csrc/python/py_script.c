/* py_script.c - the public call that a script is in, for messages; and how a rank that cannot continue exits. */
#include "comm/script.h"
#include "python/py_util.h"

PyDoc_STRVAR(begin_call_doc, "begin_call($module, name, /)\n--\n\nName the public call that this thread is in from now "
                             "on. Return whether it was in none before; then call end_call().");

static PyObject *begin_call(PyObject *module, PyObject *name)
{
    (void)module;
    const char *text = PyUnicode_AsUTF8(name);
    return text != NULL ? PyBool_FromLong(zs_call_begin(text)) : NULL;
}

PyDoc_STRVAR(end_call_doc, "end_call($module, /)\n--\n\nEnd the call that begin_call() named.");

static PyObject *end_call(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    zs_call_end();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(is_stopped_doc, "is_stopped($module, comm, /)\n--\n\nReturn whether a rank has told those of a transport "
                             "that it cannot continue, though none has gone (shm).");

static PyObject *is_stopped(PyObject *module, PyObject *object)
{
    (void)module;
    zs_comm *comm = zs_py_comm(object);
    return comm != NULL ? PyBool_FromLong(zs_comm_is_stopped(comm)) : NULL;
}

PyDoc_STRVAR(outlive_doc, "outlive($module, comm, seconds, /)\n--\n\nIf a wait of this rank has failed, wait until the "
                          "processes of ranks that have left have ended, for so long at most (shm).");

static PyObject *outlive(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object;
    double seconds;
    if (!PyArg_ParseTuple(args, "Od:outlive", &object, &seconds)) return NULL;
    zs_comm *comm = zs_py_comm(object);
    if (comm == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    zs_comm_outlive(comm, seconds);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"outlive", outlive, METH_VARARGS, outlive_doc},
    {"is_stopped", is_stopped, METH_O, is_stopped_doc},
    {"begin_call", begin_call, METH_O, begin_call_doc},
    {"end_call", end_call, METH_NOARGS, end_call_doc},
    {0},
};

int zs_py_script_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
