/* py_trace.c - traces for zshard/extras/trace/, and the numbers of model.metrics(). */
#include "base/profile.h"
#include "engine/engine.h"
#include "python/py_engine.h"
#include "python/py_util.h"

static PyObject *trace_start(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyBool_FromLong(zs_profile_start());
}

/* Appends a range; -1 with an exception. */
static int append(PyObject *list, const zs_profile *range)
{
    PyObject *name = PyUnicode_DecodeUTF8(range->name, (Py_ssize_t)strlen(range->name), "replace");
    PyObject *entry = name == NULL ? NULL
                                   : Py_BuildValue("(NiLL)", name, (int)range->thread, (long long)range->begun,
                                                   (long long)range->ended);
    int result = entry != NULL ? PyList_Append(list, entry) : -1;
    Py_XDECREF(entry);
    return result;
}

static PyObject *trace_stop(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    size_t lost;
    PyObject *list = PyList_New(0);
    for (zs_profile *range = zs_profile_stop(&lost), *next; range != NULL; range = next) {
        if (list != NULL && append(list, range) < 0) Py_CLEAR(list);
        next = range->next;
        free(range);
    }
    return list != NULL ? Py_BuildValue("(Nn)", list, (Py_ssize_t)lost) : NULL;
}

static PyObject *trace_add(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name;
    long long begun;
    if (!PyArg_ParseTuple(args, "sL:trace_add", &name, &begun)) return NULL;
    zs_profile_add(name, begun);
    Py_RETURN_NONE;
}

static PyObject *pace(PyObject *module, PyObject *object)
{
    (void)module;
    zs_engine *engine = zs_py_engine(object);
    if (engine == NULL) return NULL;
    zs_counts found;
    if (!zs_engine_pace(engine, &found)) return PyDict_New();
    const int64_t *all = found.traffic.all, *afar = found.traffic.other_hosts;
    return Py_BuildValue("{sdsdsdsdsdsd}", "seconds/step", (double)found.time / 1e9, "seconds/wait",
                         (double)found.waited / 1e9, "bytes/gather", (double)all[ZS_TRAFFIC_GATHER], "bytes/reduce",
                         (double)all[ZS_TRAFFIC_REDUCE], "bytes/gather_other_hosts", (double)afar[ZS_TRAFFIC_GATHER],
                         "bytes/reduce_other_hosts", (double)afar[ZS_TRAFFIC_REDUCE]);
}

static PyMethodDef functions[] = {
    {"trace_start", trace_start, METH_NOARGS, "trace_start($module, /)\n--\n\nStart to record ranges."},
    {"trace_stop", trace_stop, METH_NOARGS, "trace_stop($module, /)\n--\n\nStop the trace."},
    {"trace_add", trace_add, METH_VARARGS,
     "trace_add($module, name, begun, /)\n--\n\nAdd a range that began at `begun`, a result of time.monotonic_ns(), "
     "and ends now."},
    {"pace", pace, METH_O,
     "pace($module, engine, /)\n--\n\nReturn what was counted between the model's last two optimizer steps, by the "
     "names of model.metrics(); empty if there were no two."},
    {0},
};

int zs_py_trace_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
