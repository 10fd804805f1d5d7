/* py_unit_facts.c - the attributes of _core.Unit. */
#include "python/py_unit.h"

#include <stdlib.h>
#include <string.h>

static const char *const strategy_names[] = {"full_shard", "shard_grad_op", "no_shard"};

int zs_py_parse_strategy(const char *text, zs_strategy *out)
{
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, strategy_names[i]) != 0) continue;
        *out = (zs_strategy)i;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "unknown strategy '%s'", text);
    return -1;
}

static int unit_set_name(unit_object *self, PyObject *value, void *unused)
{
    (void)unused;
    const char *text = value != NULL ? PyUnicode_AsUTF8(value) : "";
    if (text == NULL) return -1;
    zs_clear_error();
    if (zs_unit_rename(self->unit, text) == ZS_OK) return 0;
    zs_py_raise(NULL);
    return -1;
}

/* Sharded units may change between full_shard and shard_grad_op at any time: it decides the state after a forward. */
static int unit_set_strategy(unit_object *self, PyObject *value, void *unused)
{
    (void)unused;
    const char *text = value != NULL ? PyUnicode_AsUTF8(value) : "";
    zs_strategy strategy;
    if (text == NULL || zs_py_parse_strategy(text, &strategy) < 0) return -1;
    zs_unit *unit = self->unit;
    if ((strategy == ZS_NO_SHARD) == (unit->strategy == ZS_NO_SHARD)) {
        zs_unit_set_strategy(unit, strategy);
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "cannot change the strategy of unit '%s' from %s to %s after FSDP(...): pass strategy= there",
                 zs_unit_label(unit->name), strategy_names[unit->strategy], text);
    return -1;
}

static int unit_set_buffers(unit_object *self, PyObject *value, void *unused)
{
    (void)unused;
    if (value == NULL || !PyCallable_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "buffers must be callable");
        return -1;
    }
    Py_XSETREF(self->buffers, Py_NewRef(value));
    return 0;
}

static int unit_set_sync(unit_object *self, PyObject *value, void *unused)
{
    (void)unused;
    int on = value == NULL ? -1 : PyObject_IsTrue(value);
    if (on < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "cannot delete the attribute sync");
        return -1;
    }
    zs_record_set_sync(&self->unit->record, on != 0);
    return 0;
}

static int unit_set_divisor(unit_object *self, PyObject *value, void *unused)
{
    (void)unused;
    double divisor = value != NULL ? PyFloat_AsDouble(value) : 0.0;
    if (PyErr_Occurred()) return -1;
    zs_unit *unit = self->unit;
    int world = unit->context->ranks.all->world;
    if (!(divisor > 0.0 && isfinite(divisor))) {
        PyErr_SetString(PyExc_ValueError, "the gradient divide factor must be a positive finite number");
        return -1;
    }
    if (unit->record.is.replicated && divisor != world) {
        PyErr_Format(PyExc_NotImplementedError,
                     "unit '%s' is not sharded: its gradients can only be divided by the number of ranks (%d); scale "
                     "the loss instead",
                     zs_unit_label(unit->name), world);
        return -1;
    }
    unit->divisor = divisor;
    return 0;
}

const char zs_py_unit_prefetch_doc[] =
    PyDoc_STR("prefetch($self, backward, units, /)\n--\n\nSet the units to prefetch once this one is unsharded, in "
              "forward or in backward. An empty list restores the default: the order of the previous pass.");

PyObject *zs_py_unit_prefetch(unit_object *self, PyObject *args)
{
    int backward;
    PyObject *list;
    size_t n;
    if (!PyArg_ParseTuple(args, "pO:prefetch", &backward, &list)) return NULL;
    zs_unit **units = zs_py_units(list, &n);
    if (units == NULL) return NULL;
    zs_clear_error();
    zs_status status = zs_prefetch_set(self->unit, backward ? ZS_PHASE_BACKWARD : ZS_PHASE_FORWARD, units, n);
    free(units);
    return zs_py_none(status);
}

