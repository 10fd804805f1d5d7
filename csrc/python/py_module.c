/* py_module.c - the module zshard._core: multi-phase init, exception classes, and how errors become exceptions.
 *
 * Only this file creates Python exceptions, from the thread's zs_status record. */
#include "checkpoint/ckpt_file.h"
#include "python/py_util.h"
#include "shim/tensor_py.h"

/* For hooks that fail on an autograd thread, where no module is at hand. Borrowed; set while the module lives. */
static zs_py_state *live_state;

zs_py_state *zs_py_get_state(void)
{
    return live_state;
}

/* zshard.ShardError, which Python defines; if that fails its base, RuntimeError. Borrowed. */
static PyObject *shard_error(void)
{
    static PyObject *found;
    if (found == NULL) {
        PyObject *module = PyImport_ImportModule("zshard._errors");
        found = module != NULL ? PyObject_GetAttrString(module, "ShardError") : NULL;
        Py_XDECREF(module);
        PyErr_Clear();
    }
    return found != NULL ? found : PyExc_RuntimeError;
}

static PyObject *exception_for(zs_status status)
{
    switch (status) {
    case ZS_ERR_VALUE: return PyExc_ValueError;
    case ZS_ERR_TYPE: return PyExc_TypeError;
    case ZS_ERR_UNSUPPORTED: return PyExc_NotImplementedError;
    case ZS_ERR_MEMORY: return PyExc_MemoryError;
    case ZS_ERR_SYSTEM: return PyExc_OSError;
    case ZS_ERR_SHARD: return shard_error();
    case ZS_ERR_PEER: return live_state->peer_error;
    case ZS_ERR_TIMEOUT: return live_state->peer_timeout_error;
    case ZS_ERR_DIVERGED: return live_state->divergence_error;
    case ZS_ERR_CUDA: return live_state->cuda_error;
    case ZS_ERR_NCCL: return live_state->nccl_error;
    default: return PyExc_RuntimeError;
    }
}

/* *new*; NULL with an exception. A text that was truncated may end within a character. */
static PyObject *message_of_record(void)
{
    const char *message = zs_last_message(), *lines = zs_last_lines();
    PyObject *text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
    if (text == NULL || lines[0] == 0) return text;
    PyObject *more = PyUnicode_DecodeUTF8(lines, (Py_ssize_t)strlen(lines), "replace");
    PyUnicode_AppendAndDel(&text, more);
    return text;
}

PyObject *zs_py_raise(PyObject *module)
{
    (void)module;
    if (PyErr_Occurred()) {
        zs_clear_error();
        return NULL;
    }
    if (zs_last_status() == ZS_ERR_SYSTEM) {
        PyObject *args = Py_BuildValue("(is)", zs_last_errno(), zs_last_message());
        if (args != NULL) PyErr_SetObject(PyExc_OSError, args);
        Py_XDECREF(args);
    } else {
        PyObject *text = message_of_record();
        if (text != NULL) PyErr_SetObject(exception_for(zs_last_status()), text);
        Py_XDECREF(text);
    }
    zs_clear_error();
    zs_py_drain_log();
    return NULL;
}

static void raise_from_hook(void)
{
    zs_py_raise(NULL);
}

PyObject *zs_py_none(zs_status status)
{
    return status == ZS_OK ? Py_NewRef(Py_None) : zs_py_raise(NULL);
}

int zs_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL) return -1;
    *slot = (PyTypeObject *)type;
    return PyModule_AddType(module, *slot);
}

static int add_exception(PyObject *module, const char *name, const char *doc, PyObject *base, PyObject **slot)
{
    *slot = PyErr_NewExceptionWithDoc(name, doc, base, NULL);
    if (*slot == NULL) return -1;
    return PyModule_AddObjectRef(module, strrchr(name, '.') + 1, *slot);
}

