/* py_util.h - shared by the binding files: turns errors into exceptions, adds types to the module, gets handles of
 * objects. */
#ifndef ZS_PY_UTIL_H
#define ZS_PY_UTIL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/status.h"
#include "comm/comm.h"
#include "engine/engine.h"
#include "shim/tensor_py.h"
#include "unit/unit.h"

/* The module's state: its exception classes and types. The module owns all references. */
typedef struct zs_py_state {
    PyObject *peer_error, *peer_timeout_error, *divergence_error, *cuda_error, *nccl_error;
    PyTypeObject *comm_type, *engine_type, *unit_type;
} zs_py_state;

/* Borrowed state of the one module of this process (torch is process-global, so is zshard). */
zs_py_state *zs_py_get_state(void);

/* Turns this thread's record into a Python exception; returns NULL. Keeps an exception that is already set. `module`
 * may be NULL. */
PyObject *zs_py_raise(PyObject *module);

/* Has Python's logger take what the core has to say, if there is any. Keeps an exception that is set, unless Ctrl-C
 * or SystemExit interrupts that. */
void zs_py_drain_log(void);

/* Returns None; or NULL, with this thread's record as an exception. */
PyObject *zs_py_none(zs_status status);

/* Adds a heap type to `module` and stores it in *slot; -1 with an exception on failure. */
int zs_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot);

/* Each binding file adds its own; -1 with an exception on failure. */
int zs_py_comm_init(PyObject *module, zs_py_state *state);
int zs_py_engine_init(PyObject *module, zs_py_state *state);
int zs_py_unit_init(PyObject *module, zs_py_state *state);
int zs_py_forward_init(PyObject *module);
int zs_py_shards_init(PyObject *module);
int zs_py_guard_init(PyObject *module);
int zs_py_optim_init(PyObject *module);
int zs_py_average_init(PyObject *module);
int zs_py_norms_init(PyObject *module);
int zs_py_clip_init(PyObject *module);
int zs_py_offload_init(PyObject *module);
int zs_py_rows_init(PyObject *module);
int zs_py_state_init(PyObject *module);
int zs_py_keep_init(PyObject *module);
int zs_py_nccl_init(PyObject *module);
int zs_py_cuda_init(PyObject *module);
int zs_py_files_init(PyObject *module);
int zs_py_script_init(PyObject *module);
int zs_py_trace_init(PyObject *module);

/* Is this Python's main thread? */
bool zs_py_on_main_thread(void);

/* Called by waits, which run without the GIL: has Ctrl-C been pressed? On the main thread this sets its exception. */
bool zs_py_interrupted(void);

/* Makes waits on other threads notice Ctrl-C too. Call it on the main thread, or with the GIL. */
void zs_py_signals_watch(void);

/* A forward ends on this thread, which runs Python: the following backward ignores Ctrl-C pressed until now. */
void zs_py_signals_seen(void);

/* Borrowed handle behind a _core.Comm / Engine / Unit; NULL with TypeError. */
zs_comm *zs_py_comm(PyObject *object);
zs_engine *zs_py_engine(PyObject *object);
zs_unit *zs_py_unit(PyObject *object);
struct zs_optim *zs_py_plan(PyObject *object);

/* Methods of a _core.OptimPlan (py_keep.c). */
PyObject *zs_py_look_again(PyObject *self, PyObject *unused);
PyObject *zs_py_count(PyObject *self, PyObject *unused);
PyObject *zs_py_grad_files(PyObject *self, PyObject *unused);

/* The units (borrowed) of a Python list, in an array of `*n` that the caller frees; NULL with an exception set. */
zs_unit **zs_py_units(PyObject *list, size_t *n);

/* *new* _core.Engine around `engine` (adds a reference). */
PyObject *zs_py_engine_wrap(zs_engine *engine);

/* *new* tensor of Python for a handle that this frees. */
static inline PyObject *zs_py_wrap_new(zs_tensor *handle)
{
    PyObject *tensor = zs_py_wrap(handle);
    zs_tensor_free(handle);
    return tensor;
}

/* Runs `call` (an expression of type zs_status) without the GIL, into `status`. */
#define ZS_PY_NOGIL(status, call)      \
    do {                               \
        zs_clear_error();              \
        Py_BEGIN_ALLOW_THREADS(status) \
        = (call);                      \
        Py_END_ALLOW_THREADS           \
    } while (0)

#endif
