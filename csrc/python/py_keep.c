/* py_keep.c - what a kept run needs of the core: memory in files, and steps that another process can finish. */
#include "base/file.h"
#include "optim/kept_area.h"
#include "optim/kept_step.h"
#include "optim/optim.h"
#include "python/py_util.h"

#include <stdlib.h>

static PyObject *keep_memory(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    zs_clear_error();
    return zs_py_none(zs_kept_begin());
}

static PyObject *keeps_memory(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(zs_mem_is_diverted());
}

static PyObject *kept_place(PyObject *module, PyObject *object)
{
    (void)module;
    zs_tensor *tensor = NULL;
    zs_tensor_info info;
    zs_mapping found;
    void *data = NULL;
    zs_clear_error();
    zs_status status = zs_py_tensor(object, &tensor);
    ZS_THEN(status, zs_tensor_describe(tensor, &info));
    if (status == ZS_OK && info.numel > 0) status = zs_tensor_data(tensor, &data);
    zs_tensor_free(tensor);
    if (status != ZS_OK) return zs_py_raise(NULL);
    size_t bytes = (size_t)info.numel * info.itemsize;
    if (data == NULL || !info.contiguous || !zs_mapping_of(data, bytes, &found)) Py_RETURN_NONE;
    unsigned long long offset = found.offset + (uint64_t)((char *)data - found.base);
    return Py_BuildValue("iK", found.fd, offset);
}

/* --- the area ----------------------------------------------------------------------------------------------------- */

static PyObject *kept_bytes(PyObject *module, PyObject *args)
{
    zs_kept_room room;
    long long runs, threads;
    (void)module;
    if (!PyArg_ParseTuple(args, "LL:kept_bytes", &runs, &threads)) return NULL;
    room = (zs_kept_room){runs, threads};
    return PyLong_FromSize_t(zs_kept_bytes(&room));
}

static PyObject *kept_format(PyObject *module, PyObject *args)
{
    Py_buffer area;
    long long runs, threads;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*LL:kept_format", &area, &runs, &threads)) return NULL;
    zs_kept_room room = {runs, threads};
    zs_clear_error();
    zs_status status = (size_t)area.len < zs_kept_bytes(&room)
                           ? ZS_FAIL(ZS_ERR_VALUE, "the area needs %zu bytes", zs_kept_bytes(&room))
                           : zs_kept_format(area.buf, &room);
    PyBuffer_Release(&area);
    return zs_py_none(status);
}

static PyObject *kept_mark(PyObject *module, PyObject *args)
{
    Py_buffer area;
    Py_ssize_t at;
    unsigned long long number;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*nK:kept_mark", &area, &at, &number)) return NULL;
    bool fits = at >= 0 && at % 8 == 0 && at + 8 <= area.len;
    if (fits) {
        __atomic_store_n((uint64_t *)(void *)((char *)area.buf + at), number, __ATOMIC_SEQ_CST);
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
    }
    PyBuffer_Release(&area);
    if (!fits) return PyErr_Format(PyExc_ValueError, "kept_mark() expects a multiple of 8 within the buffer");
    Py_RETURN_NONE;
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

/* This process's files of memory, numbered by their descriptors: *new*. */
static zs_status own_files(zs_kept_range **ranges, zs_kept_files *out)
{
    zs_mapping *found = NULL;
    size_t n = 0;
    ZS_TRY(zs_mappings_copy(&found, &n));
    *ranges = malloc((n + 1) * sizeof **ranges);
    for (size_t i = 0; i < n && *ranges != NULL; i++)
        (*ranges)[i] = (zs_kept_range){found[i].base, found[i].bytes, found[i].offset, (uint32_t)found[i].fd};
    free(found);
    *out = (zs_kept_files){*ranges, (int64_t)n};
    return *ranges != NULL ? ZS_OK : ZS_FAIL(ZS_ERR_MEMORY, "out of memory listing mappings");
}

/* The prepared updates of the plans in a list: *new*; NULL with an exception. */
static zs_update_job *jobs_of(PyObject *list, int64_t *runs)
{
    Py_ssize_t n = PyList_GET_SIZE(list);
    zs_update_job *jobs = PyMem_Calloc((size_t)n + 1, sizeof *jobs);
    if (jobs == NULL) return PyErr_NoMemory(), NULL;
    *runs = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        zs_optim *plan = zs_py_plan(PyList_GET_ITEM(list, i));
        if (plan == NULL || zs_optim_job(plan, &jobs[i]) != ZS_OK) {
            PyMem_Free(jobs);
            return plan != NULL ? (void *)zs_py_raise(NULL) : NULL;
        }
        *runs += jobs[i].n_runs;
    }
    return jobs;
}

