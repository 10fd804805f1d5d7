/* py_unit.c - _core.Unit: one unit, for Python. Its forward hooks are in py_forward.c. */
#include "engine/engine.h"
#include "engine/history.h"
#include "engine/recording.h"
#include "python/py_faces.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

zs_unit *zs_py_unit(PyObject *object)
{
    if (Py_IS_TYPE(object, zs_py_get_state()->unit_type)) return ((unit_object *)object)->unit;
    PyErr_Format(PyExc_TypeError, "expected a zshard._core.Unit, got %.100s", Py_TYPE(object)->tp_name);
    return NULL;
}

zs_unit **zs_py_units(PyObject *list, size_t *n)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of units");
        return NULL;
    }
    *n = (size_t)PyList_GET_SIZE(list);
    zs_unit **units = calloc(*n + 1, sizeof(zs_unit *));
    if (units == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < *n; i++) {
        units[i] = zs_py_unit(PyList_GET_ITEM(list, (Py_ssize_t)i));
        if (units[i] != NULL) continue;
        free(units);
        return NULL;
    }
    return units;
}

/* --- making one --------------------------------------------------------------------------------------------------- */

/* A dtype by its name in torch; None: ZS_BYTES. */
static int parse_dtype(PyObject *name, zs_dtype *out)
{
    static const char *const names[] = {
        [ZS_F32] = "float32", [ZS_F64] = "float64", [ZS_BF16] = "bfloat16", [ZS_F16] = "float16"};
    *out = ZS_BYTES;
    if (name == NULL || name == Py_None) return 0;
    const char *text = PyUnicode_AsUTF8(name);
    if (text == NULL) return -1;
    for (int i = 0; i < ZS_BYTES; i++) {
        if (strcmp(text, names[i]) != 0) continue;
        *out = (zs_dtype)i;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "unsupported dtype '%s': expected float32, float64, bfloat16 or float16", text);
    return -1;
}

typedef struct param_lists {
    const char **names;  /* [n] borrowed from the list of names */
    zs_tensor **tensors; /* [n] owned handles */
    bool *keep;          /* [n] owned */
    Py_ssize_t n;
} param_lists;

static void free_lists(param_lists *lists)
{
    for (Py_ssize_t i = 0; lists->tensors != NULL && i < lists->n; i++)
        zs_tensor_free(lists->tensors[i]);
    free(lists->tensors);
    free(lists->names);
    free(lists->keep);
}

/* Reads which parameters keep their dtype: a set of indices, or NULL for none. */
static int read_keep(PyObject *indices, param_lists *lists)
{
    lists->keep = calloc((size_t)lists->n + 1, sizeof *lists->keep);
    if (lists->keep == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; indices != NULL && i < lists->n; i++) {
        PyObject *index = PyLong_FromSsize_t(i);
        int found = index != NULL ? PySet_Contains(indices, index) : -1;
        Py_XDECREF(index);
        if (found < 0) return -1;
        lists->keep[i] = found != 0;
    }
    return 0;
}

static int read_lists(PyObject *names, PyObject *tensors, param_lists *out)
{
    out->n = PyList_GET_SIZE(names);
    if (PyList_GET_SIZE(tensors) != out->n) {
        PyErr_SetString(PyExc_ValueError, "a unit requires one name per parameter");
        return -1;
    }
    out->names = calloc((size_t)out->n + 1, sizeof *out->names);
    out->tensors = calloc((size_t)out->n + 1, sizeof *out->tensors);
    if (out->names == NULL || out->tensors == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < out->n; i++) {
        out->names[i] = PyUnicode_AsUTF8(PyList_GET_ITEM(names, i));
        if (out->names[i] == NULL) return -1;
        zs_clear_error();
        if (zs_py_tensor(PyList_GET_ITEM(tensors, i), &out->tensors[i]) != ZS_OK) {
            zs_py_raise(NULL);
            return -1;
        }
    }
    return 0;
}

static void fill_spec(zs_unit_spec *spec, const param_lists *lists)
{
    spec->n_params = lists->n;
    spec->names = lists->names;
    spec->tensors = lists->tensors;
    spec->keep = lists->keep;
}

