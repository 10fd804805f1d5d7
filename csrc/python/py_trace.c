/* py_trace.c - traces for zshard/extras/trace/, records for the log, and the numbers of model.metrics(). */
#include "base/log.h"
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

/* --- the log ------------------------------------------------------------------------------------------------------ */

static PyObject *log_level(PyObject *module, PyObject *level)
{
    (void)module;
    long value = PyLong_AsLong(level);
    if (value == -1 && PyErr_Occurred()) return NULL;
    zs_log_set_level((int)value);
    Py_RETURN_NONE;
}

/* -1 with an exception. */
static int append_record(PyObject *list, int level, const zs_log_record *record)
{
    PyObject *text = PyUnicode_DecodeUTF8(record->text, (Py_ssize_t)strlen(record->text), "replace");
    PyObject *entry =
        text == NULL ? NULL : Py_BuildValue("(iiLN)", level, (int)record->thread, (long long)record->time, text);
    int result = entry != NULL ? PyList_Append(list, entry) : -1;
    Py_XDECREF(entry);
    return result;
}

static PyObject *log_records(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    zs_log_record record;
    size_t lost;
    for (int n = 0; list != NULL && n < ZS_LOG_RECORDS && zs_log_waits() && zs_log_take(&record, &lost); n++) {
        zs_log_record missing = {.time = record.time, .thread = record.thread};
        snprintf(missing.text, sizeof missing.text, "the log has lost %zu records", lost);
        if ((lost > 0 && append_record(list, ZS_LOG_INFO, &missing) < 0) ||
            append_record(list, record.level, &record) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *log_forget(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    zs_log_forget();
    Py_RETURN_NONE;
}

void zs_py_drain_log(void)
{
    PyObject *type, *value, *trace;
    if (!zs_log_waits()) return;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *module = PyImport_ImportModule("zshard._logger");
    PyObject *done = module != NULL ? PyObject_CallMethod(module, "drain", NULL) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(done);
    if (done != NULL || PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Restore(type, value, trace);
        return;
    }
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
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
    {"log_level", log_level, METH_O, "log_level($module, level, /)\n--\n\nRecord for the log from this level on."},
    {"log_records", log_records, METH_NOARGS,
     "log_records($module, /)\n--\n\nTake what the core has recorded: (level, thread, time in ns, text) tuples."},
    {"log_forget", log_forget, METH_NOARGS,
     "log_forget($module, /)\n--\n\nStop recording, and drop all records: in a forked child."},
    {"pace", pace, METH_O,
     "pace($module, engine, /)\n--\n\nReturn what was counted between the model's last two optimizer steps, by the "
     "names of model.metrics(); empty if there were no two."},
    {0},
};

int zs_py_trace_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
