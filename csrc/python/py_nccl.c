/* py_nccl.c - libnccl for Python: sets where to find it, and ends all its uses before the interpreter exits. */
#include "python/py_util.h"

#include "comm/nccl/nccl_comm.h"
#include "comm/nccl/nccl_lib.h"

static PyObject *nccl_library(PyObject *module, PyObject *object)
{
    const char *path = object == Py_None ? NULL : PyUnicode_AsUTF8(object);
    const zs_nccl *nccl = NULL;
    char version[16];
    zs_status status = ZS_OK;
    if (PyErr_Occurred()) return NULL;
    zs_clear_error();
    if (zs_nccl_set_path(path) != ZS_OK) return zs_py_raise(module);
    ZS_PY_NOGIL(status, zs_nccl_load(&nccl));
    if (status != ZS_OK) return zs_py_raise(module);
    zs_nccl_version_text(nccl->version, version, sizeof version);
    return Py_BuildValue("(ss)", version, nccl->where);
}

static PyObject *nccl_abort(PyObject *module, PyObject *object)
{
    (void)module;
    const char *why = PyUnicode_AsUTF8(object);
    if (why == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    zs_nccl_abort_all(why);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"nccl_library", nccl_library, METH_O,
     "nccl_library($module, path, /)\n--\n\nLoad libnccl, unless it is loaded: from ZSHARD_NCCL_LIB, else the one that "
     "torch has loaded, else the file `path` (or None), else the system's."},
    {"nccl_abort", nccl_abort, METH_O,
     "nccl_abort($module, why, /)\n--\n\nAbort all NCCL communicators of this process: their kernels end, and all "
     "later calls fail with `why`."},
    {0},
};

int zs_py_nccl_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
