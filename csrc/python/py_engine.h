/* py_engine.h - the object behind _core.Engine, for the binding files that share it. */
#ifndef ZS_PY_ENGINE_H
#define ZS_PY_ENGINE_H

#include "python/py_util.h"

typedef struct engine_object {
    PyObject_HEAD
    zs_engine *engine; /* counted reference */
} engine_object;

/* Methods of py_plan.c, and their docstrings. */
PyObject *zs_py_memory(engine_object *self, PyObject *unused);
PyObject *zs_py_peak(engine_object *self, PyObject *unused);
PyObject *zs_py_predict(engine_object *self, PyObject *stepped);
PyObject *zs_py_predict_events(engine_object *self, PyObject *unused);
PyObject *zs_py_predict_mappings(engine_object *self, PyObject *unused);
PyObject *zs_py_set_calls(engine_object *self, PyObject *list);
PyObject *zs_py_reserve(engine_object *self, PyObject *unused);
PyObject *zs_py_keep_gathered(engine_object *self, PyObject *bytes);
PyObject *zs_py_kept(engine_object *self, PyObject *unused);
extern const char zs_py_memory_doc[];
extern const char zs_py_peak_doc[];
extern const char zs_py_predict_doc[];
extern const char zs_py_predict_events_doc[];
extern const char zs_py_predict_mappings_doc[];
extern const char zs_py_set_calls_doc[];
extern const char zs_py_reserve_doc[];
extern const char zs_py_keep_gathered_doc[];
extern const char zs_py_kept_doc[];

/* Methods of py_buffers.c, and their docstrings. */
PyObject *zs_py_sync_buffers(engine_object *self, PyObject *args);
PyObject *zs_py_broadcast_buffers(engine_object *self, PyObject *unused);
extern const char zs_py_sync_buffers_doc[];
extern const char zs_py_broadcast_buffers_doc[];

/* Methods of py_leaves.c, and their docstrings. */
PyObject *zs_py_add_leaves(engine_object *self, PyObject *number);
PyObject *zs_py_leaves(engine_object *self, PyObject *unused);
PyObject *zs_py_begin_leaf(engine_object *self, PyObject *unused);
PyObject *zs_py_leaf_is_done(engine_object *self, PyObject *unused);
PyObject *zs_py_restart_step(engine_object *self, PyObject *unused);
extern const char zs_py_add_leaves_doc[];
extern const char zs_py_leaves_doc[];
extern const char zs_py_begin_leaf_doc[];
extern const char zs_py_leaf_is_done_doc[];
extern const char zs_py_restart_step_doc[];

#endif
