/* py_files.c - _core.File: an open file of a checkpoint, as Python sees it.
 *
 * A file is closed when no thread uses it: descriptors are reused, so another thread's bytes would go to the wrong
 * file.
 */
#include "python/py_ckpt.h"

typedef struct file_object {
    PyObject_HEAD
    zs_ckpt_file file; /* its path is borrowed from `raw` */
    PyObject *path;    /* str */
    PyObject *raw;     /* the same, bytes */
    int users;         /* calls in progress */
} file_object;

/* --- make and close ----------------------------------------------------------------------------------------------- */

static void file_dealloc(file_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_file_close(&self->file));
    (void)status; /* no caller to report to; call close() to get the error */
    zs_clear_error();
    Py_XDECREF(self->path);
    Py_XDECREF(self->raw);
    type->tp_free(self);
    Py_DECREF(type);
}

/* *new* closed file, with its path. */
static file_object *new_file(PyObject *type, PyObject *path)
{
    file_object *self = (file_object *)((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    if (self == NULL) return NULL;
    self->file.fd = -1;
    if (PyUnicode_FSConverter(path, &self->raw))
        self->path = PyUnicode_DecodeFSDefaultAndSize(PyBytes_AS_STRING(self->raw), PyBytes_GET_SIZE(self->raw));
    if (self->path == NULL) Py_CLEAR(self);
    return self;
}

/* The result of an attempt to open. Steals `self`. */
static PyObject *opened(file_object *self, zs_status status)
{
    if (status == ZS_OK) return (PyObject *)self;
    zs_py_raise_at(self->path, NULL);
    self->file.fd = -1;
    Py_DECREF(self);
    return NULL;
}

static PyObject *file_open(PyObject *type, PyObject *args)
{
    PyObject *path;
    int follow = 1;
    if (!PyArg_ParseTuple(args, "O|p:open", &path, &follow)) return NULL;
    file_object *self = new_file(type, path);
    if (self == NULL) return NULL;
    const char *name = PyBytes_AS_STRING(self->raw);
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_file_open(name, follow != 0, &self->file));
    return opened(self, status);
}

static PyObject *file_open_to_write(PyObject *type, PyObject *path)
{
    file_object *self = new_file(type, path);
    if (self == NULL) return NULL;
    const char *name = PyBytes_AS_STRING(self->raw);
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_file_open_to_write(name, &self->file));
    return opened(self, status);
}

static PyObject *file_create(PyObject *type, PyObject *args)
{
    PyObject *path;
    long long size;
    if (!PyArg_ParseTuple(args, "OL:create", &path, &size)) return NULL;
    file_object *self = new_file(type, path);
    if (self == NULL) return NULL;
    const char *name = PyBytes_AS_STRING(self->raw);
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_file_create(name, size, &self->file));
    return opened(self, status);
}

static PyObject *file_close(file_object *self, PyObject *unused)
{
    (void)unused;
    if (self->users > 0)
        return PyErr_Format(PyExc_RuntimeError, "cannot close '%U': another thread is using it", self->path);
    zs_ckpt_file file = self->file;
    self->file.fd = -1; /* before other threads run */
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_file_close(&file));
    if (status != ZS_OK) return zs_py_raise_at(self->path, NULL);
    Py_RETURN_NONE;
}

static PyObject *file_enter(file_object *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(self);
}

static PyObject *file_exit(file_object *self, PyObject *unused)
{
    return file_close(self, unused);
}

/* --- use ---------------------------------------------------------------------------------------------------------- */

/* Is it open? Then it stays open until `done`. */
static bool begin(file_object *self)
{
    if (self->file.fd < 0) {
        PyErr_Format(PyExc_ValueError, "'%U' is closed", self->path);
        return false;
    }
    self->users++;
    return true;
}

