/* py_optim.c - _core.OptimPlan, the optimizers' plan for Python.
 *
 * A plan must notice when the user changes a group's parameters or puts other tensors into the state. It keeps every
 * object that it saw when it was created, in the order of a walk over the parameter list and the state, and walks again
 * at each step: it compares pointers, hashes nothing, and takes some 10 ns per parameter.
 *
 * These references also keep the tensors alive: the handles in the plan are weak, so that the garbage collector sees
 * all references (a hook of a parameter may well refer to the optimizer). */
#include "python/py_util.h"

#include "device/device.h"
#include "optim/optim.h"

typedef struct plan_object {
    PyObject_HEAD
    zs_rule rule;
    bool compact;
    zs_optim *plan;  /* owned */
    PyObject **seen; /* [room] owned references, in the order of the walk */
    Py_ssize_t n_seen;
    Py_ssize_t room;
} plan_object;

/* --- the walk ----------------------------------------------------------------------------------------------------- */

/* Visits an object: returns 1 to continue, 0 to stop, -1 with an exception. */
typedef int visitor(plan_object *self, PyObject *object, Py_ssize_t at);

static int remember(plan_object *self, PyObject *object, Py_ssize_t at)
{
    if (at == self->room) {
        Py_ssize_t room = 2 * self->room + 64;
        PyObject **seen = PyMem_Realloc(self->seen, (size_t)room * sizeof *seen);
        if (seen == NULL) return PyErr_NoMemory(), -1;
        self->seen = seen;
        self->room = room;
    }
    self->seen[self->n_seen++] = Py_NewRef(object);
    return 1;
}

static int compare(plan_object *self, PyObject *object, Py_ssize_t at)
{
    return at < self->n_seen && self->seen[at] == object;
}

/* Visits the parameters, then each key, value and value's value of the state. On success *count is their number. */
static int walk(plan_object *self, PyObject *params, PyObject *state, visitor *visit, Py_ssize_t *count)
{
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
        int more = visit(self, PyList_GET_ITEM(params, i), at++);
        if (more <= 0) return more;
    }
    PyObject *key, *entry, *name, *value;
    for (Py_ssize_t i = 0; PyDict_Next(state, &i, &key, &entry);) {
        int more = visit(self, key, at++);
        if (more > 0) more = visit(self, entry, at++);
        for (Py_ssize_t j = 0; more > 0 && PyDict_Check(entry) && PyDict_Next(entry, &j, &name, &value);) {
            more = visit(self, value, at++);
        }
        if (more <= 0) return more;
    }
    *count = at;
    return 1;
}

/* --- making a plan ------------------------------------------------------------------------------------------------ */

static const char *const state_names[][ZS_OPTIM_STATES] = {
    [ZS_RULE_ADAM] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "low_bits"},
    [ZS_RULE_SGD] = {"momentum_buffer", NULL, NULL, "momentum_buffer_scale", NULL, "low_bits"},
};

/* Weak handle to the tensor `object`, which `seen` keeps alive; NULL if it is not a tensor. */
static zs_status weak_handle(PyObject *object, zs_tensor **out)
{
    *out = NULL;
    if (object == NULL || !zs_py_is_tensor(object)) return ZS_OK;
    zs_tensor *strong;
    ZS_TRY(zs_py_tensor(object, &strong));
    *out = zs_tensor_new_weak(strong);
    zs_tensor_free(strong);
    return ZS_OK;
}

/* Item `name` of the dict `entry`; NULL if either is missing. Borrowed. */
static PyObject *item_of(PyObject *entry, const char *name)
{
    if (entry == NULL || name == NULL || !PyDict_Check(entry)) return NULL;
    return PyDict_GetItemString(entry, name);
}

/* `facts`: values that do not come from tensors. */
static int add_member(plan_object *self, PyObject *param, PyObject *entry, zs_member facts)
{
    zs_member member = facts;
    zs_status status = weak_handle(param, &member.param);
    if (status == ZS_OK && member.param == NULL) {
        status = ZS_FAIL(ZS_ERR_TYPE, "an optimizer can only update tensors, got %s", Py_TYPE(param)->tp_name);
    }
    for (int s = 0; status == ZS_OK && s < ZS_OPTIM_STATES; s++) {
        status = weak_handle(item_of(entry, state_names[self->rule][s]), &member.state[s]);
    }
    ZS_THEN(status, weak_handle(item_of(entry, "step"), &member.step));
    zs_optim_add(self->plan, &member); /* even if incomplete: the plan frees it */
    if (status == ZS_OK) return 0;
    zs_py_raise(NULL);
    return -1;
}

