/* py_unit.c - _core.Unit: one unit as Python sees it, and the two forward hooks that nn.Module calls.
 *
 * The one idea: pre_forward and post_forward are plain C methods bound to the unit, so a module's forward pays two C
 * calls and no Python frame. Backward needs nothing from here: its hooks are C all the way.
 */
#include "py_util.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_OUTPUT_DEPTH = 8 }; /* nesting of containers in a forward's output that is searched for tensors */

typedef struct unit_object {
    PyObject_HEAD
    zs_unit *unit; /* counted reference */
} unit_object;

zs_unit *zs_py_unit(PyObject *object)
{
    if (Py_IS_TYPE(object, zs_py_get_state()->unit_type)) return ((unit_object *)object)->unit;
    PyErr_Format(PyExc_TypeError, "expected a zshard._core.Unit, got %.100s", Py_TYPE(object)->tp_name);
    return NULL;
}

/* --- making one ----------------------------------------------------------------------------------------------------- */

static const char *const strategy_names[] = {"full_shard", "shard_grad_op", "no_shard"};

static int parse_strategy(const char *text, zs_strategy *out)
{
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, strategy_names[i]) != 0) continue;
        *out = (zs_strategy)i;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "unknown strategy '%s'", text);
    return -1;
}

typedef struct param_lists {
    const char **names;   /* [n] borrowed from the list of names */
    zs_tensor **tensors;  /* [n] owned handles */
    Py_ssize_t n;
} param_lists;

static void free_lists(param_lists *lists)
{
    for (Py_ssize_t i = 0; lists->tensors != NULL && i < lists->n; i++) zs_tensor_free(lists->tensors[i]);
    free(lists->tensors);
    free(lists->names);
}

static int read_lists(PyObject *names, PyObject *tensors, param_lists *out)
{
    out->n = PyList_GET_SIZE(names);
    if (PyList_GET_SIZE(tensors) != out->n) {
        PyErr_SetString(PyExc_ValueError, "a unit needs one name for each parameter");
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

static PyObject *unit_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"engine", "name", "strategy", "names", "tensors", NULL};
    PyObject *engine_obj, *names, *tensors;
    const char *strategy;
    zs_unit_spec spec = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OssO!O!:Unit", keywords, &engine_obj, &spec.name, &strategy, &PyList_Type,
                                     &names, &PyList_Type, &tensors))
        return NULL;
    zs_engine *engine = zs_py_engine(engine_obj);
    if (engine == NULL || parse_strategy(strategy, &spec.strategy) < 0) return NULL;
    param_lists lists = {0};
    zs_unit *unit = NULL;
    if (read_lists(names, tensors, &lists) == 0) {
        spec.n_params = lists.n;
        spec.names = lists.names;
        spec.tensors = lists.tensors;
        zs_status status;
        ZS_PY_NOGIL(status, zs_unit_new(engine, &spec, &unit));
        if (status != ZS_OK) zs_py_raise(NULL);
    }
    free_lists(&lists);
    if (unit == NULL) return NULL;
    unit_object *self = (unit_object *)type->tp_alloc(type, 0);
    if (self == NULL) zs_unit_release(unit);
    else self->unit = unit;
    return (PyObject *)self;
}

static void unit_dealloc(unit_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    zs_unit_release(self->unit);
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- forward hooks ------------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(unit_pre_forward_doc, "pre_forward($self, module, args, /)\n--\n\nForward-pre-hook of the unit's module.");

static PyObject *unit_pre_forward(unit_object *self, PyObject *const *args, Py_ssize_t n)
{
    (void)args;
    (void)n;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_pre_forward(self->unit));
    if (status != ZS_OK) return zs_py_raise(NULL);
    Py_RETURN_NONE;
}

typedef struct output_walk {
    zs_hook hook;
    bool hooked; /* an output with history was found */
} output_walk;

static int hook_outputs(output_walk *walk, PyObject *object, int depth);

