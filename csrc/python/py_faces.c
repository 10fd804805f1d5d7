/* py_faces.c - the class of a sharded parameter: guarded while it is sharded, nearly torch's own while it is unsharded.
 *
 * Forward and backward should see plain parameters, as each operation on a guarded one takes a detour. So the class
 * follows the parameter's state: at once where Python runs anyway (hooks, methods), otherwise when the backward
 * ends. In between, the guard checks whether a parameter is unsharded (py_guard.c). */
#include "python/py_faces.h"

#include "engine/engine.h"
#include "engine/history.h"
#include "engine/writing.h"
#include "python/py_slices.h"

#include <string.h>

/* The first change of each object's class was checked; see guard_param. */
static void set_class(PyObject *object, PyTypeObject *from, PyTypeObject *to)
{
    if (Py_TYPE(object) != from) return;
    Py_INCREF(to);
    Py_SET_TYPE(object, to);
    Py_DECREF(from);
}

static void show_unit(zs_unit *unit)
{
    const zs_guard_types *types = &zs_py_guard_types;
    const unit_object *self = unit->py_owner;
    for (Py_ssize_t i = 0; i < self->n_places; i++) {
        if (unit->bound_full)
            set_class(self->places[i].param, types->shard_parameter, types->whole_parameter);
        else
            set_class(self->places[i].param, types->whole_parameter, types->shard_parameter);
    }
    zs_unit_note_class(unit);
}

void zs_py_show(zs_engine *engine)
{
    zs_context *context = zs_engine_context(engine);
    for (size_t i = 0; context->n_stale_classes > 0 && i < context->schedule.n; i++) {
        zs_unit *unit = zs_unit_of(context->schedule.records[i]);
        if (!zs_unit_class_is_current(unit)) show_unit(unit);
    }
}

PyObject *zs_py_shown(zs_engine *engine, zs_status status)
{
    zs_py_show(engine);
    return status == ZS_OK ? Py_NewRef(Py_None) : zs_py_raise(NULL);
}

/* At the end of a backward, which runs without the GIL. */
static void show_after_backward(zs_engine *engine)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    zs_py_show(engine);
    PyGILState_Release(gil);
}

void zs_py_hide(unit_object *self)
{
    if (self->unit->py_owner == self) zs_unit_set_py_owner(self->unit, NULL);
}

/* torch looks up this attribute of each tensor argument, unless the tensor is of one of torch's own classes. */
static const char asked[] = "__torch_function__";
static PyObject *answer; /* of nn.Parameter: torch calls nothing */

/* tp_getattr of unsharded parameters, which torch tries first; it saves the lookup. */
static PyObject *getattr_of_whole(PyObject *object, char *name)
{
    if (strcmp(name, asked) == 0) return Py_NewRef(answer);
    PyObject *key = PyUnicode_FromString(name);
    if (key == NULL) return NULL;
    PyObject *value = PyObject_GetAttr(object, key);
    Py_DECREF(key);
    return value;
}

/* Makes an operation on an unsharded parameter as cheap as on nn.Parameter. */
static int spare_questions(PyTypeObject *whole)
{
    if (whole->tp_getattr != NULL) return 0;
    answer = PyObject_GetAttrString((PyObject *)zs_py_guard_types.parameter, asked);
    if (answer == NULL) return -1;
    whole->tp_getattr = getattr_of_whole;
    return 0;
}

/* Python's own way for the first change: it refuses invalid ones, and gives the object a dict that does not depend
 * on its class. Parameters of other classes than torch's (quantized ones, for example) stay unchanged. */
static int guard_param(PyObject *param)
{
    const zs_guard_types *types = &zs_py_guard_types;
    if (Py_TYPE(param) != types->parameter) return 0;
    return PyObject_SetAttrString(param, "__class__", (PyObject *)types->shard_parameter);
}

const char zs_py_unit_guard_doc[] = PyDoc_STR(
    "guard($self, /)\n--\n\nFrom now on the parameters are of the guarded class while they are sharded. The unit must "
    "be sharded now.");

PyObject *zs_py_unit_guard(unit_object *self, PyObject *unused)
{
    (void)unused;
    if (spare_questions(zs_py_guard_types.whole_parameter) < 0) return NULL;
    for (Py_ssize_t i = 0; i < self->n_places; i++)
        if (guard_param(self->places[i].param) < 0) return NULL;
    zs_unit_set_py_owner(self->unit, self);
    zs_engine_on_stale_classes(show_after_backward);
    Py_RETURN_NONE;
}

const char zs_py_unit_watch_doc[] = PyDoc_STR(
    "watch($self, index, /)\n--\n\nA script is about to get the .data of a parameter. While the unit is unsharded, "
    "what it writes there is an error when the unit is resharded.");