/* Stores the places (index, dict, key) of a list; -1 with an exception. */
static int take_places(unit_object *self, PyObject *list)
{
    self->places = calloc((size_t)PyList_GET_SIZE(list) + 1, sizeof *self->places);
    if (self->places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        long long index;
        PyObject *dict, *key;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "LO!O", &index, &PyDict_Type, &dict, &key)) return -1;
        PyObject *param = PyDict_GetItemWithError(dict, key);
        if (param == NULL || index < 0 || index >= self->unit->n_params) {
            if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key);
            return -1;
        }
        self->places[self->n_places++] = (param_place){Py_NewRef(dict), Py_NewRef(key), Py_NewRef(param), index};
    }
    return 0;
}

static PyObject *unit_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"engine",  "name", "strategy", "names",   "tensors", "places",
                               "compute", "wire", "keep",     "dry_run", NULL};
    PyObject *engine_obj, *names, *tensors, *places, *compute = NULL, *wire = NULL, *keep = NULL;
    const char *strategy;
    int dry_run = 0;
    zs_unit_spec spec = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OssO!O!O!|OOO!p:Unit", keywords, &engine_obj, &spec.name, &strategy,
                                     &PyList_Type, &names, &PyList_Type, &tensors, &PyList_Type, &places, &compute,
                                     &wire, &PySet_Type, &keep, &dry_run))
        return NULL;
    spec.dry_run = dry_run != 0;
    if (parse_dtype(compute, &spec.precision.compute) < 0 || parse_dtype(wire, &spec.precision.wire) < 0) return NULL;
    zs_engine *engine = zs_py_engine(engine_obj);
    if (engine == NULL || zs_py_parse_strategy(strategy, &spec.strategy) < 0) return NULL;
    param_lists lists = {0};
    zs_unit *unit = NULL;
    if (read_lists(names, tensors, &lists) == 0 && read_keep(keep, &lists) == 0) {
        fill_spec(&spec, &lists);
        zs_status status;
        ZS_PY_NOGIL(status, zs_unit_new(zs_engine_context(engine), &spec, &unit));
        if (status != ZS_OK) zs_py_raise(NULL);
    }
    free_lists(&lists);
    if (unit == NULL) return NULL;
    unit_object *self = (unit_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        zs_unit_release(unit);
        return NULL;
    }
    self->unit = unit;
    if (take_places(self, places) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *unit_check(PyObject *type, PyObject *args)
{
    (void)type;
    PyObject *names, *tensors;
    zs_unit_spec spec = {.precision = {ZS_BYTES, ZS_BYTES}};
    if (!PyArg_ParseTuple(args, "sO!O!:check", &spec.name, &PyList_Type, &names, &PyList_Type, &tensors)) return NULL;
    param_lists lists = {0};
    bool good = read_lists(names, tensors, &lists) == 0;
    if (good) {
        fill_spec(&spec, &lists);
        zs_clear_error();
        good = zs_unit_check(&spec) == ZS_OK;
        if (!good) zs_py_raise(NULL);
    }
    free_lists(&lists);
    if (!good) return NULL;
    Py_RETURN_NONE;
}

/* Modules hold their unit, and the places hold the contents of modules: a hook on a parameter closes the circle. */
static int unit_traverse(unit_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < self->n_places; i++) {
        Py_VISIT(self->places[i].dict);
        Py_VISIT(self->places[i].key);
        Py_VISIT(self->places[i].param);
    }
    return 0;
}

static int unit_clear(unit_object *self)
{
    param_place *places = self->places;
    Py_ssize_t n = self->n_places;
    self->places = NULL; /* first: dropping references may call back here */
    self->n_places = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_DECREF(places[i].dict);
        Py_DECREF(places[i].key);
        Py_DECREF(places[i].param);
    }
    free(places);
    return 0;
}

static void unit_dealloc(unit_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    zs_py_hide(self);
    zs_profile_end(self->forward);
    if (self->unit != NULL) self->unit->gone = true;
    zs_unit_release(self->unit);
    (void)unit_clear(self);
    Py_XDECREF(self->buffers);
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- by hand ------------------------------------------------------------------------------------------------------ */

static PyObject *unit_unshard(unit_object *self, PyObject *args)
{
    int exact = 0;
    if (!PyArg_ParseTuple(args, "|p:unshard", &exact)) return NULL;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_summon(self->unit, exact != 0));
    return zs_py_shown(zs_engine_of(self->unit), status);
}

static PyObject *unit_reshard(unit_object *self, PyObject *unused)
{
    (void)unused;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_dismiss(self->unit));
    return zs_py_shown(zs_engine_of(self->unit), status);
}

