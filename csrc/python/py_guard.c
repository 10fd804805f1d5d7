/* py_guard.c - called by torch in place of an operation on a guarded shard: runs it, or Python refuses it.
 *
 * An elementwise operation on shards of the same elements gives the shard of the full result, so it runs unchanged,
 * and its result is guarded in turn. zshard/guard/rules.py lists these operations, and those that only ask for
 * facts; all others, and shards that do not match, go to Python (zshard/guard/slices.py), which raises or handles
 * them. */
#include "python/py_guard.h"
#include "python/py_util.h"

#include "device/pending.h"
#include "reduce/grad_memory.h"

#include <string.h>

/* The guard's rule for an operation; zshard/guard/rules.py has the same. */
typedef enum rule {
    RULE_FACT,             /* runs; its result is torch's */
    RULE_EACH,             /* elementwise, on tensors */
    RULE_LISTS,            /* elementwise, on lists of tensors: torch._foreach_*, fused optimizers */
    RULE_GRAD,             /* the getter of .grad */
    RULE_NONE,             /* Python decides */
    RULE_WRITES = 8,       /* flag: writes to the first argument */
    RULE_STAYS = 16,       /* flag: computes no value from the parameter's elements */
    RULE_STAYS_ALONE = 32, /* flag: computes none unless autograd records */
    RULE_RAW = 64,         /* flag: its result can be written through unseen */
    RULE_KINDS = 7,
} rule;

static struct {
    PyObject *rules;                       /* {operation: rule} */
    PyObject *handler;                     /* (operation, types, args, kwargs) -> result */
    PyObject *grad;                        /* torch's attribute of that name */
    PyObject *part, *dunder_class, *takes; /* names */
} guard;

/* --- do they match? ----------------------------------------------------------------------------------------------- */

/* Could a plain tensor of the shard's shape also apply to the full parameter, such as one number for each row? */
static bool is_ambiguous(const zs_operand *slice)
{
    PyObject *whole = zs_py_whole_shape(slice), *own = zs_py_own_shape(slice);
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

/* May a plain tensor of the shard's shape hold the shard's elements? See Part.takes(); -1 with an exception. */
static int takes(const zs_operand *slice, PyObject *tensor)
{
    PyObject *answer = PyObject_CallMethodOneArg(slice->part, guard.takes, tensor);
    int result = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return result;
}

/* Does a tensor match the shard, element by element? Numbers, shards of the same elements, and unambiguous plain
 * tensors. -1 with an exception. */
static int fits(const zs_operand *other, const zs_operand *slice)
{
    if (other->part != NULL) return other->shape == slice->shape;
    int64_t sizes[ZS_MAX_DIM];
    int ndim = zs_py_sizes(other->object, sizes);
    if (ndim <= PyTuple_GET_SIZE(zs_py_own_shape(slice)) && count(sizes, ndim) == 1) return 1;
    if (!zs_py_has_shape(other->object, zs_py_own_shape(slice)) || is_ambiguous(slice)) return 0;
    return takes(slice, other->object);
}

/* The tensors of one elementwise operation. */
typedef struct operands {
    zs_operand slice; /* the first shard; its part is NULL if there is none */
    bool misfit;
} operands;

/* Adds an operand. Operands before the first shard are not checked here; the caller makes a second pass. */
static int add_operand(operands *all, PyObject *object)
{
    zs_operand next;
    if (!zs_py_is_tensor(object)) return 0;
    if (zs_py_look_at(object, &next) < 0) return -1;
    if (all->slice.part == NULL)
        all->slice = next;
    else {
        int good = fits(&next, &all->slice);
        if (good < 0) return -1;
        all->misfit |= good == 0;
    }
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

/* Is an argument a sequence, from which an operation on single tensors may read values? */
static bool has_sequence(const arguments *given)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given->args); i++) {
        PyObject *each = PyTuple_GET_ITEM(given->args, i);
        if (PyList_Check(each) || PyTuple_Check(each)) return true;
    }
    return false;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

