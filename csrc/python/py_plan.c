/* py_plan.c - _core.Engine: its memory, and the predicted memory of a step. */
#include "engine/keep_gathered.h"
#include "engine/plan.h"
#include "python/py_engine.h"

#include <stdlib.h>

static PyObject *dict_of(const zs_engine_bytes *bytes)
{
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n}", "shards", (Py_ssize_t)bytes->shards, "kept",
                         (Py_ssize_t)bytes->kept, "grads", (Py_ssize_t)bytes->grads, "slots", (Py_ssize_t)bytes->slots,
                         "buckets", (Py_ssize_t)bytes->buckets, "transport", (Py_ssize_t)bytes->transport, "offloaded",
                         (Py_ssize_t)bytes->offloaded, "total", (Py_ssize_t)bytes->total);
}

const char zs_py_memory_doc[] =
    "memory($self, /)\n--\n\nReturn the bytes in use on this rank, as a dict: shards, kept (secondary "
    "shards), grads, slots (full buffers), buckets, transport (the transport's own, shared by all models that "
    "use it), offloaded (in files or in host memory) and total (all of these except offloaded).";

PyObject *zs_py_memory(engine_object *self, PyObject *unused)
{
    (void)unused;
    zs_engine_bytes bytes = zs_engine_memory(self->engine);
    return dict_of(&bytes);
}

const char zs_py_peak_doc[] = "peak($self, /)\n--\n\nReturn the peak of each number of memory().";

PyObject *zs_py_peak(engine_object *self, PyObject *unused)
{
    (void)unused;
    zs_engine_bytes bytes = zs_engine_peak(self->engine);
    return dict_of(&bytes);
}

const char zs_py_predict_doc[] = "predict($self, stepped, /)\n--\n\nPredict the peaks of memory() from the units and a "
                                 "training step. stepped: as if all units were stepped in backward.";

PyObject *zs_py_predict(engine_object *self, PyObject *stepped)
{
    int on = PyObject_IsTrue(stepped);
    zs_engine_bytes bytes;
    if (on < 0) return NULL;
    zs_clear_error();
    if (zs_engine_predict(self->engine, on != 0, &bytes) != ZS_OK) return zs_py_raise(NULL);
    return dict_of(&bytes);
}

/* The name of an act, as zshard/extras/planner/timeline.py has it. */
static const char *name_of(zs_dry_act act)
{
    switch (act) {
    case ZS_DRY_FORWARD: return "forward";
    case ZS_DRY_BACKWARD: return "backward";
    case ZS_DRY_GATHER: return "gather";
    case ZS_DRY_BIND: return "bind";
    case ZS_DRY_POST: return "post";
    case ZS_DRY_SUM: return "sum";
    case ZS_DRY_REUSE: return "reuse";
    case ZS_DRY_STEP: return "step";
    }
    return "";
}

static PyObject *list_of(const zs_dry_events *events)
{
    PyObject *list = PyList_New((Py_ssize_t)events->n);
    for (size_t i = 0; list != NULL && i < events->n; i++) {
        PyObject *pair = Py_BuildValue("sn", name_of(events->list[i].act), (Py_ssize_t)events->list[i].at);
        if (pair == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, pair);
    }
    return list;
}

const char zs_py_predict_events_doc[] =
    "predict_events($self, /)\n--\n\nPredict what a training step does, as a list of pairs in the order in which it is "
    "begun: ('forward' or 'backward', the index of a call of set_calls()) where the script reaches that call; (act, "
    "the unit's place in set_order()) for the acts of the schedule: 'gather' and 'post' start something, 'bind', 'sum' "
    "and 'reuse' wait for it, and 'step' steps the unit in backward.";

PyObject *zs_py_predict_events(engine_object *self, PyObject *unused)
{
    (void)unused;
    zs_dry_events events = {0};
    zs_clear_error();
    zs_status status = zs_engine_predict_events(self->engine, &events);
    PyObject *list = status == ZS_OK ? list_of(&events) : zs_py_raise(NULL);
    free(events.list);
    return list;
}

