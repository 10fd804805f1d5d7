/* py_faces.h - Python's view of the parameters of units: as guarded shards, or as plain parameters. */
#ifndef ZS_PY_FACES_H
#define ZS_PY_FACES_H

#include "python/py_unit.h"

/* Gives the parameters of the engine's units the Python class of their present state: guarded shard, or plain
 * parameter. With the GIL; costs one comparison if nothing has changed. */
void zs_py_show(zs_engine *engine);

/* For the end of a method that may have changed the state: updates the classes; *new* reference to None, or NULL
 * with an exception. */
PyObject *zs_py_shown(zs_engine *engine, zs_status status);

/* The unit's Python object is freed. */
void zs_py_hide(unit_object *self);

/* Method of _core.Unit (METH_NOARGS), and its docstring. */
PyObject *zs_py_unit_guard(unit_object *self, PyObject *unused);
extern const char zs_py_unit_guard_doc[];

/* Methods of _core.Unit (METH_O, METH_VARARGS) for zs_unit_watch and zs_unit_note_write, and their docstrings. */
PyObject *zs_py_unit_watch(unit_object *self, PyObject *index);
extern const char zs_py_unit_watch_doc[];
PyObject *zs_py_unit_note_write(unit_object *self, PyObject *args);
extern const char zs_py_unit_note_write_doc[];
PyObject *zs_py_unit_note_draw(unit_object *self, PyObject *args);
extern const char zs_py_unit_note_draw_doc[];

/* Method (METH_VARARGS) for zs_unit_is_slice, and its docstring. */
PyObject *zs_py_unit_is_slice(unit_object *self, PyObject *args);
extern const char zs_py_unit_is_slice_doc[];

/* Methods (METH_VARARGS, METH_NOARGS) for zs_writing_by_hand and its end, and their docstrings. */
PyObject *zs_py_unit_begin_write(unit_object *self, PyObject *args);
PyObject *zs_py_unit_end_write(unit_object *self, PyObject *unused);
extern const char zs_py_unit_begin_write_doc[], zs_py_unit_end_write_doc[];

#endif