/* Guards a new tensor as a shard of the same parameter as `slice`; -1 with an exception. */
static int mark(PyObject *object, const zs_operand *slice)
{
    if (Py_TYPE(object) != zs_py_guard_types.tensor || slice->part == NULL) return 0;
    if (!zs_py_has_shape(object, zs_py_own_shape(slice))) return 0;
    if (PyObject_SetAttr(object, guard.part, slice->part) < 0) return -1;
    return PyObject_SetAttr(object, guard.dunder_class, (PyObject *)zs_py_guard_types.shard_tensor);
}

static PyObject *marked(PyObject *result, const zs_operand *slice)
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

/* The tensors that the operation writes to; NULL: none. Borrowed. */
static PyObject *written_by(const arguments *given)
{
    if (given->writes && PyTuple_GET_SIZE(given->args) > 0) return PyTuple_GET_ITEM(given->args, 0);
    return given->kwargs != NULL ? PyDict_GetItemString(given->kwargs, "out") : NULL;
}

static PyObject *run_each(PyObject *operation, PyObject *types, const arguments *given)
{
    operands all = {0};
    if (add_arguments(&all, given) < 0) return NULL;
    zs_operand slice = all.slice;
    if (slice.part != NULL) { /* again: those before it */
        all = (operands){.slice = slice};
        if (add_arguments(&all, given) < 0) return NULL;
        if (all.misfit || has_sequence(given)) return hand_over(operation, types, given);
    }
    PyObject *result = zs_py_run_writing(operation, given->args, given->kwargs, written_by(given));
    if (slice.part == NULL || result == NULL) return result;
    if (zs_py_is_tensor(result) && zs_py_has_shape(result, zs_py_own_shape(&slice))) return marked(result, &slice);
    Py_DECREF(result); /* torch.where(condition) is not elementwise, though torch.where(condition, a, b) is */
    return hand_over(operation, types, given);
}

/* Is it a gradient that has not been reduced? */
static bool is_local_grad(PyObject *object)
{
    const zs_mem *mem = zs_py_mem(object);
    return mem != NULL && mem->role == ZS_MEM_LOCAL_GRAD;
}

static PyObject *run_grad(PyObject *operation, const arguments *given)
{
    zs_operand param;
    if (PyTuple_GET_SIZE(given->args) < 1 || zs_py_look_at(PyTuple_GET_ITEM(given->args, 0), &param) < 0) return NULL;
    PyObject *grad = zs_py_call_plain(operation, given->args, given->kwargs);
    if (grad == NULL || grad == Py_None || param.part == NULL || zs_py_is_guarded(grad)) return grad;
    if (!zs_py_is_tensor(grad) || is_local_grad(grad)) return grad;
    return marked(grad, &param);
}

/* `p.grad` of a guarded parameter, which loops over all parameters read: as run_grad, but without torch's detour. */
static PyObject *get_grad(PyObject *param, void *unused)
{
    (void)unused;
    PyObject *grad = zs_py_get_plain(guard.grad, param);
    const bool asked = zs_py_is_asked();
    if (grad != NULL && !asked) zs_pending_settle(zs_py_mem(grad)); /* its use is not seen */
    if (grad == NULL || Py_TYPE(grad) != zs_py_guard_types.tensor || !asked || is_local_grad(grad)) return grad;
    zs_operand slice;
    if (zs_py_look_at(param, &slice) == 0) return marked(grad, &slice);
    Py_DECREF(grad);
    return NULL;
}

static int set_grad(PyObject *param, PyObject *value, void *unused)
{
    (void)unused;
    zs_unit *unit = value == NULL || value == Py_None ? zs_py_unit_of(zs_py_get_plain(guard.grad, param)) : NULL;
    const int status = zs_py_set_plain(guard.grad, param, value);
    if (unit != NULL && status == 0) zs_grad_memory_forgotten(unit);
    return status;
}

static PyGetSetDef grad_attribute = {"grad", get_grad, set_grad, NULL, NULL};

