/* py_engine.h - the object behind _core.Engine, for the binding files that share it. */
#ifndef ZS_PY_ENGINE_H
#define ZS_PY_ENGINE_H

#include "python/py_util.h"

typedef struct engine_object {
    PyObject_HEAD
    zs_engine *engine; /* counted reference */
} engine_object;

/* Methods of py_plan.c. */
PyObject *zs_py_memory(engine_object *self, PyObject *unused);
PyObject *zs_py_peak(engine_object *self, PyObject *unused);
PyObject *zs_py_predict(engine_object *self, PyObject *stepped);
PyObject *zs_py_predict_seconds(engine_object *self, PyObject *list);
PyObject *zs_py_set_calls(engine_object *self, PyObject *list);
PyObject *zs_py_reserve(engine_object *self, PyObject *unused);

/* Their docstrings. */
extern const char zs_py_memory_doc[];
extern const char zs_py_peak_doc[];
extern const char zs_py_predict_doc[];
extern const char zs_py_predict_seconds_doc[];
extern const char zs_py_set_calls_doc[];
extern const char zs_py_reserve_doc[];

#endif
