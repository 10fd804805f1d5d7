/* tensor_py.h - the part of the interface to torch that uses PyObjects; only py_*.c and torch_shim.cpp include it. */
#ifndef ZS_TENSOR_PY_H
#define ZS_TENSOR_PY_H

#include <Python.h>

#include "base/profile.h"
#include "shim/tensor.h"

/* Torch's profiler. */
extern const zs_profiler zs_torch_profiler;

/* Is `object` a torch.Tensor (Parameters included)? */
bool zs_py_is_tensor(PyObject *object);

/* *new* handle to the tensor behind `object`; ZS_ERR_TYPE if it is not a tensor. */
zs_status zs_py_tensor(PyObject *object, zs_tensor **out);

/* *new* reference to the Python object of `tensor`; NULL with an exception set. */
PyObject *zs_py_wrap(const zs_tensor *tensor);

/* Writes the sizes of a tensor, at most ZS_MAX_DIM, and returns its number of dimensions; -1 if `object` is not a
 * tensor. */
int zs_py_sizes(PyObject *object, int64_t *sizes);

/* The block under a tensor, as zs_tensor_mem; NULL for other objects. */
zs_mem *zs_py_mem(PyObject *object);

/* Does this thread call __torch_function__ of subclasses? */
bool zs_py_is_asked(void);

/* Calls the attribute's getter or setter (`value` NULL: deletes it), with __torch_function__ of subclasses off. */
PyObject *zs_py_get_plain(PyObject *descriptor, PyObject *object);
int zs_py_set_plain(PyObject *descriptor, PyObject *object, PyObject *value);

/* *new* reference to operation(*args, **kwargs) with __torch_function__ of subclasses off; NULL with an exception. */
PyObject *zs_py_call_plain(PyObject *operation, PyObject *args, PyObject *kwargs);

/* Turns a failed hook into a Python exception: `raise` is called with the GIL and sets one from this thread's
 * record. */
void zs_py_set_raiser(void (*raise)(void));

/* Visits the graph that a backward from `roots` may run, each edge once. roots: the tuple of tensors, or of torch's
 * GradientEdges, that is passed to autograd's engine; other objects in it are ignored. */
zs_status zs_py_visit_graph(PyObject *roots, const zs_graph_visitor *visitor);

#endif