static PyObject *unit_pin(unit_object *self, PyObject *args)
{
    int exact = 0;
    if (!PyArg_ParseTuple(args, "|p:pin", &exact)) return NULL;
    bool before = self->unit->record.pinned;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_unshard(self->unit, exact));
    bool pinned = self->unit->record.pinned && !before;
    if (pinned) ZS_THEN(status, zs_recording_by_hand(self->unit));
    zs_py_show(zs_engine_of(self->unit));
    return status != ZS_OK ? zs_py_raise(NULL) : PyBool_FromLong(pinned);
}

static PyObject *unit_accept(unit_object *self, PyObject *unused)
{
    (void)unused;
    return zs_py_none(zs_unit_accept(self->unit, true));
}

static PyObject *unit_unpin(unit_object *self, PyObject *args)
{
    int discard = 0;
    if (!PyArg_ParseTuple(args, "|p:unpin", &discard)) return NULL;
    if (discard) (void)zs_unit_accept(self->unit, false); /* copies nothing, so it cannot fail */
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_reshard(self->unit));
    return zs_py_shown(zs_engine_of(self->unit), status);
}

static PyObject *unit_unwind(unit_object *self, PyObject *args)
{
    Py_ssize_t n;
    const char *what;
    if (!PyArg_ParseTuple(args, "ns:unwind", &n, &what)) return NULL;
    zs_status status;
    if (n == 0 && *what != 0) zs_engine_publish_failure(zs_engine_of(self->unit), what);
    ZS_PY_NOGIL(status, zs_engine_unwind(zs_engine_of(self->unit), (size_t)n));
    return zs_py_shown(zs_engine_of(self->unit), status);
}

static PyObject *unit_note_load(unit_object *self, PyObject *args)
{
    long long index;
    unsigned long long content;
    if (!PyArg_ParseTuple(args, "LK:note_load", &index, &content)) return NULL;
    if (index < 0 || index >= self->unit->n_params)
        return PyErr_Format(PyExc_IndexError, "parameter %lld is out of range", index);
    zs_unit_note_load(self->unit, index, content);
    Py_RETURN_NONE;
}

static zs_status read_into(const zs_unit *unit, int64_t i, PyObject *object)
{
    zs_tensor *out = NULL;
    zs_tensor_info info;
    void *data = NULL;
    ZS_TRY(zs_py_tensor(object, &out));
    zs_status status = zs_tensor_describe(out, &info);
    if (status == ZS_OK && (!info.contiguous || info.numel != unit->params[i].numel ||
                            info.itemsize != unit->flats[unit->params[i].flat].layout.itemsize))
        status = ZS_FAIL(ZS_ERR_VALUE,
                         "the output tensor of parameter '%s' must be contiguous, with the parameter's size and dtype",
                         unit->params[i].name);
    if (status == ZS_OK && info.numel > 0) status = zs_tensor_data(out, &data);
    if (status == ZS_OK && info.numel > 0) status = zs_unit_read_param(unit, i, data, info.where);
    zs_tensor_free(out);
    return status;
}

static int64_t check_index(const zs_unit *unit, Py_ssize_t i)
{
    if (i >= 0 && i < unit->n_params) return i;
    PyErr_Format(PyExc_IndexError, "parameter index out of range: unit '%s' has %lld parameters",
                 zs_unit_label(unit->name), (long long)unit->n_params);
    return -1;
}

static PyObject *unit_read_param(unit_object *self, PyObject *args)
{
    Py_ssize_t i;
    PyObject *out;
    if (!PyArg_ParseTuple(args, "nO:read_param", &i, &out) || check_index(self->unit, i) < 0) return NULL;
    zs_clear_error();
    return zs_py_none(read_into(self->unit, i, out));
}

static PyObject *unit_param(unit_object *self, PyObject *index)
{
    Py_ssize_t i = PyNumber_AsSsize_t(index, PyExc_IndexError);
    if ((i == -1 && PyErr_Occurred()) || check_index(self->unit, i) < 0) return NULL;
    return zs_py_describe_param(self->unit, &self->unit->params[i]);
}

/* --- type --------------------------------------------------------------------------------------------------------- */

