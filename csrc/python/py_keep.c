/* py_keep.c - the core's part of a kept run: memory in files; _core.KeptStep, a step that another process can finish;
 * and three methods of _core.OptimPlan. */
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

/* --- the plans of a prepared step --------------------------------------------------------------------------------- */

PyObject *zs_py_look_again(PyObject *self, PyObject *unused)
{
    (void)unused;
    zs_clear_error();
    return zs_py_none(zs_optim_look_again(zs_py_plan(self)));
}

PyObject *zs_py_count(PyObject *self, PyObject *unused)
{
    (void)unused;
    zs_optim_count(zs_py_plan(self));
    Py_RETURN_NONE;
}

PyObject *zs_py_grad_files(PyObject *self, PyObject *unused)
{
    (void)unused;
    zs_update_job job;
    zs_clear_error();
    if (zs_optim_job(zs_py_plan(self), &job) != ZS_OK) return zs_py_raise(NULL);
    PyObject *list = PyList_New((Py_ssize_t)job.n_runs);
    for (int64_t i = 0; list != NULL && i < job.n_runs; i++) {
        zs_mapping found = {.fd = -1}; /* KeptStep.write() refuses it */
        zs_mapping_of(job.run[i].grad, 1, &found);
        PyObject *number = PyLong_FromLong(found.fd);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, number);
    }
    return list;
}

/* The prepared updates of the plans in a list: *new*; NULL with an exception. */
static zs_update_job *jobs_of(PyObject *list)
{
    Py_ssize_t n = PyList_GET_SIZE(list);
    zs_update_job *jobs = PyMem_Calloc((size_t)n + 1, sizeof *jobs);
    if (jobs == NULL) return PyErr_NoMemory(), NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        zs_optim *plan = zs_py_plan(PyList_GET_ITEM(list, i));
        if (plan == NULL || zs_optim_job(plan, &jobs[i]) != ZS_OK) {
            PyMem_Free(jobs);
            return plan != NULL ? (void *)zs_py_raise(NULL) : NULL;
        }
    }
    return jobs;
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

typedef struct step_object {
    PyObject_HEAD
    Py_buffer area; /* the record; the type holds on to it */
} step_object;

static PyObject *step_bytes(PyObject *type, PyObject *args)
{
    long long runs, threads;
    (void)type;
    if (!PyArg_ParseTuple(args, "LL:bytes", &runs, &threads)) return NULL;
    return PyLong_FromSize_t(zs_kept_bytes(&(zs_kept_room){runs, threads}));
}

/* Makes a new area, if it has a room; is all of it there that its own head claims? */
static zs_status open_area(const Py_buffer *area, const zs_kept_room *room)
{
    const zs_kept_head *head = area->buf;
    size_t bytes = (size_t)area->len;
    if (room->threads > 0 && bytes < zs_kept_bytes(room))
        return ZS_FAIL(ZS_ERR_VALUE, "the area needs %zu bytes", zs_kept_bytes(room));
    if (room->threads > 0) ZS_TRY(zs_kept_format(area->buf, room));
    size_t needed = bytes >= sizeof *head ? zs_kept_bytes(&head->room) : 0;
    if (needed > 0 && needed <= bytes) return ZS_OK;
    return ZS_FAIL(ZS_ERR_VALUE, "the kept area is damaged: %zu bytes long", bytes);
}

static PyObject *step_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    long long runs = 0, threads = 0;
    step_object *self = kwargs == NULL ? (step_object *)type->tp_alloc(type, 0) : NULL;
    if (self == NULL) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "KeptStep() takes no keywords");
    zs_clear_error();
    if (PyArg_ParseTuple(args, "w*|LL:KeptStep", &self->area, &runs, &threads)) {
        if (open_area(&self->area, &(zs_kept_room){runs, threads}) == ZS_OK) return (PyObject *)self;
        zs_py_raise(NULL);
    }
    Py_DECREF(self);
    return NULL;
}

static void step_dealloc(step_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&self->area);
    type->tp_free(self);
    Py_DECREF(type);
}

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

static PyObject *step_write(step_object *self, PyObject *args)
{
    unsigned long long step;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "KO!:write", &step, &PyList_Type, &list)) return NULL;
    zs_kept_range *ranges = NULL;
    zs_kept_files files;
    zs_clear_error();
    zs_update_job *jobs = jobs_of(list);
    zs_status status = jobs == NULL ? ZS_ERR_TORCH : own_files(&ranges, &files);
    ZS_THEN(status, zs_kept_write(self->area.buf, step, jobs, PyList_GET_SIZE(list), &files));
    free(ranges);
    PyMem_Free(jobs);
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

static PyObject *step_finish(step_object *self, PyObject *args)
{
    unsigned long long step;
    PyObject *list = Py_None;
    if (!PyArg_ParseTuple(args, "K|O:finish", &step, &list)) return NULL;
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
    if (status == ZS_OK) ZS_PY_NOGIL(status, zs_kept_finish(self->area.buf, (size_t)self->area.len, step, &files));
    while (held > 0)
        PyBuffer_Release(&buffers[--held]);
    free(ranges);
    PyMem_Free(buffers);
    return zs_py_none(status);
}

static PyMethodDef step_methods[] = {
    {"bytes", step_bytes, METH_VARARGS | METH_STATIC,
     "bytes(runs, threads, /)\n--\n\nReturn the bytes of memory for steps of so many runs, on so many threads."},
    {"write", (PyCFunction)(void (*)(void))step_write, METH_VARARGS,
     "write($self, step, plans, /)\n--\n\nRecord step number `step` of prepared OptimPlans; update nothing."},
    {"finish", (PyCFunction)(void (*)(void))step_finish, METH_VARARGS,
     "finish($self, step, files=None, /)\n--\n\nUpdate what is left of the recorded step `step`."},
    {0},
};

static PyType_Slot step_slots[] = {
    {Py_tp_doc,
     (void *)"KeptStep(memory, runs=0, threads=0)  The record of an optimizer step in a writable buffer that "
             "begins at a page: a new one of bytes(runs, threads) bytes, or that of a killed process."},
    {Py_tp_new, step_new},
    {Py_tp_dealloc, step_dealloc},
    {Py_tp_methods, step_methods},
    {0, NULL},
};

static PyType_Spec step_spec = {
    .name = "zshard._core.KeptStep",
    .basicsize = sizeof(step_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = step_slots,
};

static PyMethodDef functions[] = {
    {"keep_memory", keep_memory, METH_NOARGS,
     "keep_memory($module, /)\n--\n\nPut this process's parameters, gradients and optimizer state into files of memory "
     "from now on."},
    {"keeps_memory", keeps_memory, METH_NOARGS, "keeps_memory($module, /)\n--\n\nWhether keep_memory() was called."},
    {"kept_place", kept_place, METH_O,
     "kept_place($module, tensor, /)\n--\n\nReturn (descriptor, offset in that file) of a contiguous tensor's "
     "elements, or None if they do not lie in a file of memory."},
    {0},
};

int zs_py_keep_init(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &step_spec, NULL);
    int failed = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed != 0 ? -1 : PyModule_AddFunctions(module, functions);
}