static PyObject *kept_runs(PyObject *module, PyObject *list)
{
    int64_t runs;
    (void)module;
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "kept_runs() expects a list");
    zs_update_job *jobs = jobs_of(list, &runs);
    if (jobs == NULL) return NULL;
    PyMem_Free(jobs);
    return PyLong_FromLongLong(runs);
}

static PyObject *kept_files(PyObject *module, PyObject *list)
{
    int64_t runs;
    (void)module;
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "kept_files() expects a list");
    zs_update_job *jobs = jobs_of(list, &runs);
    PyObject *set = jobs == NULL ? NULL : PySet_New(NULL);
    for (Py_ssize_t i = 0; set != NULL && i < PyList_GET_SIZE(list); i++) {
        for (int64_t j = 0; set != NULL && j < jobs[i].n_runs; j++) {
            zs_mapping found;
            if (!zs_mapping_of(jobs[i].run[j].grad, 1, &found)) continue; /* kept_write() refuses it */
            PyObject *number = PyLong_FromLong(found.fd);
            if (number == NULL || PySet_Add(set, number) < 0) Py_CLEAR(set);
            Py_XDECREF(number);
        }
    }
    PyMem_Free(jobs);
    PyObject *found = set == NULL ? NULL : PySequence_List(set);
    Py_XDECREF(set);
    return found;
}

static PyObject *kept_look_again(PyObject *module, PyObject *list)
{
    (void)module;
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "kept_look_again() expects a list");
    zs_clear_error();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        zs_optim *plan = zs_py_plan(PyList_GET_ITEM(list, i));
        if (plan == NULL) return NULL;
        if (zs_optim_look_again(plan) != ZS_OK) return zs_py_raise(NULL);
    }
    Py_RETURN_NONE;
}

static PyObject *kept_count(PyObject *module, PyObject *list)
{
    (void)module;
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "kept_count() expects a list");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        zs_optim *plan = zs_py_plan(PyList_GET_ITEM(list, i));
        if (plan == NULL) return NULL;
        zs_optim_count(plan);
    }
    Py_RETURN_NONE;
}

/* Is all of the area there that its own head claims? */
static zs_status check_area(const Py_buffer *area)
{
    const zs_kept_head *head = area->buf;
    size_t bytes = (size_t)area->len, whole = bytes >= sizeof *head ? zs_kept_bytes(&head->room) : 0;
    if (whole > 0 && whole <= bytes) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE, "the kept area is damaged: %zu bytes long", bytes);
}

static PyObject *kept_write(PyObject *module, PyObject *args)
{
    Py_buffer area;
    unsigned long long step;
    PyObject *list;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*KO!:kept_write", &area, &step, &PyList_Type, &list)) return NULL;
    int64_t runs;
    zs_kept_range *ranges = NULL;
    zs_kept_files files;
    zs_clear_error();
    zs_update_job *jobs = jobs_of(list, &runs);
    zs_status status = jobs == NULL ? ZS_ERR_TORCH : own_files(&ranges, &files);
    ZS_THEN(status, check_area(&area));
    ZS_THEN(status, zs_kept_write(area.buf, step, jobs, PyList_GET_SIZE(list), &files));
    free(ranges);
    PyMem_Free(jobs);
    PyBuffer_Release(&area);
    return zs_py_none(status);
}