static int hook_values(output_walk *walk, PyObject *dict, int depth)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict, &at, &key, &value))
        if (hook_outputs(walk, value, depth + 1) < 0) return -1;
    return 0;
}

/* Dataclasses and plain result objects: their attributes. Modules and classes are no results. */
static int hook_attributes(output_walk *walk, PyObject *object, int depth)
{
    if (PyType_Check(object) || PyCallable_Check(object)) return 0;
    PyObject *dict = PyObject_GetAttrString(object, "__dict__");
    if (dict == NULL) {
        PyErr_Clear();
        return 0;
    }
    int result = PyDict_Check(dict) ? hook_values(walk, dict, depth) : 0;
    Py_DECREF(dict);
    return result;
}

static int hook_outputs(output_walk *walk, PyObject *object, int depth)
{
    if (object == Py_None || depth > MAX_OUTPUT_DEPTH) return 0;
    if (zs_py_is_tensor(object)) {
        bool hooked = false;
        zs_clear_error();
        if (zs_py_hook_before_backward(object, &walk->hook, &hooked) != ZS_OK) {
            zs_py_raise(NULL);
            return -1;
        }
        walk->hooked |= hooked;
        return 0;
    }
    if (PyTuple_Check(object) || PyList_Check(object)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); i++)
            if (hook_outputs(walk, PySequence_Fast_GET_ITEM(object, i), depth + 1) < 0) return -1;
        return 0;
    }
    if (PyDict_Check(object)) return hook_values(walk, object, depth);
    if (PyUnicode_Check(object) || PyLong_Check(object) || PyFloat_Check(object)) return 0;
    return hook_attributes(walk, object, depth);
}

PyDoc_STRVAR(unit_post_forward_doc, "post_forward($self, module, args, output, /)\n--\n\nForward-hook of the unit's module; called even "
                                    "if the forward raised (output is then None).");

static PyObject *unit_post_forward(unit_object *self, PyObject *const *args, Py_ssize_t n)
{
    output_walk walk = {.hook = zs_engine_backward_hook(self->unit)};
    if (zs_grad_mode() && n > 2 && hook_outputs(&walk, args[2], 0) < 0) return NULL;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_post_forward(self->unit, walk.hooked));
    if (status != ZS_OK) return zs_py_raise(NULL);
    Py_RETURN_NONE;
}