static PyObject *sizes_of(const zs_unit *unit)
{
    return Py_BuildValue("{s:n,s:n,s:n,s:n}", "shard", (Py_ssize_t)zs_unit_shard_bytes(unit), "full",
                         (Py_ssize_t)zs_unit_full_bytes(unit), "bucket", (Py_ssize_t)zs_unit_bucket_bytes(unit), "grad",
                         (Py_ssize_t)zs_unit_grad_bytes(unit));
}

static bool is_coded(const zs_unit *unit)
{
    bool coded = false;
    for (int f = 0; f < unit->n_flats; f++)
        coded |= unit->flats[f].code != ZS_WIRE_EXACT;
    return coded;
}

static PyObject *offloads_of(const zs_unit *unit)
{
    const zs_unit_offload *offloads = &unit->offloads;
    return Py_BuildValue("(NNN)", PyBool_FromLong(offloads->params), PyBool_FromLong(offloads->grads),
                         PyBool_FromLong(offloads->state));
}

static PyObject *params_of(const unit_object *self)
{
    PyObject *list = PyList_New((Py_ssize_t)self->unit->n_params);
    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(list); i++)
        PyList_SET_ITEM(list, i, Py_NewRef(Py_None)); /* a dry run has no places */
    for (Py_ssize_t i = self->n_places; list != NULL && i-- > 0;) {
        const param_place *place = &self->places[i];
        PyList_SetItem(list, (Py_ssize_t)place->index, Py_NewRef(place->param));
    }
    return list;
}

static PyObject *were_trainable(const zs_unit *unit)
{
    PyObject *list = PyList_New((Py_ssize_t)unit->n_params);
    for (int64_t i = 0; list != NULL && i < unit->n_params; i++) {
        const zs_flat *flat = &unit->flats[unit->params[i].flat];
        PyList_SET_ITEM(list, (Py_ssize_t)i, PyBool_FromLong(flat->trainable && !flat->thawed));
    }
    return list;
}