/* One mapping in a list of (number, writable buffer): the whole file from its begin on. */
static int add_file(PyObject *pair, zs_kept_range *out, Py_buffer *buffer)
{
    unsigned int number;
    if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "Iw*", &number, buffer)) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "expected (number, buffer) for each file");
        return -1;
    }
    *out = (zs_kept_range){buffer->buf, (size_t)buffer->len, 0, number};
    return 0;
}

static PyObject *kept_finish(PyObject *module, PyObject *args)
{
    Py_buffer area;
    unsigned long long step;
    PyObject *list = Py_None;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*K|O:kept_finish", &area, &step, &list)) return NULL;
    Py_ssize_t n = PyList_Check(list) ? PyList_GET_SIZE(list) : 0, held = 0;
    Py_buffer *buffers = PyMem_Calloc((size_t)n + 1, sizeof *buffers);
    zs_kept_range *ranges = NULL;
    zs_kept_files files = {NULL, n};
    zs_clear_error();
    zs_status status = buffers == NULL ? ZS_FAIL(ZS_ERR_MEMORY, "out of memory listing files") : ZS_OK;
    if (list == Py_None) {
        ZS_THEN(status, own_files(&ranges, &files));
    } else {
        files.ranges = ranges = malloc(((size_t)n + 1) * sizeof *ranges);
        while (ranges != NULL && buffers != NULL && held < n &&
               add_file(PyList_GET_ITEM(list, held), &ranges[held], &buffers[held]) == 0)
            held++;
        if (held < n) status = ZS_ERR_TORCH; /* an exception is set, unless memory is out */
    }
    if (status == ZS_OK) ZS_PY_NOGIL(status, zs_kept_finish(area.buf, (size_t)area.len, step, &files));
    while (held > 0)
        PyBuffer_Release(&buffers[--held]);
    free(ranges);
    PyMem_Free(buffers);
    PyBuffer_Release(&area);
    return zs_py_none(status);
}

static PyMethodDef functions[] = {
    {"keep_memory", keep_memory, METH_NOARGS,
     "keep_memory($module, /)\n--\n\nPut this process's parameters, gradients and optimizer state into files of memory "
     "from now on."},
    {"keeps_memory", keeps_memory, METH_NOARGS, "keeps_memory($module, /)\n--\n\nWhether keep_memory() was called."},
    {"kept_place", kept_place, METH_O,
     "kept_place($module, tensor, /)\n--\n\nReturn (descriptor, offset in that file) of a contiguous tensor's "
     "elements, or None if they do not lie in a file of memory."},
    {"kept_bytes", kept_bytes, METH_VARARGS,
     "kept_bytes($module, runs, threads, /)\n--\n\nReturn the bytes of an area for kept_write()."},
    {"kept_format", kept_format, METH_VARARGS,
     "kept_format($module, area, runs, threads, /)\n--\n\nMake a new area in a writable buffer of kept_bytes() bytes, "
     "which begins at a page."},
    {"kept_mark", kept_mark, METH_VARARGS,
     "kept_mark($module, area, at, number, /)\n--\n\nStore a number, 8 bytes, after all stores before and ahead of all "
     "later ones."},
    {"kept_files", kept_files, METH_O,
     "kept_files($module, plans, /)\n--\n\nReturn the descriptors of the files in which the gradients of prepared "
     "plans lie."},
    {"kept_runs", kept_runs, METH_O,
     "kept_runs($module, plans, /)\n--\n\nReturn how many runs prepared OptimPlans have."},
    {"kept_look_again", kept_look_again, METH_O,
     "kept_look_again($module, plans, /)\n--\n\nMake sure that gradients are as they were when the plans were "
     "prepared."},
    {"kept_count", kept_count, METH_O,
     "kept_count($module, plans, /)\n--\n\nCount the prepared step in the optimizers' state."},
    {"kept_write", kept_write, METH_VARARGS,
     "kept_write($module, area, step, plans, /)\n--\n\nRecord step number `step` of prepared OptimPlans in an area; "
     "update nothing."},
    {"kept_finish", kept_finish, METH_VARARGS,
     "kept_finish($module, area, step, files=None, /)\n--\n\nUpdate what is left of step `step`, recorded in an area."},
    {0},
};

int zs_py_keep_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
