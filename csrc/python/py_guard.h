/* py_guard.h - the classes of guarded slices, for the binding files that make them.
 */
#ifndef ZS_PY_GUARD_H
#define ZS_PY_GUARD_H

#include <Python.h>

/* Python's classes, from set_guard(); NULL before it. Owned references, for as long as the process lives. */
typedef struct zs_guard_types {
    PyTypeObject *tensor, *parameter;             /* torch.Tensor, torch.nn.Parameter */
    PyTypeObject *shard_tensor, *shard_parameter; /* what they are while they hold a slice */
    PyTypeObject *whole_parameter;                /* what a sharded parameter is while it is whole */
} zs_guard_types;

extern zs_guard_types zs_py_guard_types;

#endif
