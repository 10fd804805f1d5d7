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

static PyObject *unit_strategy(unit_object *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(strategy_names[self->unit->strategy]);
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
    PyErr_Format(PyExc_ValueError, "cannot change the strategy of unit '%s' from %s to %s after FSDP(...)",
                 zs_unit_label(unit->name), strategy_names[unit->strategy], text);
    return -1;
}

static PyObject *unit_is_kept(unit_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->unit->record.is.kept);
}

static PyObject *unit_read_by(unit_object *self, void *unused)
{
    (void)unused;
    zs_record *by = self->unit->record.read.by;
    return by != NULL ? PyUnicode_FromString(zs_unit_of(by)->name) : Py_NewRef(Py_None);
}

static PyObject *unit_is_coded(unit_object *self, void *unused)
{
    (void)unused;
    bool coded = false;
    for (int f = 0; f < self->unit->n_flats; f++)
        coded |= self->unit->flats[f].code != ZS_WIRE_EXACT;
    return PyBool_FromLong(coded);
}

static PyObject *unit_is_full(unit_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(zs_unit_is_full(self->unit));
}

static PyObject *unit_replicated(unit_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->unit->record.is.replicated);
}

static PyObject *unit_offloads(unit_object *self, void *unused)
{
    (void)unused;
    const zs_unit_offload *offloads = &self->unit->offloads;
    return Py_BuildValue("(NNN)", PyBool_FromLong(offloads->params), PyBool_FromLong(offloads->grads),
                         PyBool_FromLong(offloads->state));
}

static PyObject *unit_params(unit_object *self, void *unused)
{
    (void)unused;
    PyObject *list = PyList_New((Py_ssize_t)self->unit->n_params);
    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(list); i++)
        PyList_SET_ITEM(list, i, Py_NewRef(Py_None)); /* a dry run has no places */
    for (Py_ssize_t i = self->n_places; list != NULL && i-- > 0;) {
        const param_place *place = &self->places[i];
        PyList_SetItem(list, (Py_ssize_t)place->index, Py_NewRef(place->param));
    }
    return list;
}

static PyObject *unit_is_hooked(unit_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->unit->context->ranks.all->world > 1 || !self->unit->record.is.fixed);
}

static PyObject *unit_n_params(unit_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(self->unit->n_params);
}

static PyObject *unit_engine_id(unit_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(zs_engine_of(self->unit));
}

static PyObject *unit_is_running(unit_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->unit->record.inside > 0);
}

static PyObject *unit_in_forward(unit_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(zs_engine_in_forward(zs_engine_of(self->unit)));
}

static PyObject *unit_n_open(unit_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(zs_engine_n_open(zs_engine_of(self->unit)));
}

static PyObject *unit_engine(unit_object *self, void *unused)
{
    (void)unused;
    return zs_py_engine_wrap(zs_engine_of(self->unit));
}

static PyObject *unit_sync(unit_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->unit->record.sync);
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

static PyObject *unit_divisor(unit_object *self, void *unused)
{
    (void)unused;
    const zs_unit *unit = self->unit;
    return PyFloat_FromDouble(unit->divisor != 0.0 ? unit->divisor : unit->context->ranks.all->world);
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
    if (status != ZS_OK) return zs_py_raise(NULL);
    Py_RETURN_NONE;
}

static PyObject *unit_was_trainable(unit_object *self, void *unused)
{
    (void)unused;
    const zs_unit *unit = self->unit;
    PyObject *list = PyList_New((Py_ssize_t)unit->n_params);
    for (int64_t i = 0; list != NULL && i < unit->n_params; i++) {
        const zs_flat *flat = &unit->flats[unit->params[i].flat];
        PyList_SET_ITEM(list, (Py_ssize_t)i, PyBool_FromLong(flat->trainable && !flat->thawed));
    }
    return list;
}

PyGetSetDef zs_py_unit_getset[] = {
    {"name", (getter)unit_name, (setter)unit_set_name, "Dotted name of the module; '' for the root.", NULL},
    {"strategy", (getter)unit_strategy, (setter)unit_set_strategy, "'full_shard', 'shard_grad_op' or 'no_shard'.",
     NULL},
    {"divisor", (getter)unit_divisor, (setter)unit_set_divisor, "Divisor of gradient sums.", NULL},
    {"was_trainable", (getter)unit_was_trainable, NULL,
     "For each parameter, whether it was trainable when the unit was made.", NULL},
    {"is_full", (getter)unit_is_full, NULL, "Whether the parameters are unsharded now.", NULL},
    {"is_kept", (getter)unit_is_kept, NULL, "Whether memory to spare keeps it unsharded from forward to backward.",
     NULL},
    {"is_coded", (getter)unit_is_coded, NULL, "Whether parameters cross hosts in fewer bytes.", NULL},
    {"offloads", (getter)unit_offloads, NULL, "Whether its parameters, gradients and optimizer state are offloaded.",
     NULL},
    {"replicated", (getter)unit_replicated, NULL, "Whether each rank always has the full parameters.", NULL},
    {"params", (getter)unit_params, NULL, "Its parameters, in order.", NULL},
    {"is_hooked", (getter)unit_is_hooked, NULL, "Whether the unit takes part in forward and backward.", NULL},
    {"n_params", (getter)unit_n_params, NULL, "Number of parameters.", NULL},
    {"bytes", (getter)unit_sizes, NULL, "Sizes in bytes: shard, full, bucket, grad.", NULL},
    {"buffers", NULL, (setter)unit_set_buffers, "What tells the engine, as a pass begins, which buffers to broadcast.",
     NULL},
    {"sync", (getter)unit_sync, (setter)unit_set_sync, "Whether the next backwards reduce gradients.", NULL},
    {"engine_id", (getter)unit_engine_id, NULL, "A number that units of one engine have in common.", NULL},
    {"is_running", (getter)unit_is_running, NULL, "Whether a forward of its module has begun and not ended.", NULL},
    {"read_by", (getter)unit_read_by, NULL,
     "Name of the unit in whose forward an operation has read the parameters last; None: of none.", NULL},
    {"in_forward", (getter)unit_in_forward, NULL, "Whether a forward of the unit's model runs on this thread.", NULL},
    {"n_open", (getter)unit_n_open, NULL, "Number of open forwards and sessions of the unit's model.", NULL},
    {"engine", (getter)unit_engine, NULL, "The engine that the unit belongs to.", NULL},
    {0},
};
