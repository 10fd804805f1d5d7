/* py_guard.c - what torch calls in place of an operation on a guarded slice: the operation, or Python's refusal.
 *
 * The one idea: an elementwise operation on slices of the same elements gives the slice of the whole result, so it runs as
 * it is and its result is guarded in turn. zshard/_guard_rules.py lists which operations are of that kind, or ask for facts only;
 * all others, and slices that do not fit each other, go to Python (zshard/_guard.py), which raises or knows better.
 */
#include "python/py_guard.h"
#include "python/py_util.h"

#include <string.h>

zs_guard_types zs_py_guard_types;

/* What is done with an operation; zshard/_guard_rules.py has the same. */
typedef enum rule {
    RULE_FACT,       /* runs; the result is as torch gives it */
    RULE_EACH,       /* elementwise, on tensors */
    RULE_LISTS,      /* elementwise, on lists of tensors: torch._foreach_*, fused optimizers */
    RULE_GRAD,       /* the getter of .grad */
    RULE_NONE,       /* Python knows */
    RULE_WRITES = 8, /* added: writes to the first argument */
} rule;

static struct {
    PyObject *rules;                                                  /* {operation: rule} */
    PyObject *parts;                                                  /* {id of a parameter: (reference, Part)} */
    PyObject *handler;                                                /* (operation, types, args, kwargs) -> result */
    PyObject *part, *geometry, *is_whole, *note_write, *dunder_class; /* names */
} guard;

/* A tensor that takes part in an operation. */
typedef struct operand {
    PyObject *object; /* borrowed */
    PyObject *part;   /* what it is a slice of; NULL: it is no slice; borrowed from the object, or from guard.parts */
    PyObject *shape;  /* the Part's geometry: (whole shape, own shape, ...); one object for the same elements */
} operand;

/* --- what is a slice -------------------------------------------------------------------------------------------------- */

static bool is_guarded(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    return type == zs_py_guard_types.shard_tensor || type == zs_py_guard_types.shard_parameter;
}

/* Borrowed; NULL without exception for a parameter that is not in the table: a copy, which has it as an attribute. */
static PyObject *part_in_table(PyObject *param)
{
    PyObject *key = PyLong_FromVoidPtr(param);
    if (key == NULL) return NULL;
    PyObject *entry = PyDict_GetItemWithError(guard.parts, key);
    Py_DECREF(key);
    return entry != NULL && PyTuple_Check(entry) ? PyTuple_GET_ITEM(entry, 1) : NULL;
}

/* Borrowed: the table or the object keeps it. */
static PyObject *part_of(PyObject *object)
{
    PyObject *part = Py_TYPE(object) == zs_py_guard_types.shard_parameter ? part_in_table(object) : NULL;
    if (part != NULL || PyErr_Occurred()) return part;
    part = PyObject_GetAttr(object, guard.part);
    Py_XDECREF(part);
    return part;
}

/* Has the tensor this shape, a tuple? */
static bool has_shape(PyObject *tensor, PyObject *shape)
{
    int64_t sizes[ZS_MAX_DIM];
    int ndim = zs_py_sizes(tensor, sizes);
    if (ndim != PyTuple_GET_SIZE(shape)) return false;
    for (int d = 0; d < ndim; d++)
        if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d)) != sizes[d]) return false;
    return true;
}

static PyObject *whole_shape(const operand *slice)
{
    return PyTuple_GET_ITEM(slice->shape, 0);
}

static PyObject *own_shape(const operand *slice)
{
    return PyTuple_GET_ITEM(slice->shape, 1);
}

/* Is this guarded parameter whole right now, as while a backward recomputes? -1 with an exception. */
static int is_whole(PyObject *object, const operand *slice)
{
    if (Py_TYPE(object) != zs_py_guard_types.shard_parameter) return 0;
    if (own_shape(slice) != whole_shape(slice)) return !has_shape(object, own_shape(slice));
    PyObject *answer = PyObject_CallMethodNoArgs(slice->part, guard.is_whole);
    int result = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return result;
}

/* What `object`, a tensor, is in an operation; -1 with an exception. */
static int look_at(PyObject *object, operand *out)
{
    *out = (operand){.object = object};
    if (!is_guarded(object)) return 0;
    PyObject *part = part_of(object);
    if (part == NULL || part == Py_None) return PyErr_Occurred() ? -1 : 0;
    PyObject *shape = PyObject_GetAttr(part, guard.geometry); /* the Part keeps it */
    if (shape == NULL) return -1;
    Py_DECREF(shape);
    operand found = {object, part, shape};
    int whole = is_whole(object, &found);
    if (whole < 0) return -1;
    if (!whole) *out = found;
    return 0;
}

