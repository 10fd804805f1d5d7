/* py_slices.h - recognizes Python objects that are guarded shards, and finds their tensors.
 *
 * A parameter is found in a table by its address; other guarded objects carry their Part with them. */
#ifndef ZS_PY_SLICES_H
#define ZS_PY_SLICES_H

#include <Python.h>

#include <stdbool.h>

/* Python's classes, from set_guard(); NULL before it. Owned references, until the process exits. */
typedef struct zs_guard_types {
    PyTypeObject *tensor, *parameter;             /* torch.Tensor, torch.nn.Parameter */
    PyTypeObject *shard_tensor, *shard_parameter; /* their classes while they hold a shard */
    PyTypeObject *whole_parameter;                /* a sharded parameter's class while it is unsharded */
} zs_guard_types;

extern zs_guard_types zs_py_guard_types;

/* A tensor that takes part in an operation. */
typedef struct zs_operand {
    PyObject *object; /* borrowed */
    PyObject *
        part; /* the Part that it is a shard of; NULL: it is not a shard; borrowed from the object, or from the table */
    PyObject *shape; /* the Part's geometry: (full shape, own shape, ...); one object for the same elements */
} zs_operand;

/* The shape of the full tensor. */
static inline PyObject *zs_py_whole_shape(const zs_operand *slice)
{
    return PyTuple_GET_ITEM(slice->shape, 0);
}

/* The shape of the shard. */
static inline PyObject *zs_py_own_shape(const zs_operand *slice)
{
    return PyTuple_GET_ITEM(slice->shape, 1);
}

/* Sets the table of parameters, a dict that others keep current. */
void zs_py_set_parts(PyObject *parts);

/* The Part of a parameter of the guarded class, sharded or not; borrowed; NULL: it is something else, or a copy; or
 * an exception. */
PyObject *zs_py_part_of_param(PyObject *object);

/* Is it of a guarded class? */
bool zs_py_is_guarded(PyObject *object);

/* Does the tensor have this shape, a tuple? */
bool zs_py_has_shape(PyObject *tensor, PyObject *shape);

/* A Part's geometry, borrowed; NULL with an exception. */
PyObject *zs_py_geometry(PyObject *part);

/* Describes `object`, a tensor, as an operand; -1 with an exception. */
int zs_py_look_at(PyObject *object, zs_operand *out);

/* The Part that an object is a shard of, borrowed; NULL: not a shard. -1 with an exception. */
int zs_py_slice_part(PyObject *object, PyObject **part);

/* -1 with an exception. */
int zs_py_slices_init(void);

#endif