/* Makes the above the getter of `param.grad`. */
static int answer_for_grad(PyTypeObject *shard_parameter)
{
    Py_XSETREF(guard.grad, PyObject_GetAttrString((PyObject *)zs_py_guard_types.tensor, "grad"));
    PyObject *own = guard.grad != NULL ? PyDescr_NewGetSet(shard_parameter, &grad_attribute) : NULL;
    int status = own != NULL ? PyObject_SetAttrString((PyObject *)shard_parameter, "grad", own) : -1;
    Py_XDECREF(own);
    return status;
}

/* `p.data = t`, which moves the parameter. */
static PyObject *run_assignment(PyObject *operation, PyObject *types, const arguments *given)
{
    PyObject *target = written_by(given),
             *value = PyTuple_GET_SIZE(given->args) > 1 ? PyTuple_GET_ITEM(given->args, 1) : NULL;
    zs_operand slice = {0};
    if (target != NULL && zs_py_look_at(target, &slice) < 0) return NULL;
    bool is_local = slice.part != NULL && value != NULL && zs_py_is_tensor(value) && !zs_py_is_guarded(value) &&
                    zs_py_own_shape(&slice) != zs_py_whole_shape(&slice) &&
                    zs_py_has_shape(value, zs_py_own_shape(&slice));
    int good = is_local ? takes(&slice, value) : 1;
    if (good < 0) return NULL;
    if (good == 0) return hand_over(operation, types, given);
    if (zs_py_note_written(operation, target) < 0) return NULL;
    return zs_py_run_writing(operation, given->args, given->kwargs, target);
}

/* --- lists -------------------------------------------------------------------------------------------------------- */

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

/* Checks the i-th tensors of all lists; false with `misfit` or an exception. */
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
    PyObject *result = zs_py_run_writing(operation, given->args, given->kwargs, given->writes ? first : NULL);
    if (result == NULL || (!PyList_Check(result) && !PyTuple_Check(result))) return result;
    if (mark_elements(result, given) == 0) return result;
    Py_DECREF(result);
    return NULL;
}

/* --- the functions of the module ---------------------------------------------------------------------------------- */

/* Is it named like an operation that writes to its first argument? `add_`, `__setitem__`, `__set__`. */
static bool is_named_as_writing(PyObject *operation)
{
    PyObject *name = PyObject_GetAttrString(operation, "__name__");
    const char *text = name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
    size_t length = text != NULL ? strlen(text) : 0;
    bool writes = length > 0 && (strncmp(text, "__set", 5) == 0 || (text[length - 1] == '_' && text[0] != '_'));
    Py_XDECREF(name);
    PyErr_Clear();
    return writes;
}

static unsigned rule_of(PyObject *operation)
{
    PyObject *found = PyDict_GetItemWithError(guard.rules, operation);
    if (found != NULL) return (unsigned)PyLong_AsLong(found);
    PyErr_Clear(); /* an unhashable operation is not in the table */
    return RULE_NONE | (is_named_as_writing(operation) ? RULE_STAYS : 0);
}

/* Within a forward, gathers a sharded parameter for an operation that computes with its values, but not for one that
 * writes to it. */
static int gather_operands(unsigned found, const arguments *given)
{
    unsigned kind = found & RULE_KINDS;
    if (kind == RULE_FACT || kind == RULE_GRAD || (found & RULE_STAYS) != 0) return 0;
    if ((found & RULE_STAYS_ALONE) != 0 && !zs_grad_mode()) return 0;
    PyObject *target = kind == RULE_EACH ? written_by(given) : NULL;
    if (target == NULL || !zs_py_is_guarded(target))
        return given->writes && kind == RULE_LISTS ? 0 : zs_py_read_operands(given->args, given->kwargs);
    return zs_py_before_write(target);
}

/* May the operation write to its arguments? Where Python handles it, it is not known. */
static bool may_write(unsigned found, const arguments *given)
{
    const bool named = given->kwargs != NULL && PyDict_GetItemString(given->kwargs, "out") != NULL;
    return given->writes || named || (found & RULE_RAW) != 0 || (found & RULE_KINDS) == RULE_NONE;
}

