/* py_reads.h - operations on sharded parameters within a forward of their model, for the guard.
 */
#ifndef ZS_PY_READS_H
#define ZS_PY_READS_H

#include "python/py_slices.h"

/* An operation computes with its arguments: within a forward of their model, unshards the units of those that are
 * sharded parameters, also in lists. `kwargs` may be NULL. -1 with an exception. */
int zs_py_read_operands(PyObject *args, PyObject *kwargs);

/* An operation writes to `target` in place: within a forward, reshards a unit that was unsharded for reads. -1 with
 * an exception. */
int zs_py_before_write(PyObject *target);

/* -1 with an exception. */
int zs_py_reads_init(void);

#endif