/* The number of parameter `i`; -1 without numbers, or with an exception. */
static int64_t number_of(PyObject *numbers, Py_ssize_t i)
{
    if (numbers == Py_None) return -1;
    PyObject *number = PySequence_GetItem(numbers, i);
    int64_t value = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return value;
}

/* The step counter of parameter `i`; 0 if it is not read, or with an exception. */
static double steps_of(PyObject *steps, Py_ssize_t i)
{
    if (steps == Py_None) return 0;
    PyObject *count = PySequence_GetItem(steps, i);
    double value = count == NULL ? 0 : PyFloat_AsDouble(count);
    Py_XDECREF(count);
    return value;
}

/* The parts of a plan besides parameters and state. */
typedef struct plan_facts {
    PyObject *fresh, *numbers, *steps; /* borrowed */
} plan_facts;

static int add_members(plan_object *self, PyObject *params, PyObject *state, const plan_facts *facts)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
        PyObject *param = PyList_GET_ITEM(params, i);
        PyObject *entry = PyDict_GetItemWithError(state, param); /* not an access that makes a defaultdict create one */
        if (entry == NULL && PyErr_Occurred()) return -1;
        int first = PySequence_Contains(facts->fresh, param);
        zs_member member = {.first = first > 0, .number = number_of(facts->numbers, i)};
        if (first < 0 || PyErr_Occurred()) return -1;
        member.steps = steps_of(facts->steps, i);
        if (PyErr_Occurred() || add_member(self, param, entry, member) < 0) return -1;
    }
    return 0;
}

