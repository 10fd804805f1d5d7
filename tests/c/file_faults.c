/* file_faults.c - the Python module _file_faults: faults in zshard's file calls, and a log of them. See tests/lib/file_faults.py.
 *
 * zshard._core has a capsule by which its calls can be watched; this module brings the watcher, and is linked
 * with nothing of zshard but the record of errors.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "fs_faults.h"

#include <errno.h>

static PyObject *raised(PyObject *kind)
{
    if (kind == PyExc_OSError && zs_last_errno() != 0) {
        errno = zs_last_errno();
        PyErr_SetFromErrno(kind);
    } else {
        PyErr_SetString(kind, zs_last_message());
    }
    zs_clear_error();
    return NULL;
}

PyDoc_STRVAR(faults_doc, "file_faults($module, nth, what='', times=1, /)\n--\n\nInject faults into file calls"
                         ": the nth call from now (1: the next) and the `times` - 1 calls after it are subject to "
                         "`what`: the name of an errno to fail with (ENOSPC, EIO, EINTR, ...); 'short': read or write "
                         "half; 'kill', 'killafter', 'killshort': kill the process before the call, after it, or after "
                         "half of it. nth 0 injects none. Returns the number of calls since the last file_faults().");

static PyObject *file_faults(PyObject *module, PyObject *args)
{
    (void)module;
    long nth, times = 1, calls = 0;
    const char *what = "";
    if (!PyArg_ParseTuple(args, "l|sl:file_faults", &nth, &what, &times)) return NULL;
    if (zs_fs_set_faults(nth, what, times, &calls) != ZS_OK) return raised(PyExc_ValueError);
    return PyLong_FromLong(calls);
}

PyDoc_STRVAR(log_doc, "file_log($module, path, /)\n--\n\nLog all file calls and the data they write to the file "
                      "`path`, for tests (read by tests/lib/power_cut.py); None stops logging. Raises OSError if that "
                      "fails, or if an earlier call could not be logged.");

static PyObject *file_log(PyObject *module, PyObject *path)
{
    (void)module;
    PyObject *raw = NULL;
    if (path != Py_None && !PyUnicode_FSConverter(path, &raw)) return NULL;
    zs_status status = zs_fs_set_log(raw == NULL ? NULL : PyBytes_AS_STRING(raw));
    Py_XDECREF(raw);
    if (status != ZS_OK) return raised(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"file_faults", file_faults, METH_VARARGS, faults_doc},
    {"file_log", file_log, METH_O, log_doc},
    {0},
};

static int begin(PyObject *module)
{
    (void)module;
    const zs_fs_watching *core = PyCapsule_Import("zshard._core._file_watch", 0);
    if (core == NULL) return -1;
    core->watch(&zs_fs_faults);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, begin}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_file_faults",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__file_faults(void);
PyMODINIT_FUNC PyInit__file_faults(void)
{
    return PyModuleDef_Init(&module_def);
}