static int add_exceptions(PyObject *module, zs_py_state *state)
{
    if (add_exception(module, "zshard.PeerError",
                      "Another rank exited, closed its connection or aborted; the message names the rank.",
                      PyExc_RuntimeError, &state->peer_error) < 0)
        return -1;
    PyObject *bases = PyTuple_Pack(2, state->peer_error, PyExc_TimeoutError);
    if (bases == NULL) return -1;
    int made = add_exception(module, "zshard.PeerTimeoutError",
                             "Timed out waiting for another rank; the message names the rank.", bases,
                             &state->peer_timeout_error);
    Py_DECREF(bases);
    if (made < 0) return -1;
    if (add_exception(module, "zshard.CudaError",
                      "The CUDA driver is missing, too old or returned an error, which the message gives.",
                      PyExc_RuntimeError, &state->cuda_error) < 0)
        return -1;
    if (add_exception(module, "zshard.DivergenceError",
                      "Ranks diverged: they ran different operations where they must all run the same.",
                      PyExc_RuntimeError, &state->divergence_error) < 0)
        return -1;
    return add_exception(module, "zshard.NcclError", "NCCL failed; the message gives the NCCL call and its error.",
                         PyExc_RuntimeError, &state->nccl_error);
}

static int module_exec(PyObject *module)
{
    zs_py_state *state = PyModule_GetState(module);
    if (live_state != NULL) {
        PyErr_SetString(PyExc_ImportError,
                        "zshard._core can be loaded only once per process: it registers global torch hooks");
        return -1;
    }
    if (add_exceptions(module, state) < 0 || zs_py_comm_init(module, state) < 0 ||
        zs_py_engine_init(module, state) < 0 || zs_py_unit_init(module, state) < 0 || zs_py_shards_init(module) < 0 ||
        zs_py_optim_init(module) < 0 || zs_py_norms_init(module) < 0 || zs_py_clip_init(module) < 0 ||
        zs_py_offload_init(module) < 0 || zs_py_nccl_init(module) < 0 || zs_py_guard_init(module) < 0 ||
        zs_py_cuda_init(module) < 0 || zs_py_files_init(module) < 0 || zs_py_forward_init(module) < 0 ||
        zs_py_script_init(module) < 0 || zs_py_trace_init(module) < 0 || zs_py_rows_init(module) < 0 ||
        zs_py_state_init(module) < 0 || zs_py_keep_init(module) < 0 || zs_py_average_init(module) < 0)
        return -1;
    live_state = state;
    zs_py_set_raiser(raise_from_hook);
    zs_comm_on_wait(zs_py_interrupted);
    zs_ckpt_on_wait(zs_py_interrupted);
    zs_profile_by(&zs_torch_profiler);
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    zs_py_state *state = PyModule_GetState(module);
    Py_VISIT(state->peer_error);
    Py_VISIT(state->peer_timeout_error);
    Py_VISIT(state->divergence_error);
    Py_VISIT(state->cuda_error);
    Py_VISIT(state->nccl_error);
    Py_VISIT(state->comm_type);
    Py_VISIT(state->engine_type);
    Py_VISIT(state->unit_type);
    return 0;
}

/* Without tp_clear: hooks in a graph that outlives the module at shutdown still raise these exceptions. */
static void module_free(void *module)
{
    zs_py_state *state = PyModule_GetState(module);
    if (live_state == state) live_state = NULL;
    Py_CLEAR(state->peer_error);
    Py_CLEAR(state->peer_timeout_error);
    Py_CLEAR(state->divergence_error);
    Py_CLEAR(state->cuda_error);
    Py_CLEAR(state->nccl_error);
    Py_CLEAR(state->comm_type);
    Py_CLEAR(state->engine_type);
    Py_CLEAR(state->unit_type);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "zshard._core",
    .m_doc = "The C core of zshard: units, transports, the training step and the optimizers.",
    .m_size = sizeof(zs_py_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void); /* the only function without a header: Python finds it by its name */
PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