static PyMethodDef unit_methods[] = {
    {"pre_forward", (PyCFunction)(void (*)(void))zs_py_pre_forward, METH_FASTCALL, zs_py_pre_forward_doc},
    {"post_forward", (PyCFunction)(void (*)(void))zs_py_post_forward, METH_FASTCALL, zs_py_post_forward_doc},
    {"read", (PyCFunction)zs_py_read, METH_O, zs_py_read_doc},
    {"unread", (PyCFunction)zs_py_unread, METH_NOARGS, zs_py_unread_doc},
    {"unshard", (PyCFunction)unit_unshard, METH_VARARGS,
     "unshard($self, exact=False, /)\n--\n\nUnshard (all-gather) the parameters, within an engine's session."},
    {"reshard", (PyCFunction)unit_reshard, METH_NOARGS,
     "reshard($self, /)\n--\n\nReshard the parameters, freeing the full buffer."},
    {"prefetch", (PyCFunction)zs_py_unit_prefetch, METH_VARARGS, zs_py_unit_prefetch_doc},
    {"pin", (PyCFunction)unit_pin, METH_VARARGS,
     "pin($self, exact=False, /)\n--\n\nUnshard the parameters and pin them until unpin() or the end of the next "
     "backward. Collective."},
    {"accept", (PyCFunction)unit_accept, METH_NOARGS,
     "accept($self, /)\n--\n\nKeep this rank's shard of what a script has written to parameters that are pinned. To be "
     "called within a write of the engine."},
    {"unpin", (PyCFunction)unit_unpin, METH_VARARGS,
     "unpin($self, discard=False, /)\n--\n\nReshard parameters that pin() pinned or that a forward left unsharded. "
     "discard: what was written to them is no error."},
    {"unwind", (PyCFunction)unit_unwind, METH_VARARGS,
     "unwind($self, n_open, what, /)\n--\n\nEnd the forwards and sessions of the unit's model that were opened since "
     "n_open was `n_open`, after an exception."},
    {"note_load", (PyCFunction)unit_note_load, METH_VARARGS,
     "note_load($self, index, content, /)\n--\n\nA parameter has been loaded."},
    {"step_in_backward", (PyCFunction)zs_py_step_in_backward, METH_VARARGS, zs_py_step_in_backward_doc},
    {"step_by_hand", (PyCFunction)zs_py_step_by_hand, METH_NOARGS, zs_py_step_by_hand_doc},
    {"watch", (PyCFunction)zs_py_unit_watch, METH_O, zs_py_unit_watch_doc},
    {"note_write", (PyCFunction)zs_py_unit_note_write, METH_VARARGS, zs_py_unit_note_write_doc},
    {"note_draw", (PyCFunction)zs_py_unit_note_draw, METH_VARARGS, zs_py_unit_note_draw_doc},
    {"is_slice", (PyCFunction)zs_py_unit_is_slice, METH_VARARGS, zs_py_unit_is_slice_doc},
    {"begin_write", (PyCFunction)zs_py_unit_begin_write, METH_VARARGS, zs_py_unit_begin_write_doc},
    {"end_write", (PyCFunction)zs_py_unit_end_write, METH_NOARGS, zs_py_unit_end_write_doc},
    {"guard", (PyCFunction)zs_py_unit_guard, METH_NOARGS, zs_py_unit_guard_doc},
    {"read_param", (PyCFunction)unit_read_param, METH_VARARGS,
     "read_param($self, index, out, /)\n--\n\nCopy a full parameter into a contiguous tensor of its shape and dtype."},
    {"check", unit_check, METH_VARARGS | METH_CLASS,
     "check($type, name, names, tensors, /)\n--\n\nRaise what Unit(...) would raise for these parameters; creates "
     "nothing."},
    {"param", (PyCFunction)unit_param, METH_O,
     "param($self, index, /)\n--\n\nReturn the facts of a parameter: name, unit, full shape, and the range (begin, "
     "numel) of its elements, in row-major order, that this rank owns."},
    {0},
};

static PyType_Slot unit_slots[] = {
    {Py_tp_doc,
     "Unit(engine, name, strategy, names, tensors, places, compute=None, wire=None, keep=set(), dry_run=False)\n--\n\n"
     "Parameters that are all-gathered and reduced together. compute: the dtype of forward and backward, such as "
     "'bfloat16'; wire: the dtype that gradients are reduced in; keep: indices of parameters that keep their dtype."},
    {Py_tp_new, unit_new},
    {Py_tp_dealloc, unit_dealloc},
    {Py_tp_traverse, unit_traverse},
    {Py_tp_clear, unit_clear},
    {Py_tp_methods, unit_methods},
    {Py_tp_getset, zs_py_unit_getset},
    {0, NULL},
};

static PyType_Spec unit_type_spec = {
    .name = "zshard._core.Unit",
    .basicsize = sizeof(unit_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = unit_slots,
};

int zs_py_unit_init(PyObject *module, zs_py_state *state)
{
    return zs_py_add_type(module, &unit_type_spec, &state->unit_type);
}