/* --- do they fit each other? ------------------------------------------------------------------------------------------ */

/* Could a plain tensor of the slice's shape as well mean something for the whole one, such as a number for each row? */
static bool is_ambiguous(const operand *slice)
{
    PyObject *whole = whole_shape(slice), *own = own_shape(slice);
    for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(whole); d++) {
        long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(own, d));
        if (size != 1 && size != PyLong_AsLongLong(PyTuple_GET_ITEM(whole, d))) return false;
    }
    return whole != own;
}

static int64_t count(const int64_t *sizes, int ndim)
{
    int64_t numel = 1;
    for (int d = 0; d < ndim; d++)
        numel *= sizes[d];
    return numel;
}

/* Does a tensor go with the slice, element by element? Numbers, slices of the same elements, and plain tensors that can only
 * be meant as such. */
static bool fits(const operand *other, const operand *slice)
{
    if (other->part != NULL) return other->shape == slice->shape;
    int64_t sizes[ZS_MAX_DIM];
    int ndim = zs_py_sizes(other->object, sizes);
    if (ndim <= PyTuple_GET_SIZE(own_shape(slice)) && count(sizes, ndim) == 1) return true;
    return has_shape(other->object, own_shape(slice)) && !is_ambiguous(slice);
}

/* The tensors of one elementwise operation. */
typedef struct operands {
    operand slice; /* the first that is one; its part is NULL if none is */
    bool misfit;
} operands;

/* Takes one more into account; what comes before the first slice is looked at again by the caller. */
static int add_operand(operands *all, PyObject *object)
{
    operand next;
    if (!zs_py_is_tensor(object)) return 0;
    if (look_at(object, &next) < 0) return -1;
    if (all->slice.part == NULL)
        all->slice = next;
    else if (!fits(&next, &all->slice))
        all->misfit = true;
    return 0;
}

/* An operation's arguments, by position or by name. */
typedef struct arguments {
    PyObject *args, *kwargs; /* tuple; dict or NULL; borrowed */
    bool writes;             /* the operation writes to the first */
} arguments;

static int add_arguments(operands *all, const arguments *given)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given->args); i++)
        if (add_operand(all, PyTuple_GET_ITEM(given->args, i)) < 0) return -1;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (given->kwargs != NULL && PyDict_Next(given->kwargs, &at, &key, &value))
        if (add_operand(all, value) < 0) return -1;
    return 0;
}

/* Is an argument a sequence, which an operation on single tensors may read values from? */
static bool has_sequence(const arguments *given)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given->args); i++) {
        PyObject *each = PyTuple_GET_ITEM(given->args, i);
        if (PyList_Check(each) || PyTuple_Check(each)) return true;
    }
    return false;
}

/* --- running ------------------------------------------------------------------------------------------------------------ */

/* Has a new tensor guarded as what `slice` is a slice of; -1 with an exception. */
static int mark(PyObject *object, const operand *slice)
{
    if (Py_TYPE(object) != zs_py_guard_types.tensor || slice->part == NULL) return 0;
    if (!has_shape(object, own_shape(slice))) return 0;
    if (PyObject_SetAttr(object, guard.part, slice->part) < 0) return -1;
    return PyObject_SetAttr(object, guard.dunder_class, (PyObject *)zs_py_guard_types.shard_tensor);
}

static PyObject *marked(PyObject *result, const operand *slice)
{
    if (result == NULL || mark(result, slice) == 0) return result;
    Py_DECREF(result);
    return NULL;
}

static PyObject *hand_over(PyObject *operation, PyObject *types, const arguments *given)
{
    PyObject *kwargs = given->kwargs != NULL ? Py_NewRef(given->kwargs) : PyDict_New();
    if (kwargs == NULL) return NULL;
    PyObject *result = PyObject_CallFunctionObjArgs(guard.handler, operation, types, given->args, kwargs, NULL);
    Py_DECREF(kwargs);
    return result;
}

/* What the operation writes to; NULL: to nothing. Borrowed. */
static PyObject *written_by(const arguments *given)
{
    if (given->writes && PyTuple_GET_SIZE(given->args) > 0) return PyTuple_GET_ITEM(given->args, 0);
    return given->kwargs != NULL ? PyDict_GetItemString(given->kwargs, "out") : NULL;
}

