/* py_guard.h - the classes of guarded slices, for the binding files that make them.
 */
#ifndef ZS_PY_GUARD_H
#define ZS_PY_GUARD_H

#include "python/py_unit.h"

/* Python's classes, from set_guard(); NULL before it. Owned references, for as long as the process lives. */
typedef struct zs_guard_types {
    PyTypeObject *tensor, *parameter;             /* torch.Tensor, torch.nn.Parameter */
    PyTypeObject *shard_tensor, *shard_parameter; /* what they are while they hold a slice */
} zs_guard_types;

extern zs_guard_types zs_py_guard_types;

/* Shows Python the parameters of the engine's units as what they are now: a guarded slice, or a plain parameter. With the
 * GIL; costs one comparison if nothing has changed. */
void zs_py_show(zs_engine *engine);

/* The unit's Python object dies. */
void zs_py_hide(unit_object *self);

/* Method of _core.Unit (METH_NOARGS), and its docstring. */
PyObject *zs_py_unit_guard(unit_object *self, PyObject *unused);
extern const char zs_py_unit_guard_doc[];

#endif