/* --- by hand ---------------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(unit_unshard_doc, "unshard($self, /)\n--\n\nMakes the parameters whole; inside an engine's session.");

static PyObject *unit_unshard(unit_object *self, PyObject *unused)
{
    (void)unused;
    zs_status status;
    ZS_PY_NOGIL(status, zs_unit_unshard(self->unit));
    if (status != ZS_OK) return zs_py_raise(NULL);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(unit_reshard_doc, "reshard($self, /)\n--\n\nGives the full buffer back.");

static PyObject *unit_reshard(unit_object *self, PyObject *unused)
{
    (void)unused;
    zs_status status;
    ZS_PY_NOGIL(status, zs_unit_reshard(self->unit, ZS_SHARDED));
    if (status != ZS_OK) return zs_py_raise(NULL);
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
        status = ZS_FAIL(ZS_ERR_VALUE, "the target for parameter '%s' is not of its size", unit->params[i].name);
    if (status == ZS_OK && info.numel > 0) status = zs_tensor_data(out, &data);
    if (status == ZS_OK && info.numel > 0) status = zs_unit_read_param(unit, i, data);
    zs_tensor_free(out);
    return status;
}

static int64_t check_index(const zs_unit *unit, Py_ssize_t i)
{
    if (i >= 0 && i < unit->n_params) return i;
    PyErr_Format(PyExc_IndexError, "unit '%s' has %lld parameters", unit->name, (long long)unit->n_params);
    return -1;
}

PyDoc_STRVAR(unit_read_param_doc, "read_param($self, index, out, /)\n--\n\nCopies a whole parameter into a contiguous tensor of its shape and "
                                  "dtype. The unit must be unsharded.");

static PyObject *unit_read_param(unit_object *self, PyObject *args)
{
    Py_ssize_t i;
    PyObject *out;
    if (!PyArg_ParseTuple(args, "nO:read_param", &i, &out) || check_index(self->unit, i) < 0) return NULL;
    zs_clear_error();
    if (read_into(self->unit, i, out) != ZS_OK) return zs_py_raise(NULL);
    Py_RETURN_NONE;
}

static PyObject *describe_param(const zs_unit *unit, const zs_param *param)
{
    PyObject *shape = PyTuple_New(param->ndim);
    if (shape == NULL) return NULL;
    for (int d = 0; d < param->ndim; d++) {
        PyObject *size = PyLong_FromLongLong(param->sizes[d]);
        if (size == NULL) {
            Py_DECREF(shape);
            return NULL;
        }
        PyTuple_SET_ITEM(shape, d, size);
    }
    return Py_BuildValue("{s:s,s:s,s:N,s:L,s:L}", "name", param->name, "unit", unit->name, "shape", shape, "begin",
                         (long long)param->owned.begin, "numel", (long long)param->owned.numel);
}

PyDoc_STRVAR(unit_param_doc, "param($self, index, /)\n--\n\nFacts of a parameter: name, unit, whole shape, and which elements (begin, numel) of "
                             "its row-major order this rank owns.");

static PyObject *unit_param(unit_object *self, PyObject *index)
{
    Py_ssize_t i = PyNumber_AsSsize_t(index, PyExc_IndexError);
    if ((i == -1 && PyErr_Occurred()) || check_index(self->unit, i) < 0) return NULL;
    return describe_param(self->unit, &self->unit->params[i]);
}

static PyObject *unit_sizes(unit_object *self, void *unused)
{
    (void)unused;
    const zs_unit *unit = self->unit;
    return Py_BuildValue("{s:n,s:n,s:n,s:n}", "shard", (Py_ssize_t)zs_unit_shard_bytes(unit), "full",
                         (Py_ssize_t)zs_unit_full_bytes(unit), "bucket", (Py_ssize_t)zs_unit_bucket_bytes(unit), "grad",
                         (Py_ssize_t)zs_unit_grad_bytes(unit));
}

static PyObject *unit_name(unit_object *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(self->unit->name);
}

static PyObject *unit_strategy(unit_object *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(strategy_names[self->unit->strategy]);
}

static PyObject *unit_is_full(unit_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(zs_unit_is_full(self->unit));
}

static PyObject *unit_n_params(unit_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(self->unit->n_params);
}

static PyObject *unit_engine(unit_object *self, void *unused)
{
    (void)unused;
    return zs_py_engine_wrap(self->unit->engine);
}

/* --- questions about tensors -------------------------------------------------------------------------------------------------- */

/* The unit that uses the memory under a tensor in `role`; NULL without exception if none does. */
static zs_unit *user_of(PyObject *object, zs_mem_role role, zs_tensor **handle)
{
    zs_clear_error();
    if (zs_py_tensor(object, handle) != ZS_OK) {
        zs_py_raise(NULL);
        return NULL;
    }
    const zs_mem *mem = zs_tensor_mem(*handle);
    return mem != NULL && mem->role == role ? mem->user : NULL;
}

PyDoc_STRVAR(shard_info_doc, "shard_info($module, tensor, /)\n--\n\nFacts of a sharded parameter as Unit.param() gives them, or None for any other "
                             "tensor.");

static PyObject *shard_info(PyObject *module, PyObject *object)
{
    (void)module;
    zs_tensor *handle = NULL;
    zs_unit *unit = user_of(object, ZS_MEM_SHARD, &handle);
    PyObject *result = NULL;
    for (int64_t i = 0; unit != NULL && result == NULL && i < unit->n_params; i++) {
        if (!zs_tensor_same(unit->params[i].tensor, handle)) continue;
        result = describe_param(unit, &unit->params[i]);
        if (result == NULL) break;
    }
    zs_tensor_free(handle);
    if (result == NULL && !PyErr_Occurred()) Py_RETURN_NONE;
    return result;
}