static int plan_fill(plan_object *self, PyObject *params, PyObject *state, const plan_facts *facts)
{
    zs_clear_error();
    if (zs_optim_new(self->rule, self->compact, PyList_GET_SIZE(params), &self->plan) != ZS_OK) {
        zs_py_raise(NULL);
        return -1;
    }
    Py_ssize_t count;
    if (walk(self, params, state, remember, &count) < 0) return -1;
    return add_members(self, params, state, facts);
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rule", "params", "state", "fresh", "numbers", "steps", NULL};
    const char *rule;
    PyObject *params, *state;
    plan_facts facts = {NULL, Py_None, Py_None};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO!O!O!|OO:OptimPlan", names, &rule, &PyList_Type, &params,
                                     &PyDict_Type, &state, &PySet_Type, &facts.fresh, &facts.numbers, &facts.steps))
        return NULL;
    bool compact = strcmp(rule, "adam8bit") == 0 || strcmp(rule, "sgd8bit") == 0;
    bool adam = strncmp(rule, "adam", 4) == 0;
    if (!compact && strcmp(rule, "adam") != 0 && strcmp(rule, "sgd") != 0) {
        return PyErr_Format(PyExc_ValueError, "rule must be 'adam', 'sgd', 'adam8bit' or 'sgd8bit', got '%s'", rule);
    }
    plan_object *self = (plan_object *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->rule = adam ? ZS_RULE_ADAM : ZS_RULE_SGD;
    self->compact = compact;
    if (plan_fill(self, params, state, &facts) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

/* Value `key` of the group; borrowed, or NULL with KeyError. */
static PyObject *option(PyObject *group, const char *key)
{
    PyObject *value = PyDict_GetItemString(group, key);
    if (value == NULL) PyErr_Format(PyExc_KeyError, "param group lacks '%s'", key);
    return value;
}

/* Reads a number, or a tensor of one; -1 with an exception. */
static int read_number(PyObject *value, double *out)
{
    *out = value == NULL ? -1 : PyFloat_AsDouble(value);
    return PyErr_Occurred() ? -1 : 0;
}

static int read_flag(PyObject *value, bool *out)
{
    int flag = value == NULL ? -1 : PyObject_IsTrue(value);
    *out = flag > 0;
    return flag < 0 ? -1 : 0;
}

static int read_betas(PyObject *betas, zs_hyper *hyper)
{
    if (betas == NULL) return -1;
    PyObject *pair = PySequence_Tuple(betas);
    if (pair == NULL) return -1;
    int bad = -1;
    if (PyTuple_GET_SIZE(pair) == 2) {
        bad = read_number(PyTuple_GET_ITEM(pair, 0), &hyper->beta1) ||
              read_number(PyTuple_GET_ITEM(pair, 1), &hyper->beta2);
    } else {
        PyErr_SetString(PyExc_ValueError, "betas must be a pair of numbers");
    }
    Py_DECREF(pair);
    return bad ? -1 : 0;
}

/* Reads whether and how to round: only zshard's groups may have these options. */
static int read_rounding(PyObject *group, zs_hyper *hyper)
{
    PyObject *wanted = PyDict_GetItemString(group, "stochastic_rounding");
    PyObject *round = PyDict_GetItemString(group, "rounding_step");
    if (wanted != NULL && read_flag(wanted, &hyper->dithered) < 0) return -1;
    PyObject *seed = hyper->dithered ? option(group, "rounding_seed") : NULL;
    if (hyper->dithered && (seed == NULL || option(group, "rounding_step") == NULL)) return -1;
    if (seed != NULL) hyper->seed = PyLong_AsUnsignedLongLongMask(seed);
    if (round != NULL) hyper->round = PyLong_AsUnsignedLongLongMask(round);
    return PyErr_Occurred() ? -1 : 0;
}

/* The group's hyper-parameters under the names of torch.optim; -1 with an exception. */
static int read_hyper(zs_rule rule, PyObject *group, bool lr_is_live, zs_hyper *hyper)
{
    *hyper = (zs_hyper){0};
    if (read_rounding(group, hyper) < 0) return -1;
    if (!lr_is_live && read_number(option(group, "lr"), &hyper->lr) < 0) return -1;
    if (read_number(option(group, "weight_decay"), &hyper->weight_decay) < 0) return -1;
    if (read_flag(option(group, "maximize"), &hyper->maximize) < 0) return -1;
    if (rule == ZS_RULE_SGD) {
        if (read_number(option(group, "momentum"), &hyper->momentum) < 0) return -1;
        if (read_number(option(group, "dampening"), &hyper->dampening) < 0) return -1;
        return read_flag(option(group, "nesterov"), &hyper->nesterov);
    }
    if (read_betas(option(group, "betas"), hyper) < 0) return -1;
    if (read_number(option(group, "eps"), &hyper->eps) < 0) return -1;
    if (read_flag(option(group, "decoupled_weight_decay"), &hyper->decoupled) < 0) return -1;
    return read_flag(option(group, "amsgrad"), &hyper->amsgrad);
}

/* The address of the elements of a contiguous tensor of `dtype`, at least `numel` of them; NULL for None. */
static zs_status elements_of(PyObject *object, zs_dtype dtype, int64_t numel, void **out)
{
    zs_tensor *tensor;
    zs_tensor_info info;
    *out = NULL;
    if (object == Py_None) return ZS_OK;
    ZS_TRY(zs_py_tensor(object, &tensor));
    zs_status status = zs_tensor_describe(tensor, &info);
    if (status == ZS_OK && (!info.contiguous || info.dtype != dtype || info.numel < numel))
        status =
            ZS_FAIL(ZS_ERR_TYPE, "a capturable step() expects contiguous tensors of the documented dtypes and sizes");
    ZS_THEN(status, zs_tensor_data(tensor, out));
    zs_tensor_free(tensor);
    return status;
}

/* Reads a capturable step's inputs on the device: (room, lr, grad_factor, found_inf), tensors that the caller keeps. */
static zs_status read_live(PyObject *tuple, Py_ssize_t n_members, zs_live *live)
{
    void *room, *lr, *grad_factor, *found_inf;
    PyObject *const *items = ((PyTupleObject *)tuple)->ob_item;
    ZS_TRY(elements_of(items[0], ZS_F64, n_members * ZS_CONSTANTS_BYTES / 8, &room));
    ZS_TRY(elements_of(items[1], ZS_F64, 1, &lr));
    ZS_TRY(elements_of(items[2], ZS_F32, 1, &grad_factor));
    ZS_TRY(elements_of(items[3], ZS_F32, 1, &found_inf));
    *live = (zs_live){.lr = lr, .lr_dtype = ZS_F64, .grad_factor = grad_factor, .found_inf = found_inf, .room = room};
    return ZS_OK;
}

/* The indices of members with this verdict, as a new tuple. */
static PyObject *members_with(const plan_object *self, Py_ssize_t n, zs_verdict verdict)
{
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        count += zs_optim_verdict(self->plan, i) == verdict;
    PyObject *result = PyTuple_New(count);
    for (Py_ssize_t i = 0, at = 0; result != NULL && at < count; i++) {
        if (zs_optim_verdict(self->plan, i) != verdict) continue;
        PyObject *index = PyLong_FromSsize_t(i);
        if (index == NULL)
            Py_CLEAR(result);
        else
            PyTuple_SET_ITEM(result, at++, index);
    }
    return result;
}

/* Checks, then steps if `now`; returns the members left to the caller, None, or an exception. */
static PyObject *step_with(plan_object *self, Py_ssize_t n, const zs_hyper *hyper, const zs_live *live, bool now)
{
    zs_clear_error();
    if (zs_optim_prepare(self->plan, hyper, live) != ZS_OK) return zs_py_raise(NULL);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (zs_optim_verdict(self->plan, i) == ZS_MEMBER_STATELESS) Py_RETURN_NONE;
    }
    PyObject *foreign = members_with(self, n, ZS_MEMBER_FOREIGN);
    if (foreign == NULL || !now) return foreign;
    zs_status status;
    ZS_PY_NOGIL(status, zs_optim_step(self->plan));
    if (status == ZS_OK) return foreign;
    Py_DECREF(foreign);
    return zs_py_raise(NULL);
}

static PyObject *begin_step(plan_object *self, PyObject *const *args, Py_ssize_t n_args, bool now)
{
    PyObject *tuple = n_args == 3 ? args[2] : Py_None;
    bool live = tuple != Py_None;
    if (n_args < 2 || n_args > 3 || !PyDict_Check(args[0]) || !PyDict_Check(args[1]) ||
        (live && (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 4)))
        return PyErr_Format(PyExc_TypeError, "step() expects a param group and the optimizer's state, both dicts");
    zs_hyper hyper;
    zs_live found = {0};
    PyObject *params = option(args[0], "params");
    bool lr_is_live = live && PyTuple_GET_ITEM(tuple, 1) != Py_None;
    if (params == NULL || read_hyper(self->rule, args[0], lr_is_live, &hyper) < 0) return NULL;
    if (!PyList_Check(params)) return PyErr_Format(PyExc_TypeError, "the 'params' of a param group must be a list");

    Py_ssize_t count = -1, n = PyList_GET_SIZE(params);
    walk(self, params, args[1], compare, &count);
    if (self->plan == NULL || count != self->n_seen) Py_RETURN_NONE;
    zs_clear_error();
    if (live && read_live(tuple, n, &found) != ZS_OK) return zs_py_raise(NULL);
    return step_with(self, n, &hyper, live ? &found : NULL, now);
}

static PyObject *plan_step(plan_object *self, PyObject *const *args, Py_ssize_t n_args)
{
    return begin_step(self, args, n_args, true);
}

static PyObject *plan_prepare(plan_object *self, PyObject *const *args, Py_ssize_t n_args)
{
    return begin_step(self, args, n_args, false);
}

/* --- the type ----------------------------------------------------------------------------------------------------- */

static int plan_traverse(plan_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; i < self->n_seen; i++)
        Py_VISIT(self->seen[i]);
    return 0;
}