/* The result of a call that returned `status`. Steals `result`. */
static PyObject *done(file_object *self, zs_status status, PyObject *result)
{
    self->users--;
    if (status == ZS_OK) return result;
    Py_XDECREF(result);
    return zs_py_raise_at(self->path, NULL);
}

static PyObject *file_size(file_object *self, void *unused)
{
    (void)unused;
    int64_t size = 0;
    if (!begin(self)) return NULL;
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_file_size(&self->file, &size));
    return done(self, status, PyLong_FromLongLong(size));
}

static PyObject *file_path(file_object *self, void *unused)
{
    (void)unused;
    return Py_NewRef(self->path);
}

static PyObject *file_sync(file_object *self, PyObject *unused)
{
    (void)unused;
    if (!begin(self)) return NULL;
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_file_sync(&self->file));
    return done(self, status, Py_NewRef(Py_None));
}

static PyObject *file_read(file_object *self, PyObject *list)
{
    zs_py_ranges ranges;
    if (zs_py_ranges_get(list, true, &ranges) < 0) return NULL;
    PyObject *result = NULL;
    if (begin(self)) {
        zs_status status;
        ZS_PY_NOGIL(status, zs_ckpt_file_read(&self->file, ranges.ranges, ranges.n));
        result = done(self, status, Py_NewRef(Py_None));
    }
    zs_py_ranges_free(&ranges);
    return result;
}

/* *new* bytes for so many sums; NULL with an exception set. */
static PyObject *room_for(size_t sums)
{
    if (sums > PY_SSIZE_T_MAX / sizeof(zs_ckpt_sum)) return PyErr_NoMemory();
    return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(sums * sizeof(zs_ckpt_sum)));
}

/* Appends the places of ranges with non-finite numbers; -1 with an exception set. */
static int tell_strange(PyObject *list, const zs_py_ranges *ranges)
{
    for (size_t i = 0; i < ranges->n; i++) {
        if (!ranges->ranges[i].strange) continue;
        PyObject *place = PyLong_FromSize_t(i);
        int result = place == NULL ? -1 : PyList_Append(list, place);
        Py_XDECREF(place);
        if (result < 0) return -1;
    }
    return 0;
}

static PyObject *write_ranges(file_object *self, const zs_py_ranges *ranges, int64_t block)
{
    size_t n = 0;
    zs_clear_error();
    if (zs_ckpt_file_sums(&self->file, ranges->ranges, ranges->n, block, &n) != ZS_OK)
        return zs_py_raise_at(self->path, NULL);
    PyObject *result = room_for(n);
    if (result == NULL || !begin(self)) {
        Py_XDECREF(result);
        return NULL;
    }
    zs_ckpt_sum *sums = (zs_ckpt_sum *)(void *)PyBytes_AS_STRING(result);
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_file_write(&self->file, ranges->ranges, ranges->n, block, sums));
    return done(self, status, result);
}

static PyObject *file_write(file_object *self, PyObject *args)
{
    PyObject *list, *strange = Py_None;
    long long block;
    zs_py_ranges ranges;
    if (!PyArg_ParseTuple(args, "OL|O:write", &list, &block, &strange)) return NULL;
    if (strange != Py_None && !PyList_Check(strange))
        return PyErr_Format(PyExc_TypeError, "write() expects a list as strange, got %.100s",
                            Py_TYPE(strange)->tp_name);
    if (zs_py_ranges_get(list, false, &ranges) < 0) return NULL;
    PyObject *result = write_ranges(self, &ranges, block);
    if (result != NULL && strange != Py_None && tell_strange(strange, &ranges) < 0) Py_CLEAR(result);
    zs_py_ranges_free(&ranges);
    return result;
}