static int note_written(PyObject *operation, PyObject *object)
{
    operand written = {0};
    if (object == NULL || !zs_py_is_tensor(object)) return 0;
    if (look_at(object, &written) < 0) return -1;
    if (written.part == NULL) return 0;
    PyObject *done = PyObject_CallMethodObjArgs(written.part, guard.note_write, object, operation, NULL);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

static PyObject *run_each(PyObject *operation, PyObject *types, const arguments *given)
{
    operands all = {0};
    if (add_arguments(&all, given) < 0) return NULL;
    operand slice = all.slice;
    if (slice.part != NULL) { /* again: what stood before it */
        all = (operands){.slice = slice};
        if (add_arguments(&all, given) < 0) return NULL;
        if (all.misfit || has_sequence(given)) return hand_over(operation, types, given);
    }
    PyObject *result = zs_py_call_plain(operation, given->args, given->kwargs);
    if (slice.part == NULL || result == NULL) return result;
    if (note_written(operation, written_by(given)) < 0) Py_CLEAR(result);
    if (result == NULL) return NULL;
    if (zs_py_is_tensor(result) && has_shape(result, own_shape(&slice))) return marked(result, &slice);
    Py_DECREF(result); /* torch.where(condition) is not elementwise, though torch.where(condition, a, b) is */
    return hand_over(operation, types, given);
}

static PyObject *run_grad(PyObject *operation, const arguments *given)
{
    operand param;
    if (PyTuple_GET_SIZE(given->args) < 1 || look_at(PyTuple_GET_ITEM(given->args, 0), &param) < 0) return NULL;
    PyObject *grad = zs_py_call_plain(operation, given->args, given->kwargs);
    if (grad == NULL || grad == Py_None || param.part == NULL || is_guarded(grad)) return grad;
    if (!zs_py_is_tensor(grad) || zs_py_is_local_grad(grad)) return grad;
    return marked(grad, &param);
}

/* --- lists ---------------------------------------------------------------------------------------------------------------- */

static PyObject *element(PyObject *argument, Py_ssize_t i)
{
    if (!PyList_Check(argument) && !PyTuple_Check(argument)) return argument;
    return i < PySequence_Fast_GET_SIZE(argument) ? PySequence_Fast_GET_ITEM(argument, i) : Py_None;
}

static int add_elements(operands *all, const arguments *given, Py_ssize_t i)
{
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(given->args); k++)
        if (add_operand(all, element(PyTuple_GET_ITEM(given->args, k), i)) < 0) return -1;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (given->kwargs != NULL && PyDict_Next(given->kwargs, &at, &key, &value))
        if (add_operand(all, element(value, i)) < 0) return -1;
    return 0;
}

/* The i-th tensors of all lists; false with `misfit` or an exception. */
static bool check_elements(operands *all, const arguments *given, Py_ssize_t i)
{
    *all = (operands){0};
    if (add_elements(all, given, i) < 0) return false;
    if (all->slice.part == NULL) return true;
    *all = (operands){.slice = all->slice};
    return add_elements(all, given, i) == 0 && !all->misfit;
}

static int mark_elements(PyObject *result, const arguments *given)
{
    operands all;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); i++)
        if (!check_elements(&all, given, i) || mark(PySequence_Fast_GET_ITEM(result, i), &all.slice) < 0) return -1;
    return 0;
}

static PyObject *run_lists(PyObject *operation, PyObject *types, const arguments *given)
{
    PyObject *first = PyTuple_GET_SIZE(given->args) > 0 ? PyTuple_GET_ITEM(given->args, 0) : NULL;
    if (first == NULL || (!PyList_Check(first) && !PyTuple_Check(first))) return hand_over(operation, types, given);
    operands all;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(first); i++) {
        if (check_elements(&all, given, i)) continue;
        return PyErr_Occurred() ? NULL : hand_over(operation, types, given);
    }
    PyObject *result = zs_py_call_plain(operation, given->args, given->kwargs);
    for (Py_ssize_t i = 0; result != NULL && given->writes && i < PySequence_Fast_GET_SIZE(first); i++)
        if (note_written(operation, element(first, i)) < 0) Py_CLEAR(result);
    if (result == NULL || (!PyList_Check(result) && !PyTuple_Check(result))) return result;
    if (mark_elements(result, given) == 0) return result;
    Py_DECREF(result);
    return NULL;
}

/* --- the functions of the module ------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(guarded_doc,
             "guarded($module, operation, types, args, kwargs, /)\n--\n\nRun an operation on guarded slices if it is "
             "elementwise or asks for facts, else call the handler. What __torch_function__ is.");

static rule rule_of(PyObject *operation)
{
    PyObject *found = PyDict_GetItemWithError(guard.rules, operation);
    if (found != NULL) return (rule)PyLong_AsLong(found);
    PyErr_Clear(); /* an operation that has no hash is not in the table */
    return RULE_NONE;
}