/* Pairs of a parameter's index and the bitmap of ranks, for those whose last sum was not finite here. */
static PyObject *nonfinite_of(const zs_unit *unit)
{
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list != NULL && i < unit->n_params; i++) {
        if (!unit->params[i].nonfinite) continue;
        PyObject *pair = Py_BuildValue("(LK)", (long long)i, (unsigned long long)unit->params[i].nonfinite_on);
        if (pair == NULL || PyList_Append(list, pair) < 0) Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

/* The facts of a unit for Python. */
typedef enum fact {
    NAME,
    STRATEGY,
    DIVISOR,
    WAS_TRAINABLE,
    IS_FULL,
    IS_PINNED,
    IS_KEPT,
    IS_CODED,
    OFFLOADS,
    REPLICATED,
    PARAMS,
    IS_HOOKED,
    N_PARAMS,
    SIZES,
    NONFINITE,
    SYNC,
    ENGINE_ID,
    IS_RUNNING,
    READ_BY,
    IS_WRITTEN,
    IN_FORWARD,
    N_OPEN,
    ENGINE,
} fact;

static PyObject *unit_fact(unit_object *self, void *which)
{
    zs_unit *unit = self->unit;
    zs_engine *engine = zs_engine_of(unit);
    const zs_record *record = &unit->record;
    int world = unit->context->ranks.all->world;
    switch ((fact)(uintptr_t)which) {
    case NAME: return PyUnicode_FromString(unit->name);
    case STRATEGY: return PyUnicode_FromString(strategy_names[unit->strategy]);
    case DIVISOR: return PyFloat_FromDouble(unit->divisor != 0.0 ? unit->divisor : world);
    case WAS_TRAINABLE: return were_trainable(unit);
    case IS_PINNED: return PyBool_FromLong(unit->record.pinned);
    case IS_FULL: return PyBool_FromLong(zs_unit_is_full(unit));
    case IS_KEPT: return PyBool_FromLong(record->is.kept);
    case IS_CODED: return PyBool_FromLong(is_coded(unit));
    case OFFLOADS: return offloads_of(unit);
    case REPLICATED: return PyBool_FromLong(record->is.replicated);
    case PARAMS: return params_of(self);
    case IS_HOOKED: return PyBool_FromLong(zs_unit_reduces(unit));
    case N_PARAMS: return PyLong_FromLongLong(unit->n_params);
    case SIZES: return sizes_of(unit);
    case NONFINITE: return nonfinite_of(unit);
    case SYNC: return PyBool_FromLong(record->sync);
    case ENGINE_ID: return PyLong_FromUnsignedLongLong(zs_engine_number(engine));
    case IS_RUNNING: return PyBool_FromLong(record->inside > 0);
    case READ_BY:
        return record->read.by != NULL ? PyUnicode_FromString(zs_unit_of(record->read.by)->name) : Py_NewRef(Py_None);
    case IS_WRITTEN: return PyBool_FromLong(zs_engine_is_written(engine));
    case IN_FORWARD: return PyBool_FromLong(zs_engine_in_forward(engine));
    case N_OPEN: return PyLong_FromSize_t(zs_engine_n_open(engine));
    case ENGINE: return zs_py_engine_wrap(engine);
    }
    return NULL;
}

#define FACT(name, which, set, doc) {name, (getter)unit_fact, (setter)(set), doc, (void *)(uintptr_t)(which)}

PyGetSetDef zs_py_unit_getset[] = {
    FACT("name", NAME, unit_set_name, "Dotted name of the module; '' for the root."),
    FACT("strategy", STRATEGY, unit_set_strategy, "'full_shard', 'shard_grad_op' or 'no_shard'."),
    FACT("divisor", DIVISOR, unit_set_divisor, "Divisor of gradient sums."),
    FACT("was_trainable", WAS_TRAINABLE, NULL, "For each parameter, whether it was trainable when the unit was made."),
    FACT("is_full", IS_FULL, NULL, "Whether the parameters are unsharded now."),
    FACT("is_pinned", IS_PINNED, NULL, "Whether unshard() or summon_full_params() keeps them unsharded."),
    FACT("is_kept", IS_KEPT, NULL, "Whether memory to spare keeps it unsharded from forward to backward."),
    FACT("is_coded", IS_CODED, NULL, "Whether parameters cross hosts in fewer bytes."),
    FACT("offloads", OFFLOADS, NULL, "Whether its parameters, gradients and optimizer state are offloaded."),
    FACT("replicated", REPLICATED, NULL, "Whether each rank always has the full parameters."),
    FACT("params", PARAMS, NULL, "Its parameters, in order."),
    FACT("is_hooked", IS_HOOKED, NULL, "Whether the unit takes part in forward and backward."),
    FACT("n_params", N_PARAMS, NULL, "Number of parameters."),
    FACT("bytes", SIZES, NULL, "Sizes in bytes: shard, full, bucket, grad."),
    FACT(
        "nonfinite", NONFINITE, NULL,
        "Parameters whose last sum of gradients is not finite here, if its squares were taken: for each its index, and "
        "a bitmap of the ranks whose own gradient is not (over 'hosts': of the first of each host)."),
    {"buffers", NULL, (setter)unit_set_buffers, "What tells the engine, as a pass begins, which buffers to broadcast.",
     NULL},
    FACT("sync", SYNC, unit_set_sync, "Whether the next backwards reduce gradients."),
    FACT("engine_id", ENGINE_ID, NULL, "A number that the units of one engine have in common; of no other engine."),
    FACT("is_running", IS_RUNNING, NULL, "Whether a forward of its module has begun and not ended."),
    FACT("read_by", READ_BY, NULL,
         "Name of the unit in whose forward an operation has read the parameters last; None: of none."),
    FACT("is_written", IS_WRITTEN, NULL, "Whether a write to the model has begun, such as an optimizer's step."),
    FACT("in_forward", IN_FORWARD, NULL,
         "Whether code of a forward or backward of the unit's model runs on this thread, but no write there."),
    FACT("n_open", N_OPEN, NULL, "Number of open forwards and sessions of the unit's model."),
    FACT("engine", ENGINE, NULL, "The engine that the unit belongs to."),
    {0},
};