PyObject *zs_py_unit_watch(unit_object *self, PyObject *index)
{
    Py_ssize_t i = PyNumber_AsSsize_t(index, PyExc_IndexError);
    if (i == -1 && PyErr_Occurred()) return NULL;
    if (i < 0 || i >= self->unit->n_params) return PyErr_Format(PyExc_IndexError, "parameter %zd is out of range", i);
    zs_clear_error();
    return zs_py_none(zs_unit_watch(self->unit, i));
}

const char zs_py_unit_note_write_doc[] = PyDoc_STR(
    "note_write($self, index, tensor, operation, /)\n--\n\nA script has written to `tensor`, this rank's slice of a "
    "parameter, of its gradient, or a copy of one, by an in-place operation of this name.");

/* Parses the arguments of a method about a tensor of parameter *i; 0 with an exception. `operation` may be NULL. */
static int parse_tensor(const unit_object *self, PyObject *args, Py_ssize_t *i, zs_tensor **tensor,
                        const char **operation)
{
    PyObject *object;
    const char *unused;
    if (!PyArg_ParseTuple(args, "nO|s", i, &object, operation != NULL ? operation : &unused)) return 0;
    if (*i < 0 || *i >= self->unit->n_params) {
        PyErr_Format(PyExc_IndexError, "parameter %zd is out of range", *i);
        return 0;
    }
    zs_clear_error();
    if (zs_py_tensor(object, tensor) == ZS_OK) return 1;
    zs_py_raise(NULL);
    return 0;
}

const char zs_py_unit_is_slice_doc[] = PyDoc_STR("is_slice($self, index, tensor, /)\n--\n\nWhether a tensor is this "
                                                 "rank's slice of the parameter itself, and not a copy "
                                                 "or a gradient.");

PyObject *zs_py_unit_is_slice(unit_object *self, PyObject *args)
{
    Py_ssize_t i;
    zs_tensor *tensor = NULL;
    if (!parse_tensor(self, args, &i, &tensor, NULL)) return NULL;
    bool own = zs_unit_is_slice(self->unit, i, tensor);
    zs_tensor_free(tensor);
    return PyBool_FromLong(own);
}

PyObject *zs_py_unit_note_write(unit_object *self, PyObject *args)
{
    Py_ssize_t i;
    const char *operation = "";
    zs_tensor *written = NULL;
    if (!parse_tensor(self, args, &i, &written, &operation)) return NULL;
    zs_unit_note_write(self->unit, i, written, operation);
    zs_tensor_free(written);
    Py_RETURN_NONE;
}

const char zs_py_unit_note_draw_doc[] =
    PyDoc_STR("note_draw($self, index, drawn, /)\n--\n\nA script has drawn random numbers for a parameter in place. "
              "drawn: a number that is the same on ranks that drew the same.");

PyObject *zs_py_unit_note_draw(unit_object *self, PyObject *args)
{
    Py_ssize_t i;
    unsigned long long drawn;
    if (!PyArg_ParseTuple(args, "nK", &i, &drawn)) return NULL;
    if (i < 0 || i >= self->unit->n_params) return PyErr_Format(PyExc_IndexError, "parameter %zd is out of range", i);
    zs_unit_note_draw(self->unit, i, drawn);
    Py_RETURN_NONE;
}

const char zs_py_unit_begin_write_doc[] = PyDoc_STR(
    "begin_write($self, index, tensor, /)\n--\n\nA script is about to write to `tensor` by an operation of its own: if "
    "that "
    "is this rank's slice of the parameter, wait until no other rank reads it. Returns whether end_write() is due.");

PyObject *zs_py_unit_begin_write(unit_object *self, PyObject *args)
{
    Py_ssize_t i;
    zs_tensor *target = NULL;
    if (!parse_tensor(self, args, &i, &target, NULL)) return NULL;
    bool own = zs_unit_is_slice(self->unit, i, target), begun = false;
    zs_tensor_free(target);
    zs_status status = ZS_OK;
    if (own) {
        Py_BEGIN_ALLOW_THREADS;
        status = zs_forward_write_begin(self->unit);
        ZS_THEN(status, zs_writing_by_hand(zs_engine_of(self->unit), &begun));
        Py_END_ALLOW_THREADS;
    }
    if (status != ZS_OK) return zs_py_raise(NULL);
    return PyBool_FromLong(begun);
}

const char zs_py_unit_end_write_doc[] = PyDoc_STR("end_write($self, /)\n--\n\nThe operation is over.");

PyObject *zs_py_unit_end_write(unit_object *self, PyObject *unused)
{
    (void)unused;
    zs_writing_by_hand_end(zs_engine_of(self->unit));
    Py_RETURN_NONE;
}
