/* py_guard.h - the guard's (py_guard.c) questions about reads and writes of shards. */
#ifndef ZS_PY_GUARD_H
#define ZS_PY_GUARD_H

#include "python/py_slices.h"
#include "unit/unit.h"

/* --- py_reads.c --------------------------------------------------------------------------------------------------- */

/* An operation computes with its arguments: within a forward of their model, unshards the units of those that are
 * sharded parameters, also in lists. `kwargs` may be NULL. -1 with an exception. */
int zs_py_read_operands(PyObject *args, PyObject *kwargs);

/* An operation writes to `target` in place: within a forward, reshards a unit that was unsharded for reads. -1 with
 * an exception. */
int zs_py_before_write(PyObject *target);

/* -1 with an exception. */
int zs_py_reads_init(void);

/* --- py_writes.c -------------------------------------------------------------------------------------------------- */

/* Records that an operation writes to `object`, if that is a shard; NULL allowed. -1 with an exception. */
int zs_py_note_written(PyObject *operation, PyObject *object);

/* Runs an operation that writes to `targets`: NULL, an object, or a list or tuple of them. `kwargs` may be NULL. */
PyObject *zs_py_run_writing(PyObject *operation, PyObject *args, PyObject *kwargs, PyObject *targets);

/* An operation reads gradients among its arguments, also in lists, and perhaps writes to them: multiplies them by
 * pending factors (device/pending.h). `kwargs` may be NULL. */
void zs_py_settle_gradients(PyObject *args, PyObject *kwargs, bool writes);

/* The unit that has shown this .grad, which is released; NULL: none. */
zs_unit *zs_py_unit_of(PyObject *grad);

/* -1 with an exception. */
int zs_py_writes_init(void);

#endif
