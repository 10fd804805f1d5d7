/* py_ckpt.h - shared by the bindings of checkpoint files: paths, errors that name them, ranges in memory. */
#ifndef ZS_PY_CKPT_H
#define ZS_PY_CKPT_H

#include "checkpoint/ckpt_file.h"
#include "python/py_util.h"

/* Raises this thread's failure; a failed system call becomes an OSError with errno, its text, and the files `path`
 * and `to` (may be NULL). Returns NULL. */
PyObject *zs_py_raise_at(PyObject *path, PyObject *to);

/* Ranges of a file, from a Python list [(offset, memory)] or, for writing, [(offset, memory, format of numbers)]. */
typedef struct zs_py_ranges {
    zs_ckpt_range *ranges;
    Py_buffer *views;
    PyObject *items; /* owned */
    size_t n;
} zs_py_ranges;

/* Fills `out`, which zs_py_ranges_free frees; -1 with an exception set. `writable`: for writing. */
int zs_py_ranges_get(PyObject *list, bool writable, zs_py_ranges *out);
void zs_py_ranges_free(zs_py_ranges *ranges);

/* Adds all functions except File; -1 with an exception set. */
int zs_py_ckpt_init(PyObject *module);

#endif