static PyObject *guarded(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 4 || !PyTuple_Check(args[2]) || guard.rules == NULL)
        return PyErr_Format(PyExc_TypeError, "guarded() takes an operation, types, a tuple and a dict or None");
    unsigned found = rule_of(args[0]);
    arguments given = {args[2], PyDict_Check(args[3]) ? args[3] : NULL, (found & RULE_WRITES) != 0};
    zs_py_settle_gradients(given.args, given.kwargs, may_write(found, &given));
    if (gather_operands(found, &given) < 0) return NULL;
    switch (found & RULE_KINDS) {
    case RULE_FACT:
        if (given.writes) return run_assignment(args[0], args[1], &given);
        return zs_py_call_plain(args[0], given.args, given.kwargs);
    case RULE_EACH: return run_each(args[0], args[1], &given);
    case RULE_LISTS: return run_lists(args[0], args[1], &given);
    case RULE_GRAD: return run_grad(args[0], &given);
    default: return hand_over(args[0], args[1], &given);
    }
}

static PyObject *names_a_write(PyObject *module, PyObject *operation)
{
    (void)module;
    return PyBool_FromLong(is_named_as_writing(operation));
}

static PyObject *slice_part(PyObject *module, PyObject *object)
{
    (void)module;
    PyObject *part;
    if (zs_py_slice_part(object, &part) < 0) return NULL;
    return Py_NewRef(part != NULL ? part : Py_None);
}

static PyObject *mark_slice(PyObject *module, PyObject *args)
{
    (void)module;
    zs_operand slice = {0};
    PyObject *object;
    if (!PyArg_ParseTuple(args, "OO:mark_slice", &object, &slice.part)) return NULL;
    slice.shape = zs_py_geometry(slice.part);
    if (slice.shape == NULL) return NULL;
    if (is_local_grad(object)) return Py_NewRef(object);
    return marked(Py_NewRef(object), &slice);
}

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
    zs_py_set_parts(parts);
    guard.handler = Py_NewRef(handler);
    if (answer_for_grad(types->shard_parameter) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"guarded", (PyCFunction)(void (*)(void))guarded, METH_FASTCALL,
     "guarded($module, operation, types, args, kwargs, /)\n--\n\nRun an operation on guarded slices if it is "
     "elementwise or asks for facts, else call the handler."},
    {"names_a_write", names_a_write, METH_O,
     "names_a_write($module, operation, /)\n--\n\nReturn whether an operation is called like one that writes to its "
     "first argument."},
    {"slice_part", slice_part, METH_O,
     "slice_part($module, tensor, /)\n--\n\nReturn the Part that a guarded tensor is a slice of; None for any other, "
     "and for a parameter that is whole right now."},
    {"mark_slice", mark_slice, METH_VARARGS,
     "mark_slice($module, tensor, part, /)\n--\n\nHave a plain tensor guarded if it has the Part's local shape and is "
     "no unreduced gradient of no_sync()."},
    {"set_guard", set_guard, METH_VARARGS,
     "set_guard($module, types, rules, parts, handler, /)\n--\n\nSet what the guard works with: (Tensor, Parameter, "
     "their guarded subclasses, and that of Parameter for whole ones), {operation: rule}, {id(parameter): (reference, "
     "Part)}, and the function that is called with (operation, types, args, kwargs) for all others."},
    {0},
};

int zs_py_guard_init(PyObject *module)
{
    guard.part = PyUnicode_InternFromString("_zshard_part");
    guard.dunder_class = PyUnicode_InternFromString("__class__");
    guard.takes = PyUnicode_InternFromString("takes");
    if (guard.part == NULL || guard.dunder_class == NULL || guard.takes == NULL) return -1;
    if (zs_py_slices_init() < 0 || zs_py_writes_init() < 0 || zs_py_reads_init() < 0) return -1;
    return PyModule_AddFunctions(module, functions);
}
