/* py_unit.h - the object behind _core.Unit, for the binding files that share it. */
#ifndef ZS_PY_UNIT_H
#define ZS_PY_UNIT_H

#include "base/profile.h"
#include "python/py_util.h"

/* A parameter's place in a module. */
typedef struct param_place {
    PyObject *dict;  /* the module's _parameters; owned reference */
    PyObject *key;   /* owned reference */
    PyObject *param; /* the parameter at wrap time; owned reference */
    int64_t index;   /* of the parameter in the unit */
} param_place;

typedef struct unit_object {
    PyObject_HEAD
    zs_unit *unit;       /* counted reference */
    param_place *places; /* [n_places] owned */
    Py_ssize_t n_places;
    bool lacks;        /* a place was empty when a forward last began */
    PyObject *buffers; /* called when a pass begins, to set the buffers that the engine broadcasts; NULL: none; owned */
    zs_profile *forward; /* the range that a profiler shows for the running one; NULL: none; owned */
} unit_object;

/* Methods of _core.Unit that nn.Module calls around a forward (METH_FASTCALL). */
PyObject *zs_py_pre_forward(unit_object *self, PyObject *const *args, Py_ssize_t n);
PyObject *zs_py_post_forward(unit_object *self, PyObject *const *args, Py_ssize_t n);

/* Methods of _core.Unit (METH_O, METH_NOARGS) for operations within a forward of the model. */
PyObject *zs_py_read(unit_object *self, PyObject *operation);
PyObject *zs_py_unread(unit_object *self, PyObject *unused);

/* Their docstrings. */
extern const char zs_py_pre_forward_doc[], zs_py_post_forward_doc[], zs_py_read_doc[], zs_py_unread_doc[];

/* Methods of _core.Unit that turn its step in backward on (METH_VARARGS) or off (METH_NOARGS). */
PyObject *zs_py_step_in_backward(unit_object *self, PyObject *args);
PyObject *zs_py_step_by_hand(unit_object *self, PyObject *unused);

/* Their docstrings. */
extern const char zs_py_step_in_backward_doc[];
extern const char zs_py_step_by_hand_doc[];

/* *new* dict that describes a parameter: name, unit, full shape, begin and numel of this rank's shard. */
PyObject *zs_py_describe_param(const zs_unit *unit, const zs_param *param);

/* Method of _core.Unit (METH_VARARGS) that sets what to prefetch, and its docstring. */
PyObject *zs_py_unit_prefetch(unit_object *self, PyObject *args);
extern const char zs_py_unit_prefetch_doc[];

/* Calls `buffers`; -1 with an exception. */
int zs_py_list_buffers(const unit_object *self);

/* The attributes of the type. */
extern PyGetSetDef zs_py_unit_getset[];

/* The strategy called `text`; -1 with an exception. */
int zs_py_parse_strategy(const char *text, zs_strategy *out);

#endif
