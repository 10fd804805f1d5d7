/* py_engine.c - _core.Engine: the engine of one model, as Python sees it. Two objects of one engine compare equal. */
#include "python/py_engine.h"
#include "engine/history.h"
#include "engine/writing.h"
#include "python/py_faces.h"

#include "unit/offload.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_NUMBERS = 256 }; /* doubles that fit in one exchange, with room to spare */

zs_engine *zs_py_engine(PyObject *object)
{
    if (Py_IS_TYPE(object, zs_py_get_state()->engine_type)) return ((engine_object *)object)->engine;
    PyErr_Format(PyExc_TypeError, "expected a zshard._core.Engine, got %.100s", Py_TYPE(object)->tp_name);
    return NULL;
}

static PyObject *new_object(PyTypeObject *type, zs_engine *engine)
{
    engine_object *self = (engine_object *)type->tp_alloc(type, 0);
    if (self != NULL) self->engine = zs_engine_retain(engine);
    return (PyObject *)self;
}

PyObject *zs_py_engine_wrap(zs_engine *engine)
{
    return new_object(zs_py_get_state()->engine_type, engine);
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "all", "shards", "shard_group", "replica_group", NULL};
    PyObject *all, *shards, *shard_group, *replica_group;
    const char *name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sOOOO:Engine", names, &name, &all, &shards, &shard_group,
                                     &replica_group))
        return NULL;
    zs_ranks ranks = {zs_py_comm(all), zs_py_comm(shards), zs_py_comm(shard_group), NULL};
    if (replica_group != Py_None) ranks.replica_group = zs_py_comm(replica_group);
    if (PyErr_Occurred()) return NULL;
    zs_engine *engine = NULL;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_new(&ranks, name, &engine));
    if (status != ZS_OK) return zs_py_raise(NULL);
    PyObject *self = new_object(type, engine);
    zs_engine_release(engine);
    return self;
}

