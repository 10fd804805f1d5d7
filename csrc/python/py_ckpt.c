/* py_ckpt.c - the core's functions for checkpoints besides files: checksums, folders, locks, faults for tests. */
#include "python/py_ckpt.h"

#include "checkpoint/ckpt_folder.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/fs_watch.h"

#include <errno.h>

/* --- shared by the bindings --------------------------------------------------------------------------------------- */

PyObject *zs_py_raise_at(PyObject *path, PyObject *to)
{
    if (!PyErr_Occurred() && zs_last_status() == ZS_ERR_SYSTEM) {
        errno = zs_last_errno();
        zs_clear_error();
        return PyErr_SetFromErrnoWithFilenameObjects(PyExc_OSError, path, to);
    }
    if (!PyErr_Occurred() && zs_last_status() == ZS_ERR_VALUE) { /* contains a path, which need not be UTF-8 */
        PyObject *text = PyUnicode_DecodeFSDefault(zs_last_message());
        if (text != NULL) PyErr_SetObject(PyExc_ValueError, text);
        Py_XDECREF(text);
    }
    return zs_py_raise(NULL);
}

/* The format of numbers that `code` names. */
static int get_numbers(PyObject *code, zs_floats *out)
{
    const char *text = PyUnicode_Check(code) ? PyUnicode_AsUTF8(code) : "";
    if (text == NULL) return -1;
    *out = zs_floats_of(text);
    if (*out != ZS_NO_FLOATS) return 0;
    PyErr_Format(PyExc_ValueError, "%R is not a number format: expected 'BF16', 'F16', 'F32' or 'F64'", code);
    return -1;
}