PyDoc_STRVAR(is_shard_doc, "is_shard($module, tensor, /)\n--\n\nDoes the tensor lie on a unit's shard (or its mapped full buffer)?");

static PyObject *is_shard(PyObject *module, PyObject *object)
{
    (void)module;
    zs_tensor *handle = NULL;
    bool found = user_of(object, ZS_MEM_SHARD, &handle) != NULL;
    zs_tensor_free(handle);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(found);
}

PyDoc_STRVAR(grad_owner_doc, "grad_owner($module, tensor, /)\n--\n\nThe Engine whose grad shard the tensor lies on, or None.");

static PyObject *grad_owner(PyObject *module, PyObject *object)
{
    (void)module;
    zs_tensor *handle = NULL;
    zs_unit *unit = user_of(object, ZS_MEM_GRAD_SHARD, &handle);
    zs_tensor_free(handle);
    if (PyErr_Occurred()) return NULL;
    if (unit == NULL) Py_RETURN_NONE;
    return zs_py_engine_wrap(unit->engine);
}

/* --- type ----------------------------------------------------------------------------------------------------------------------- */

static PyGetSetDef unit_getset[] = {
    {"name", (getter)unit_name, NULL, "Dotted name of the module; '' for the root.", NULL},
    {"strategy", (getter)unit_strategy, NULL, "'full_shard', 'shard_grad_op' or 'no_shard'.", NULL},
    {"is_full", (getter)unit_is_full, NULL, "Are the parameters whole right now?", NULL},
    {"n_params", (getter)unit_n_params, NULL, "Number of parameters.", NULL},
    {"bytes", (getter)unit_sizes, NULL, "Bytes: shard, full, bucket, grad.", NULL},
    {"engine", (getter)unit_engine, NULL, "The engine it belongs to now.", NULL},
    {0},
};

static PyMethodDef unit_methods[] = {
    {"pre_forward", (PyCFunction)(void (*)(void))unit_pre_forward, METH_FASTCALL, unit_pre_forward_doc},
    {"post_forward", (PyCFunction)(void (*)(void))unit_post_forward, METH_FASTCALL, unit_post_forward_doc},
    {"unshard", (PyCFunction)unit_unshard, METH_NOARGS, unit_unshard_doc},
    {"reshard", (PyCFunction)unit_reshard, METH_NOARGS, unit_reshard_doc},
    {"read_param", (PyCFunction)unit_read_param, METH_VARARGS, unit_read_param_doc},
    {"param", (PyCFunction)unit_param, METH_O, unit_param_doc},
    {0},
};

static PyType_Slot unit_slots[] = {
    {Py_tp_doc, "Unit(engine, name, strategy, names, tensors)\n--\n\nParameters that are gathered and reduced together."},
    {Py_tp_new, unit_new},
    {Py_tp_dealloc, unit_dealloc},
    {Py_tp_methods, unit_methods},
    {Py_tp_getset, unit_getset},
    {0, NULL},
};

static PyType_Spec unit_type_spec = {
    .name = "zshard._core.Unit",
    .basicsize = sizeof(unit_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = unit_slots,
};

static PyMethodDef functions[] = {
    {"shard_info", shard_info, METH_O, shard_info_doc},
    {"is_shard", is_shard, METH_O, is_shard_doc},
    {"grad_owner", grad_owner, METH_O, grad_owner_doc},
    {0},
};

int zs_py_unit_init(PyObject *module, zs_py_state *state)
{
    if (zs_py_add_type(module, &unit_type_spec, &state->unit_type) < 0) return -1;
    return PyModule_AddFunctions(module, functions);
}
