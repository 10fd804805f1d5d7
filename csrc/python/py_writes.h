/* py_writes.h - a script's in-place operations on shards, for the guard. */
#ifndef ZS_PY_WRITES_H
#define ZS_PY_WRITES_H

#include "python/py_slices.h"
#include "unit/unit.h"

/* Records that an operation writes to `object`, if that is a shard; NULL allowed. -1 with an exception. */
int zs_py_note_written(PyObject *operation, PyObject *object);

/* Runs an operation that writes to `targets`: NULL, an object, or a list or tuple of them. `kwargs` may be NULL. */
PyObject *zs_py_run_writing(PyObject *operation, PyObject *args, PyObject *kwargs, PyObject *targets);

/* An operation reads gradients among its arguments, also in lists, and perhaps writes to them: multiplies them by what
 * is pending (device/pending.h). `kwargs` may be NULL. */
void zs_py_settle_gradients(PyObject *args, PyObject *kwargs, bool writes);

/* The unit that has shown this .grad, which is released; NULL: none. */
zs_unit *zs_py_unit_of(PyObject *grad);

/* -1 with an exception. */
int zs_py_writes_init(void);

#endif
