/* py_script.c - where the script is, for messages: calls of zshard name themselves, and Python is asked for the line.
 *
 * A wait runs without the GIL, so it can take it, and ask.
 */
#include "comm/script.h"
#include "python/py_util.h"

#include <stdio.h>

static PyObject *where; /* owned, as long as the process; NULL: nobody is asked */

static void ask(char *text, size_t size)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    if (where != NULL && !PyErr_Occurred()) {
        PyObject *said = PyObject_CallNoArgs(where);
        const char *words = said != NULL ? PyUnicode_AsUTF8(said) : NULL;
        if (words != NULL) snprintf(text, size, "%s", words);
        Py_XDECREF(said); /* a signal's handler may have raised meanwhile: zs_py_interrupted finds that */
    }
    PyGILState_Release(gil);
}

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

PyDoc_STRVAR(on_place_doc, "on_place($module, where, /)\n--\n\nSet what messages call for the place of this thread's "
                           "script, as text.");

static PyObject *on_place(PyObject *module, PyObject *function)
{
    (void)module;
    Py_XSETREF(where, Py_NewRef(function));
    zs_on_script_place(ask);
    Py_RETURN_NONE;
}

static PyObject *answer(PyObject *object, bool (*question)(zs_comm *))
{
    zs_comm *comm = zs_py_comm(object);
    return comm != NULL ? PyBool_FromLong(question(comm)) : NULL;
}

PyDoc_STRVAR(is_asked_doc,
             "is_asked($module, comm, /)\n--\n\nReturn whether ranks of a transport ask where this rank's "
             "script is, since the last call (shm).");

static PyObject *is_asked(PyObject *module, PyObject *object)
{
    (void)module;
    return answer(object, zs_comm_is_asked);
}

PyDoc_STRVAR(tell_place_doc, "tell_place($module, comm, text, /)\n--\n\nTell the ranks of a transport where this "
                             "rank's script is (shm).");

static PyObject *tell_place(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object;
    const char *text;
    if (!PyArg_ParseTuple(args, "Os:tell_place", &object, &text)) return NULL;
    zs_comm *comm = zs_py_comm(object);
    if (comm == NULL) return NULL;
    zs_comm_tell_place(comm, text);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(is_stopped_doc, "is_stopped($module, comm, /)\n--\n\nReturn whether a rank has told those of a transport "
                             "that it cannot continue, though none has gone (shm).");

static PyObject *is_stopped(PyObject *module, PyObject *object)
{
    (void)module;
    return answer(object, zs_comm_is_stopped);
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
    {"is_asked", is_asked, METH_O, is_asked_doc},
    {"tell_place", tell_place, METH_VARARGS, tell_place_doc},
    {"is_stopped", is_stopped, METH_O, is_stopped_doc},
    {"begin_call", begin_call, METH_O, begin_call_doc},
    {"end_call", end_call, METH_NOARGS, end_call_doc},
    {"on_place", on_place, METH_O, on_place_doc},
    {0},
};

int zs_py_script_init(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