static PyObject *guarded(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 4 || !PyTuple_Check(args[2]) || guard.rules == NULL)
        return PyErr_Format(PyExc_TypeError, "guarded() takes an operation, types, a tuple and a dict or None");
    unsigned found = (unsigned)rule_of(args[0]);
    arguments given = {args[2], PyDict_Check(args[3]) ? args[3] : NULL, (found & RULE_WRITES) != 0};
    switch (found & ~(unsigned)RULE_WRITES) {
    case RULE_FACT:
        if (given.writes && note_written(args[0], written_by(&given)) < 0) return NULL;
        return zs_py_call_plain(args[0], given.args, given.kwargs);
    case RULE_EACH: return run_each(args[0], args[1], &given);
    case RULE_LISTS: return run_lists(args[0], args[1], &given);
    case RULE_GRAD: return run_grad(args[0], &given);
    default: return hand_over(args[0], args[1], &given);
    }
}

PyDoc_STRVAR(slice_part_doc,
             "slice_part($module, tensor, /)\n--\n\nReturn the Part that a guarded tensor is a slice of; "
             "None for any other, and for a parameter that is whole right now.");

static PyObject *slice_part(PyObject *module, PyObject *object)
{
    (void)module;
    operand found = {0};
    if (zs_py_is_tensor(object) && look_at(object, &found) < 0) return NULL;
    return Py_NewRef(found.part != NULL ? found.part : Py_None);
}

PyDoc_STRVAR(mark_slice_doc, "mark_slice($module, tensor, part, /)\n--\n\nHave a plain tensor guarded if it has the "
                             "Part's local shape and is no unreduced gradient of no_sync(). Returns the tensor.");

static PyObject *mark_slice(PyObject *module, PyObject *args)
{
    (void)module;
    operand slice = {0};
    PyObject *object;
    if (!PyArg_ParseTuple(args, "OO:mark_slice", &object, &slice.part)) return NULL;
    slice.shape = PyObject_GetAttr(slice.part, guard.geometry);
    if (slice.shape == NULL) return NULL;
    Py_DECREF(slice.shape);
    if (zs_py_is_local_grad(object)) return Py_NewRef(object);
    return marked(Py_NewRef(object), &slice);
}

PyDoc_STRVAR(set_guard_doc,
             "set_guard($module, types, rules, parts, handler, /)\n--\n\nSet what the guard works with: (Tensor, "
             "Parameter, their guarded subclasses, and that of Parameter for whole ones), {operation: rule}, "
             "{id(parameter): (reference, Part)}, and the "
             "function that is called with (operation, types, args, kwargs) for all others.");

static PyObject *set_guard(PyObject *module, PyObject *args)
{
    (void)module;
    zs_guard_types *types = &zs_py_guard_types;
    PyTypeObject *kind = &PyType_Type;
    PyObject *each[5], *rules, *parts, *handler;
    if (!PyArg_ParseTuple(args, "(O!O!O!O!O!)O!O!O:set_guard", kind, &each[0], kind, &each[1], kind, &each[2], kind,
                          &each[3], kind, &each[4], &PyDict_Type, &rules, &PyDict_Type, &parts, &handler))
        return NULL;
    *types = (zs_guard_types){(PyTypeObject *)Py_NewRef(each[0]), (PyTypeObject *)Py_NewRef(each[1]),
                              (PyTypeObject *)Py_NewRef(each[2]), (PyTypeObject *)Py_NewRef(each[3]),
                              (PyTypeObject *)Py_NewRef(each[4])};
    guard.rules = Py_NewRef(rules);
    guard.parts = Py_NewRef(parts);
    guard.handler = Py_NewRef(handler);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"guarded", (PyCFunction)(void (*)(void))guarded, METH_FASTCALL, guarded_doc},
    {"slice_part", slice_part, METH_O, slice_part_doc},
    {"mark_slice", mark_slice, METH_VARARGS, mark_slice_doc},
    {"set_guard", set_guard, METH_VARARGS, set_guard_doc},
    {0},
};

int zs_py_guard_init(PyObject *module)
{
    guard.part = PyUnicode_InternFromString("_zshard_part");
    guard.geometry = PyUnicode_InternFromString("geometry");
    guard.is_whole = PyUnicode_InternFromString("is_whole_now");
    guard.note_write = PyUnicode_InternFromString("note_write");
    guard.dunder_class = PyUnicode_InternFromString("__class__");
    PyObject *names[] = {guard.part, guard.geometry, guard.is_whole, guard.note_write, guard.dunder_class};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i] == NULL) return -1;
    return PyModule_AddFunctions(module, functions);
}