static void engine_dealloc(engine_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    zs_engine_release(self->engine);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *engine_compare(PyObject *self, PyObject *other, int op)
{
    if (!Py_IS_TYPE(other, Py_TYPE(self)) || (op != Py_EQ && op != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
    bool same = ((engine_object *)self)->engine == ((engine_object *)other)->engine;
    return PyBool_FromLong(same == (op == Py_EQ));
}

static Py_hash_t engine_hash(engine_object *self)
{
    return (Py_hash_t)((uintptr_t)self->engine >> 4);
}

static PyObject *engine_adopt(engine_object *self, PyObject *object)
{
    zs_unit *unit = zs_py_unit(object);
    if (unit == NULL) return NULL;
    zs_clear_error();
    return zs_py_none(zs_engine_adopt(self->engine, unit));
}

static PyObject *engine_set_order(engine_object *self, PyObject *list)
{
    size_t n;
    zs_unit **units = zs_py_units(list, &n);
    if (units == NULL) return NULL;
    zs_clear_error();
    zs_status status = zs_engine_set_order(self->engine, units, n);
    free(units);
    return zs_py_none(status);
}

static PyObject *engine_set_prefetch(engine_object *self, PyObject *args)
{
    zs_prefetch prefetch;
    if (!PyArg_ParseTuple(args, "ii:set_prefetch", &prefetch.ahead[ZS_PHASE_FORWARD],
                          &prefetch.ahead[ZS_PHASE_BACKWARD]))
        return NULL;
    zs_engine_set_prefetch(self->engine, prefetch);
    Py_RETURN_NONE;
}

static PyObject *engine_set_codes(engine_object *self, PyObject *args)
{
    int gradients, parameters;
    if (!PyArg_ParseTuple(args, "pp:set_codes", &gradients, &parameters)) return NULL;
    zs_engine_set_codes(self->engine, gradients ? ZS_WIRE_BF16 : ZS_WIRE_EXACT,
                        parameters ? ZS_WIRE_BF16 : ZS_WIRE_EXACT);
    Py_RETURN_NONE;
}

static PyObject *engine_codes_gradients(engine_object *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(zs_engine_codes_gradients(self->engine));
}

static PyObject *engine_rescale(engine_object *self, PyObject *factor)
{
    double value = PyFloat_AsDouble(factor);
    if (PyErr_Occurred()) return NULL;
    zs_engine_rescale(self->engine, value);
    Py_RETURN_NONE;
}

static PyObject *engine_set_offload(engine_object *self, PyObject *args)
{
    const char *directory;
    int params, grads, state;
    zs_offload what = {0};
    if (!PyArg_ParseTuple(args, "zpppd:set_offload", &directory, &params, &grads, &state, &what.fraction)) return NULL;
    what.params = params;
    what.grads = grads;
    what.state = state;
    zs_status status;
    ZS_PY_NOGIL(status, zs_offload_set(zs_engine_context(self->engine), directory, &what));
    return zs_py_none(status);
}

/* Runs a call that may wait for other ranks. */
static PyObject *without_gil(engine_object *self, zs_status (*call)(zs_engine *))
{
    zs_status status;
    ZS_PY_NOGIL(status, call(self->engine));
    return zs_py_shown(self->engine, status);
}

static PyObject *engine_open(engine_object *self, PyObject *unused)
{
    (void)unused;
    return without_gil(self, zs_engine_open);
}

static PyObject *engine_close(engine_object *self, PyObject *unused)
{
    (void)unused;
    return without_gil(self, zs_engine_close);
}

static PyObject *engine_begin_write(engine_object *self, PyObject *unused)
{
    (void)unused;
    return without_gil(self, zs_engine_write_begin);
}

static PyObject *engine_end_write(engine_object *self, PyObject *unused)
{
    (void)unused;
    return without_gil(self, zs_engine_write_end);
}

static PyObject *engine_note_barrier(engine_object *self, PyObject *unused)
{
    (void)unused;
    return without_gil(self, zs_writing_barrier);
}

static PyObject *engine_before_step(engine_object *self, PyObject *in_closure)
{
    zs_status status;
    bool ends_closure = in_closure == Py_True;
    ZS_PY_NOGIL(status, zs_engine_before_step(self->engine, ends_closure));
    return zs_py_shown(self->engine, status);
}

static PyObject *engine_note_step(engine_object *self, PyObject *const *args, Py_ssize_t n)
{
    if (n != 2) return PyErr_Format(PyExc_TypeError, "note_step() takes two numbers");
    uint64_t settings = PyLong_AsUnsignedLongLong(args[0]);
    uint64_t counts = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    zs_engine_note_step(self->engine, settings, counts);
    Py_RETURN_NONE;
}

static PyObject *engine_tell_settings(engine_object *self, PyObject *lines)
{
    const char *text = PyUnicode_AsUTF8(lines);
    if (text == NULL) return NULL;
    zs_engine_publish_settings(self->engine, text);
    Py_RETURN_NONE;
}

static PyObject *engine_compare_ranks(engine_object *self, PyObject *unused)
{
    (void)unused;
    return without_gil(self, zs_engine_compare);
}

static double combine(double a, double b, bool max)
{
    if (!max) return a + b;
    if (isnan(a) || isnan(b)) return NAN;
    return a > b ? a : b;
}

static PyObject *reduce_numbers(zs_comm *comm, const double *mine, size_t n, bool max)
{
    double *all = calloc((size_t)comm->world * n + 1, sizeof *all);
    if (all == NULL) return PyErr_NoMemory();
    zs_status status;
    ZS_PY_NOGIL(status, zs_comm_exchange(comm, mine, n * sizeof *mine, all));
    PyObject *list = status == ZS_OK ? PyList_New((Py_ssize_t)n) : zs_py_raise(NULL);
    for (size_t i = 0; list != NULL && i < n; i++) {
        double value = all[i];
        for (int r = 1; r < comm->world; r++)
            value = combine(value, all[(size_t)r * n + i], max);
        PyObject *item = PyFloat_FromDouble(value);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    free(all);
    return list;
}

static PyObject *over_ranks(engine_object *self, PyObject *numbers, bool max)
{
    double mine[MAX_NUMBERS];
    if (!PyList_Check(numbers) || PyList_GET_SIZE(numbers) > MAX_NUMBERS)
        return PyErr_Format(PyExc_ValueError, "expected a list of at most %d floats", MAX_NUMBERS);
    size_t n = (size_t)PyList_GET_SIZE(numbers);
    for (size_t i = 0; i < n; i++) {
        mine[i] = PyFloat_AsDouble(PyList_GET_ITEM(numbers, (Py_ssize_t)i));
        if (PyErr_Occurred()) return NULL;
    }
    zs_status status; /* peers may still wait for a backward that raised here */
    ZS_PY_NOGIL(status, zs_engine_settle(self->engine));
    zs_py_show(self->engine);
    if (status != ZS_OK) return zs_py_raise(NULL);
    const zs_ranks *ranks = zs_engine_ranks(self->engine);
    return reduce_numbers(max ? ranks->all : ranks->shards, mine, n, max);
}

static PyObject *engine_sum(engine_object *self, PyObject *numbers)
{
    return over_ranks(self, numbers, false);
}

static PyObject *engine_max(engine_object *self, PyObject *numbers)
{
    return over_ranks(self, numbers, true);
}

static PyMethodDef engine_methods[] = {
    {"adopt", (PyCFunction)engine_adopt, METH_O,
     "adopt($self, unit, /)\n--\n\nMove a unit to this engine from the one it belongs to."},
    {"set_order", (PyCFunction)engine_set_order, METH_O,
     "set_order($self, units, /)\n--\n\nSet the order of the engine's units: the order of their modules, parents "
     "before children."},
    {"set_prefetch", (PyCFunction)engine_set_prefetch, METH_VARARGS,
     "set_prefetch($self, forward, backward, /)\n--\n\nSet how many units ahead to prefetch in forward and in "
     "backward."},
    {"set_codes", (PyCFunction)engine_set_codes, METH_VARARGS,
     "set_codes($self, gradients, parameters, /)\n--\n\nLet gradients and parameters of units that are created from "
     "now on cross hosts as bfloat16."},
    {"add_leaves", (PyCFunction)zs_py_add_leaves, METH_O, zs_py_add_leaves_doc},
    {"leaves", (PyCFunction)zs_py_leaves, METH_NOARGS, zs_py_leaves_doc},
    {"begin_leaf", (PyCFunction)zs_py_begin_leaf, METH_NOARGS, zs_py_begin_leaf_doc},
    {"leaf_is_done", (PyCFunction)zs_py_leaf_is_done, METH_NOARGS, zs_py_leaf_is_done_doc},
    {"restart_step", (PyCFunction)zs_py_restart_step, METH_NOARGS, zs_py_restart_step_doc},
    {"codes_gradients", (PyCFunction)engine_codes_gradients, METH_NOARGS,
     "codes_gradients($self, /)\n--\n\nReturn whether gradients cross hosts as codes."},
    {"rescale", (PyCFunction)engine_rescale, METH_O,
     "rescale($self, factor, /)\n--\n\nTell that gradients are `factor` times as large from now on: what codes have "
     "lost of them is multiplied by it."},
    {"set_offload", (PyCFunction)engine_set_offload, METH_VARARGS,
     "set_offload($self, directory, params, grads, state, fraction, /)\n--\n\nOffload units that are created from now "
     "on: of the given kinds of memory, keep `fraction` of the model's bytes in files in `directory`. directory '' "
     "means the GPU's host memory; None is for dry runs. Collective."},
    {"sync_buffers", (PyCFunction)zs_py_sync_buffers, METH_VARARGS, zs_py_sync_buffers_doc},
    {"broadcast_buffers", (PyCFunction)zs_py_broadcast_buffers, METH_NOARGS, zs_py_broadcast_buffers_doc},
    {"open", (PyCFunction)engine_open, METH_NOARGS,
     "open($self, /)\n--\n\nOpen a session in which Unit.unshard() may be called. Collective."},
    {"before_step", (PyCFunction)engine_before_step, METH_O,
     "before_step($self, in_closure, /)\n--\n\nbegin_write() for an optimizer's step, or at the end of its closure."},
    {"note_step", (PyCFunction)(void (*)(void))engine_note_step, METH_FASTCALL,
     "note_step($self, settings, counts, /)\n--\n\nNote an optimizer's step, which all ranks make, or none."},
    {"tell_settings", (PyCFunction)engine_tell_settings, METH_O,
     "tell_settings($self, lines, /)\n--\n\nHave messages about ranks that step with other settings say which: for "
     "each setting a line of its name, a tab, and its values."},
    {"compare", (PyCFunction)engine_compare_ranks, METH_NOARGS,
     "compare($self, /)\n--\n\nRaise DivergenceError, on all ranks, if they have not made the same steps, loads and "
     "writes. Collective."},
    {"begin_write", (PyCFunction)engine_begin_write, METH_NOARGS,
     "begin_write($self, /)\n--\n\nTo be called before shards are written between passes."},
    {"note_barrier", (PyCFunction)engine_note_barrier, METH_NOARGS,
     "note_barrier($self, /)\n--\n\nNote a barrier of all ranks: the script's writes to shards are complete, and "
     "earlier "
     "evaluations by lone ranks no longer count."},
    {"end_write", (PyCFunction)engine_end_write, METH_NOARGS, "end_write($self, /)\n--\n\nThe write is complete."},
    {"close", (PyCFunction)engine_close, METH_NOARGS, "close($self, /)\n--\n\nClose the session that open() opened."},
    {"sum_over_ranks", (PyCFunction)engine_sum, METH_O,
     "sum_over_ranks($self, numbers, /)\n--\n\nReturn the sums of a list of floats over the ranks of one replica, "
     "added in rank order. Collective."},
    {"max_over_ranks", (PyCFunction)engine_max, METH_O,
     "max_over_ranks($self, numbers, /)\n--\n\nReturn the maximum of each float over all ranks; NaN if any rank's is "
     "NaN. Collective."},
    {"memory", (PyCFunction)zs_py_memory, METH_NOARGS, zs_py_memory_doc},
    {"peak", (PyCFunction)zs_py_peak, METH_NOARGS, zs_py_peak_doc},
    {"predict", (PyCFunction)zs_py_predict, METH_O, zs_py_predict_doc},
    {"predict_events", (PyCFunction)zs_py_predict_events, METH_NOARGS, zs_py_predict_events_doc},
    {"predict_mappings", (PyCFunction)zs_py_predict_mappings, METH_NOARGS, zs_py_predict_mappings_doc},
    {"set_calls", (PyCFunction)zs_py_set_calls, METH_O, zs_py_set_calls_doc},
    {"reserve", (PyCFunction)zs_py_reserve, METH_NOARGS, zs_py_reserve_doc},
    {"keep_gathered", (PyCFunction)zs_py_keep_gathered, METH_O, zs_py_keep_gathered_doc},
    {"gathered", (PyCFunction)zs_py_kept, METH_NOARGS, zs_py_kept_doc},
    {0},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_doc,
     "Engine(name, all, shards, shard_group, replica_group)\n--\n\nThe engine of one model. all: the transport of all "
     "ranks that reduce gradients together; shards: of the ranks that one replica is sharded over; shard_group: of the "
     "ranks that all-gather parameters from each other; replica_group: of the ranks that have the same secondary "
     "shard, or None."},
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_richcompare, engine_compare},
    {Py_tp_hash, engine_hash},
    {Py_tp_methods, engine_methods},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "zshard._core.Engine",
    .basicsize = sizeof(engine_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = engine_slots,
};

int zs_py_engine_init(PyObject *module, zs_py_state *state)
{
    return zs_py_add_type(module, &engine_spec, &state->engine_type);
}