/* Computes the sums of one range into new bytes. */
static PyObject *check_range(file_object *self, const zs_ckpt_range *range, int64_t block)
{
    size_t n = 0;
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_file_reaches(&self->file, range, 1));
    ZS_THEN(status, zs_ckpt_file_sums(&self->file, range, 1, block, &n));
    if (status != ZS_OK) return zs_py_raise_at(self->path, NULL);
    PyObject *result = room_for(n);
    if (result == NULL) return NULL;
    zs_ckpt_sum *sums = (zs_ckpt_sum *)(void *)PyBytes_AS_STRING(result);
    ZS_PY_NOGIL(status, zs_ckpt_file_check(&self->file, *range, block, sums));
    if (status == ZS_OK) return result;
    Py_DECREF(result);
    return zs_py_raise_at(self->path, NULL);
}

static PyObject *file_check(file_object *self, PyObject *args)
{
    long long from, to, block;
    if (!PyArg_ParseTuple(args, "LLL:check", &from, &to, &block)) return NULL;
    if (from < 0 || to < from)
        return PyErr_Format(PyExc_ValueError, "'%U': invalid byte range [%lld, %lld)", self->path, from, to);
    if (!begin(self)) return NULL;
    zs_ckpt_range range = {.offset = from, .bytes = (size_t)(to - from)};
    PyObject *result = check_range(self, &range, block);
    self->users--;
    return result;
}

static PyMethodDef file_methods[] = {
    {"open", file_open, METH_VARARGS | METH_CLASS,
     "open($type, path, follow=True, /)\n--\n\nOpen a regular file for reading."},
    {"open_to_write", file_open_to_write, METH_O | METH_CLASS,
     "open_to_write($type, path, /)\n--\n\nOpen an existing regular file for writing, without following a symbolic "
     "link."},
    {"create", file_create, METH_VARARGS | METH_CLASS,
     "create($type, path, size, /)\n--\n\nCreate a file of `size` zero bytes for writing."},
    {"read", (PyCFunction)(void (*)(void))file_read, METH_O,
     "read($self, ranges, /)\n--\n\nRead into all ranges [(offset in the file, writable memory)]."},
    {"write", (PyCFunction)(void (*)(void))file_write, METH_VARARGS,
     "write($self, ranges, block, strange=None, /)\n--\n\nWrite all ranges [(offset in the file, memory)]."},
    {"check", (PyCFunction)(void (*)(void))file_check, METH_VARARGS,
     "check($self, begin, end, block, /)\n--\n\nRead bytes [begin, end) of the file in small pieces and return only "
     "their checksums, in the format of write()."},
    {"sync", (PyCFunction)(void (*)(void))file_sync, METH_NOARGS, "sync($self, /)\n--\n\nfsync the file."},
    {"close", (PyCFunction)(void (*)(void))file_close, METH_NOARGS,
     "close($self, /)\n--\n\nClose the file; no-op if it is closed."},
    {"__enter__", (PyCFunction)(void (*)(void))file_enter, METH_NOARGS, "__enter__($self, /)\n--\n\nReturn the file."},
    {"__exit__", (PyCFunction)(void (*)(void))file_exit, METH_VARARGS,
     "__exit__($self, type, value, traceback, /)\n--\n\nClose the file."},
    {0},
};

static PyGetSetDef file_getset[] = {
    {"path", (getter)(void (*)(void))file_path, NULL, "Path that the file was opened by.", NULL},
    {"size", (getter)(void (*)(void))file_size, NULL, "Current size in bytes.", NULL},
    {0},
};

static PyType_Slot file_slots[] = {
    {Py_tp_dealloc, file_dealloc},
    {Py_tp_methods, file_methods},
    {Py_tp_getset, file_getset},
    {Py_tp_doc,
     "An open regular file of a checkpoint, and a context manager that closes it. All methods release the GIL."},
    {0, NULL},
};

static PyType_Spec file_spec = {
    .name = "zshard._core.File",
    .basicsize = sizeof(file_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = file_slots,
};

int zs_py_files_init(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &file_spec, NULL);
    if (type == NULL) return -1;
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result < 0 ? -1 : zs_py_ckpt_init(module);
}
