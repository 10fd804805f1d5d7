/* py_slices.h - what of Python's objects is a guarded slice, and of what.
 *
 * A parameter is found in a table by its address, all else that is guarded carries its Part with it.
 */
#ifndef ZS_PY_SLICES_H
#define ZS_PY_SLICES_H

#include <Python.h>

#include <stdbool.h>

/* Python's classes, from set_guard(); NULL before it. Owned references, for as long as the process lives. */
typedef struct zs_guard_types {
    PyTypeObject *tensor, *parameter;             /* torch.Tensor, torch.nn.Parameter */
    PyTypeObject *shard_tensor, *shard_parameter; /* what they are while they hold a slice */
    PyTypeObject *whole_parameter;                /* what a sharded parameter is while it is whole */
} zs_guard_types;

extern zs_guard_types zs_py_guard_types;

/* A tensor that takes part in an operation. */
typedef struct zs_operand {
    PyObject *object; /* borrowed */
    PyObject *part;   /* what it is a slice of; NULL: it is no slice; borrowed from the object, or from the table */
    PyObject *shape;  /* the Part's geometry: (whole shape, own shape, ...); one object for the same elements */
} zs_operand;

/* The shape of the whole tensor. */
static inline PyObject *zs_py_whole_shape(const zs_operand *slice)
{
    return PyTuple_GET_ITEM(slice->shape, 0);
}

/* The shape of the slice. */
static inline PyObject *zs_py_own_shape(const zs_operand *slice)
{
    return PyTuple_GET_ITEM(slice->shape, 1);
}

/* Sets the table of parameters, a dict that others keep up to date. */
void zs_py_set_parts(PyObject *parts);

/* The Part of a parameter of the guarded class, sharded or not; borrowed; NULL: it is something else, or a copy; or
 * an exception. */
PyObject *zs_py_part_of_param(PyObject *object);

/* Is it of a guarded class? */
bool zs_py_is_guarded(PyObject *object);

/* Has the tensor this shape, a tuple? */
bool zs_py_has_shape(PyObject *tensor, PyObject *shape);

/* A Part's geometry, borrowed; NULL with an exception. */
PyObject *zs_py_geometry(PyObject *part);

/* What `object`, a tensor, is in an operation; -1 with an exception. */
int zs_py_look_at(PyObject *object, zs_operand *out);

/* The Part that an object is a slice of, borrowed; NULL: of none. -1 with an exception. */
int zs_py_slice_part(PyObject *object, PyObject **part);

/* -1 with an exception. */
int zs_py_slices_init(void);

#endif