const char zs_py_predict_mappings_doc[] =
    "predict_mappings($self, /)\n--\n\nPredict how many memory mappings the units and a step add to this process where "
    "ranks map each other's memory, at most.";

PyObject *zs_py_predict_mappings(engine_object *self, PyObject *unused)
{
    (void)unused;
    size_t count = 0;
    zs_clear_error();
    if (zs_engine_predict_mappings(self->engine, &count) != ZS_OK) return zs_py_raise(NULL);
    return PyLong_FromSize_t(count);
}

static bool read_call(zs_engine *engine, PyObject *item, zs_call *call)
{
    PyObject *unit;
    long long what;
    if (!PyArg_ParseTuple(item, "OL", &unit, &what)) return false;
    *call = (zs_call){zs_py_unit(unit), what};
    if (call->unit == NULL) return false;
    if (zs_engine_of(call->unit) == engine && what >= ZS_CALL_EXIT && what < call->unit->n_params) return true;
    PyErr_Format(PyExc_ValueError, "unit '%s' belongs to another engine, or has no parameter %lld",
                 zs_unit_label(call->unit->name), what);
    return false;
}

const char zs_py_set_calls_doc[] =
    "set_calls($self, calls, /)\n--\n\nSet what a forward does, assuming that modules run in their order. "
    "calls: a list of pairs: (unit, -1) where the unit's module, or another one that unshards it, begins; "
    "(unit, -2) where that one ends; (unit, i) at the first use of its parameter i.";

PyObject *zs_py_set_calls(engine_object *self, PyObject *list)
{
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "set_calls() expects a list of pairs (unit, call)");
    size_t n = (size_t)PyList_GET_SIZE(list);
    zs_call *calls = calloc(n + 1, sizeof *calls);
    if (calls == NULL) return PyErr_NoMemory();
    for (size_t i = 0; i < n; i++) {
        if (read_call(self->engine, PyList_GET_ITEM(list, (Py_ssize_t)i), &calls[i])) continue;
        free(calls);
        return NULL;
    }
    zs_engine_set_calls(self->engine, calls, n);
    Py_RETURN_NONE;
}

const char zs_py_reserve_doc[] =
    "reserve($self, /)\n--\n\nReserve the memory of a training step, unless it is reserved already.";

PyObject *zs_py_reserve(engine_object *self, PyObject *unused)
{
    (void)unused;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_reserve(self->engine)); /* it may be collective */
    return zs_py_none(status);
}

const char zs_py_keep_gathered_doc[] =
    "keep_gathered($self, most, /)\n--\n\nHave units stay gathered from forward to backward where a gather costs, up "
    "to `most` bytes of full parameters, the same on all ranks.";

PyObject *zs_py_keep_gathered(engine_object *self, PyObject *bytes)
{
    Py_ssize_t most = PyLong_AsSsize_t(bytes);
    if (most == -1 && PyErr_Occurred()) return NULL;
    zs_keep_gathered_set(self->engine, most == PY_SSIZE_T_MAX ? SIZE_MAX : (size_t)most);
    Py_RETURN_NONE;
}

const char zs_py_kept_doc[] =
    "gathered($self, /)\n--\n\nReturn a tuple: bytes of full parameters that stay gathered from the next forward on; "
    "those that memory is reserved for by now; does a gather cost.";

PyObject *zs_py_kept(engine_object *self, PyObject *unused)
{
    (void)unused;
    zs_keep_gathered keep_gathered = zs_keep_gathered_of(self->engine);
    bool cost = zs_engine_context(self->engine)->schedule.gathers_cost;
    return Py_BuildValue("nnN", (Py_ssize_t)keep_gathered.bytes, (Py_ssize_t)keep_gathered.reserved,
                         PyBool_FromLong(cost));
}