static int plan_clear(plan_object *self)
{
    zs_optim_free(self->plan); /* its weak handles before the tensors */
    self->plan = NULL;
    PyObject **seen = self->seen;
    Py_ssize_t n_seen = self->n_seen;
    self->seen = NULL;
    self->n_seen = self->room = 0;
    for (Py_ssize_t i = 0; i < n_seen; i++)
        Py_DECREF(seen[i]);
    PyMem_Free(seen);
    return 0;
}

static void plan_dealloc(plan_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    plan_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

zs_optim *zs_py_plan(PyObject *object)
{
    if (Py_TYPE(object)->tp_dealloc == (destructor)plan_dealloc) return ((plan_object *)object)->plan;
    PyErr_Format(PyExc_TypeError, "expected an OptimPlan, got %.100s", Py_TYPE(object)->tp_name);
    return NULL;
}

static PyMethodDef plan_methods[] = {
    {"step", (PyCFunction)(void (*)(void))plan_step, METH_FASTCALL,
     "step($self, group, state, live=None, /)\n--\n\nUpdate the group's parameters that have a gradient."},
    {"prepare", (PyCFunction)(void (*)(void))plan_prepare, METH_FASTCALL,
     "prepare($self, group, state, /)\n--\n\nAs step(), but update nothing yet: a KeptStep does."},
    {"look_again", zs_py_look_again, METH_NOARGS,
     "look_again($self, /)\n--\n\nMake sure that gradients are as they were when the step was prepared."},
    {"count", zs_py_count, METH_NOARGS, "count($self, /)\n--\n\nCount the prepared step in the optimizer's state."},
    {"grad_files", zs_py_grad_files, METH_NOARGS,
     "grad_files($self, /)\n--\n\nReturn, for each run of the prepared step, the descriptor of the file of memory in "
     "which its gradient lies; -1 for none."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)"OptimPlan(rule, params, state, fresh, numbers=None, steps=None)  A plan to update the "
                        "parameters of one param group in a single call."},
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_traverse, plan_traverse},
    {Py_tp_clear, plan_clear},
    {Py_tp_methods, plan_methods},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "zshard._core.OptimPlan",
    .basicsize = sizeof(plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = plan_slots,
};

int zs_py_optim_init(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &plan_spec, NULL);
    if (type == NULL) return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}
