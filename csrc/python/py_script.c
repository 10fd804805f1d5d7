/* py_script.c - where a script is, for messages: its call, its line, its pass; and how a rank that cannot continue
 * exits. */
#include "comm/script.h"
#include "comm/where.h"
#include "engine/engine.h"
#include "python/py_util.h"

static PyObject *begin_call(PyObject *module, PyObject *name)
{
    (void)module;
    const char *text = PyUnicode_AsUTF8(name);
    return text != NULL ? PyBool_FromLong(zs_call_begin(text)) : NULL;
}

static PyObject *end_call(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    zs_call_end();
    Py_RETURN_NONE;
}

static PyObject *is_stopped(PyObject *module, PyObject *object)
{
    (void)module;
    zs_comm *comm = zs_py_comm(object);
    return comm != NULL ? PyBool_FromLong(zs_comm_is_stopped(comm)) : NULL;
}

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

static PyObject *position(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    zs_position found;
    zs_position_find(&found);
    const char *call = zs_call_name(), *other = zs_call_of_main();
    if (call[0] == 0 && other != NULL) call = other;
    PyObject *unit = PyUnicode_DecodeUTF8(found.unit, (Py_ssize_t)strlen(found.unit), "replace");
    return unit != NULL ? Py_BuildValue("(ssKN)", call, found.pass, (unsigned long long)found.steps, unit) : NULL;
}

/* Ctrl-C that came while Python ran is left to the wait, which looks for it. */
static void forget_error(void)
{
    bool pressed = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0;
    PyErr_Clear();
    if (pressed) PyErr_SetInterrupt();
}

/* The text that a function of zshard.ranks.where returns. */
static void look(char *text, size_t size)
{
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    if (!PyErr_Occurred()) {
        PyObject *where = PyImport_ImportModule("zshard.ranks.where");
        PyObject *line = where != NULL ? PyObject_CallMethod(where, "here", NULL) : NULL;
        const char *words = line != NULL ? PyUnicode_AsUTF8(line) : NULL;
        if (words != NULL) snprintf(text, size, "%s", words);
        Py_XDECREF(line);
        Py_XDECREF(where);
        if (PyErr_Occurred()) forget_error();
    }
    PyGILState_Release(gil);
}

static PyObject *report_after(PyObject *module, PyObject *seconds)
{
    (void)module;
    double value = PyFloat_AsDouble(seconds);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(zs_set_report_after(value));
}

static PyMethodDef methods[] = {
    {"position", position, METH_NOARGS,
     "position($module, /)\n--\n\nReturn (call, pass, steps, unit) of this thread's script, on another thread than the "
     "main one of the main thread's if it is in no call: the public call and the pass that run, the optimizer's steps, "
     "and the unit that was unsharded last. '' and 0: none."},
    {"outlive", outlive, METH_VARARGS,
     "outlive($module, comm, seconds, /)\n--\n\nIf a wait of this rank has failed, wait until the processes of ranks "
     "that have left have ended, for so long at most (shm)."},
    {"is_stopped", is_stopped, METH_O,
     "is_stopped($module, comm, /)\n--\n\nReturn whether a rank has told those of a transport that it cannot continue, "
     "though none has gone (shm)."},
    {"report_after", report_after, METH_O,
     "report_after($module, seconds, /)\n--\n\nSet how long this rank waits before it writes where the others are to "
     "stderr, and return the former seconds (10): for tests."},
    {"begin_call", begin_call, METH_O,
     "begin_call($module, name, /)\n--\n\nName the public call that this thread is in from now on."},
    {"end_call", end_call, METH_NOARGS, "end_call($module, /)\n--\n\nEnd the call that begin_call() named."},
    {0},
};

int zs_py_script_init(PyObject *module)
{
    if (zs_py_on_main_thread()) zs_call_watch();
    zs_script_on_look(look);
    return PyModule_AddFunctions(module, methods);
}