/* One (offset, memory); for memory that is only read, also (offset, memory, format of numbers). */
static int get_range(PyObject *item, bool writable, zs_ckpt_range *range, Py_buffer *view)
{
    Py_ssize_t size = PyTuple_Check(item) ? PyTuple_GET_SIZE(item) : 0;
    if (size != 2 && (size != 3 || writable)) {
        PyErr_Format(PyExc_TypeError, "a range must be a tuple (offset, memory), got %.100s", Py_TYPE(item)->tp_name);
        return -1;
    }
    range->offset = PyLong_AsLongLong(PyTuple_GET_ITEM(item, 0));
    if (range->offset == -1 && PyErr_Occurred()) return -1;
    if (size == 3 && get_numbers(PyTuple_GET_ITEM(item, 2), &range->numbers) < 0) return -1;
    PyObject *memory = PyTuple_GET_ITEM(item, 1);
    if (PyObject_GetBuffer(memory, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) {
        if (PyErr_ExceptionMatches(PyExc_MemoryError)) return -1;
        PyErr_Format(PyExc_TypeError, "the memory of a range must be a contiguous%s buffer, got %.100s",
                     writable ? " and writable" : "", Py_TYPE(memory)->tp_name);
        return -1;
    }
    range->memory = view->buf;
    range->bytes = (size_t)view->len;
    return 0;
}

int zs_py_ranges_get(PyObject *list, bool writable, zs_py_ranges *out)
{
    *out = (zs_py_ranges){0};
    if (!PyList_Check(list) && !PyTuple_Check(list)) {
        PyErr_Format(PyExc_TypeError, "expected a list of ranges, got %.100s", Py_TYPE(list)->tp_name);
        return -1;
    }
    out->items = PySequence_Tuple(list); /* our own: to access memory may run any code */
    if (out->items == NULL) return -1;
    size_t n = (size_t)PyTuple_GET_SIZE(out->items);
    out->ranges = PyMem_Calloc(n, sizeof *out->ranges);
    out->views = PyMem_Calloc(n, sizeof *out->views);
    int result = 0;
    if (out->ranges == NULL || out->views == NULL) {
        PyErr_NoMemory();
        result = -1;
    }
    for (; result == 0 && out->n < n; out->n += result == 0)
        result = get_range(PyTuple_GET_ITEM(out->items, out->n), writable, &out->ranges[out->n], &out->views[out->n]);
    if (result < 0) zs_py_ranges_free(out);
    return result;
}

void zs_py_ranges_free(zs_py_ranges *ranges)
{
    for (size_t i = 0; i < ranges->n; i++)
        PyBuffer_Release(&ranges->views[i]);
    PyMem_Free(ranges->views);
    PyMem_Free(ranges->ranges);
    Py_CLEAR(ranges->items);
}

/* --- checksums ---------------------------------------------------------------------------------------------------- */

static bool is_crc(long long number)
{
    if (number >= 0 && number <= UINT32_MAX) return true;
    PyErr_Format(PyExc_ValueError, "a CRC-32C must be in [0, 2**32), got %lld", number);
    return false;
}

static PyObject *crc32c(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer data;
    long long crc = 0;
    if (!PyArg_ParseTuple(args, "y*|L:crc32c", &data, &crc)) return NULL;
    uint32_t result = 0;
    bool good = is_crc(crc);
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        result = zs_crc32c((uint32_t)crc, data.buf, (size_t)data.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return good ? PyLong_FromUnsignedLong(result) : NULL;
}

static PyObject *crc32c_join(PyObject *module, PyObject *args)
{
    (void)module;
    long long a, b, length;
    if (!PyArg_ParseTuple(args, "LLL:crc32c_join", &a, &b, &length)) return NULL;
    if (!is_crc(a) || !is_crc(b)) return NULL;
    if (length < 0) return PyErr_Format(PyExc_ValueError, "length_of_b must be non-negative, got %lld", length);
    return PyLong_FromUnsignedLong(zs_crc32c_join((uint32_t)a, (uint32_t)b, (uint64_t)length));
}

/* --- folders ------------------------------------------------------------------------------------------------------ */

/* Calls `act` with a path. */
static PyObject *at_path(PyObject *path, zs_status (*act)(const char *path))
{
    PyObject *raw;
    if (!PyUnicode_FSConverter(path, &raw)) return NULL;
    const char *name = PyBytes_AS_STRING(raw);
    zs_status status;
    ZS_PY_NOGIL(status, act(name));
    Py_DECREF(raw);
    if (status != ZS_OK) return zs_py_raise_at(path, NULL);
    Py_RETURN_NONE;
}

/* The same with two. */
static PyObject *at_paths(PyObject *const *paths, zs_status (*act)(const char *from, const char *to))
{
    PyObject *raw[2];
    if (!PyUnicode_FSConverter(paths[0], &raw[0])) return NULL;
    if (!PyUnicode_FSConverter(paths[1], &raw[1])) {
        Py_DECREF(raw[0]);
        return NULL;
    }
    const char *from = PyBytes_AS_STRING(raw[0]), *to = PyBytes_AS_STRING(raw[1]);
    zs_status status;
    ZS_PY_NOGIL(status, act(from, to));
    Py_DECREF(raw[0]);
    Py_DECREF(raw[1]);
    if (status != ZS_OK) return zs_py_raise_at(paths[0], paths[1]);
    Py_RETURN_NONE;
}

static PyObject *make_folder(PyObject *module, PyObject *path)
{
    (void)module;
    return at_path(path, zs_ckpt_make_folder);
}

static PyObject *sync_folder(PyObject *module, PyObject *path)
{
    (void)module;
    return at_path(path, zs_ckpt_sync_folder);
}

static PyObject *remove_file(PyObject *module, PyObject *path)
{
    (void)module;
    return at_path(path, zs_ckpt_remove_file);
}

static PyObject *remove_folder(PyObject *module, PyObject *path)
{
    (void)module;
    return at_path(path, zs_ckpt_remove_folder);
}

static PyObject *rename_path(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *paths[2];
    if (!PyArg_ParseTuple(args, "OO:rename", &paths[0], &paths[1])) return NULL;
    return at_paths(paths, zs_ckpt_rename);
}

static PyObject *swap(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *paths[2];
    if (!PyArg_ParseTuple(args, "OO:swap", &paths[0], &paths[1])) return NULL;
    return at_paths(paths, zs_ckpt_swap);
}

static PyObject *lock_file(PyObject *module, PyObject *path)
{
    (void)module;
    PyObject *raw;
    if (!PyUnicode_FSConverter(path, &raw)) return NULL;
    const char *name = PyBytes_AS_STRING(raw);
    int fd = -1;
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_lock(name, &fd));
    Py_DECREF(raw);
    return status == ZS_OK ? PyLong_FromLong(fd) : zs_py_raise_at(path, NULL);
}

static PyObject *unlock(PyObject *module, PyObject *object)
{
    (void)module;
    long fd = PyLong_AsLong(object);
    if (fd == -1 && PyErr_Occurred()) return NULL;
    if (fd < 0 || fd > INT_MAX) return PyErr_Format(PyExc_ValueError, "invalid file descriptor: %ld", fd);
    zs_status status;
    ZS_PY_NOGIL(status, zs_ckpt_unlock((int)fd));
    if (status != ZS_OK) return zs_py_raise_at(NULL, NULL);
    Py_RETURN_NONE;
}

/* --- watching ----------------------------------------------------------------------------------------------------- */

/* Gives zs_fs_watch to a module that is not part of this one. */
static const zs_fs_watching watching = {zs_fs_watch};

static PyMethodDef functions[] = {
    {"crc32c", crc32c, METH_VARARGS,
     "crc32c($module, data, crc=0, /)\n--\n\nReturn the CRC-32C of `data`, a contiguous buffer, continuing from the "
     "checksum `crc` of the bytes before it."},
    {"crc32c_join", crc32c_join, METH_VARARGS,
     "crc32c_join($module, a, b, length_of_b, /)\n--\n\nReturn the CRC-32C of the concatenation A + B, given the "
     "checksums of A and B and the length of B in bytes."},
    {"make_folder", make_folder, METH_O, "make_folder($module, path, /)\n--\n\nCreate a directory."},
    {"sync_folder", sync_folder, METH_O,
     "sync_folder($module, path, /)\n--\n\nfsync a directory, so that files created, renamed and removed in it are "
     "durable."},
    {"rename", rename_path, METH_VARARGS,
     "rename($module, old, new, /)\n--\n\nRename a file or directory without replacing `new`."},
    {"swap", swap, METH_VARARGS,
     "swap($module, a, b, /)\n--\n\nAtomically exchange the names of two files or directories."},
    {"remove_file", remove_file, METH_O, "remove_file($module, path, /)\n--\n\nRemove a file or a symbolic link."},
    {"remove_folder", remove_folder, METH_O, "remove_folder($module, path, /)\n--\n\nRemove an empty directory."},
    {"lock_file", lock_file, METH_O,
     "lock_file($module, path, /)\n--\n\nLock a file, creating it if needed, until unlock() is called or this process "
     "and all its forked children exit."},
    {"unlock", unlock, METH_O, "unlock($module, fd, /)\n--\n\nRelease a lock taken by lock_file()."},
    {0},
};

int zs_py_ckpt_init(PyObject *module)
{
    PyObject *capsule = PyCapsule_New((void *)(uintptr_t)&watching, "zshard._core._file_watch", NULL);
    if (capsule == NULL || PyModule_AddObject(module, "_file_watch", capsule) < 0) {
        Py_XDECREF(capsule);
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
