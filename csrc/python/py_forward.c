/* py_forward.c - the two hooks that nn.Module calls around a unit's forward.
 *
 * The one idea: they are plain C methods bound to the unit, so a module's forward pays two C calls and no Python frame.
 * Backward needs nothing from here: its hooks are C all the way.
 */
#include "python/py_aliases.h"
#include "python/py_faces.h"

enum { MAX_OUTPUT_DEPTH = 8 }; /* nesting of containers in a forward's output that is searched for tensors */

/* A module's parameter that was replaced by another object would train alone on each rank. */
static int check_places(const unit_object *self)
{
    for (Py_ssize_t i = 0; i < self->n_places; i++) {
        const param_place *place = &self->places[i];
        PyObject *now = PyDict_GetItemWithError(place->dict, place->key);
        if (now == place->param) continue;
        if (now == NULL && PyErr_Occurred()) return -1;
        const char *name = self->unit->params[place->index].name;
        PyErr_Format(PyExc_ValueError,
                     "parameter '%s' of unit '%s' was %s after FSDP(...), so its values and gradients would no longer "
                     "be synchronized across ranks: write into the parameter instead (with torch.no_grad(): "
                     "p.copy_(...)), or change the model before FSDP(...)",
                     name, zs_unit_label(self->unit->name), now == NULL ? "removed" : "replaced by another object");
        return -1;
    }
    return 0;
}

const char zs_py_pre_forward_doc[] =
    PyDoc_STR("pre_forward($self, module, args, /)\n--\n\nForward pre-hook of the unit's module.");

/* Is the module in training mode? */
static bool is_training(PyObject *module)
{
    PyObject *training = PyObject_GetAttrString(module, "training");
    if (training == NULL) PyErr_Clear();
    bool result = training == NULL || training == Py_True;
    Py_XDECREF(training);
    return result;
}

/* Are passes of the unit to find its parameters in their own dtype now? */
static bool is_exact(const unit_object *self)
{
    PyObject *module = self->module != NULL ? PyObject_CallNoArgs(self->module) : NULL;
    if (module == NULL) PyErr_Clear();
    bool exact = module != NULL && module != Py_None && !is_training(module);
    Py_XDECREF(module);
    return exact;
}

/* A module that calls itself has one range, which ends with the call within. */
static void begin_range(unit_object *self)
{
    if (self->forward == NULL) self->forward = zs_unit_profile(self->unit, "forward");
}

static void end_range(unit_object *self)
{
    zs_profile_end(self->forward);
    self->forward = NULL;
}

PyObject *zs_py_pre_forward(unit_object *self, PyObject *const *args, Py_ssize_t n)
{
    begin_range(self);
    bool begins = zs_engine_n_open(zs_engine_of(self->unit)) == 0; /* a session, whose pass is of one kind */
    bool training = begins && n > 0 && is_training(args[0]);
    if (begins && zs_py_keep_aliases(zs_engine_of(self->unit)) < 0) return NULL;
    if (begins && zs_py_list_buffers(self) < 0) return NULL;
    zs_status status;
    bool exact = is_exact(self);
    ZS_PY_NOGIL(status, zs_engine_pre_forward(self->unit, training, exact));
    zs_py_show(zs_engine_of(self->unit));
    if (status == ZS_OK && check_places(self) < 0) return NULL;
    if (status != ZS_OK) return zs_py_raise(NULL);
    Py_RETURN_NONE;
}

typedef struct output_walk {
    zs_hook hook;
    int64_t since;  /* nodes that are older were passed through: their backward needs nothing of this unit */
    bool hooked;    /* an output with history was found */
    PyObject *seen; /* containers within the output -> how deep they were found first, and themselves: a result may hold
                     * itself; NULL: none yet */
} output_walk;

static int hook_outputs(output_walk *walk, PyObject *object, int depth);

static int hook_values(output_walk *walk, PyObject *dict, int depth)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict, &at, &key, &value))
        if (hook_outputs(walk, value, depth + 1) < 0) return -1;
    return 0;
}

/* Dataclasses and plain result objects: their attributes. Modules and classes are no results. */
static int hook_attributes(output_walk *walk, PyObject *object, int depth)
{
    if (PyType_Check(object) || PyCallable_Check(object)) return 0;
    PyObject *dict = PyObject_GetAttrString(object, "__dict__");
    if (dict == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1; /* Ctrl-C is nobody's lack of attributes */
        PyErr_Clear();
        return 0;
    }
    int result = PyDict_Check(dict) ? hook_values(walk, dict, depth) : 0;
    Py_DECREF(dict);
    return result;
}

/* Was the container searched already, from no deeper? Notes that it is now; -1 with an exception. */
static int is_known(output_walk *walk, PyObject *object, int depth)
{
    if (depth == 0) return 0;
    if (walk->seen == NULL && (walk->seen = PyDict_New()) == NULL) return -1;
    PyObject *key = PyLong_FromVoidPtr(object);
    if (key == NULL) return -1;
    int known = -1;
    PyObject *found = PyDict_GetItemWithError(walk->seen, key);
    if (found != NULL && PyLong_AsLong(PyTuple_GET_ITEM(found, 0)) <= depth) {
        known = 1;
    } else if (found != NULL || !PyErr_Occurred()) {
        PyObject *entry = Py_BuildValue("(iO)", depth, object); /* keeps it: nobody else gets its address meanwhile */
        if (entry != NULL && PyDict_SetItem(walk->seen, key, entry) == 0) known = 0;
        Py_XDECREF(entry);
    }
    Py_DECREF(key);
    return known;
}

static int hook_container(output_walk *walk, PyObject *object, int depth)
{
    int known = is_known(walk, object, depth);
    if (known != 0) return known < 0 ? -1 : 0;
    if (PyDict_Check(object)) return hook_values(walk, object, depth);
    if (!PyTuple_Check(object) && !PyList_Check(object)) return hook_attributes(walk, object, depth);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); i++)
        if (hook_outputs(walk, PySequence_Fast_GET_ITEM(object, i), depth + 1) < 0) return -1;
    return 0;
}

static int hook_outputs(output_walk *walk, PyObject *object, int depth)
{
    if (object == Py_None || depth > MAX_OUTPUT_DEPTH) return 0;
    if (zs_py_is_tensor(object)) {
        bool hooked = false;
        zs_clear_error();
        if (zs_py_hook_before_backward(object, &walk->hook, walk->since, &hooked) != ZS_OK) {
            zs_py_raise(NULL);
            return -1;
        }
        walk->hooked |= hooked;
        return 0;
    }
    if (PyUnicode_Check(object) || PyLong_Check(object) || PyFloat_Check(object)) return 0;
    return hook_container(walk, object, depth);
}

const char zs_py_post_forward_doc[] =
    PyDoc_STR("post_forward($self, module, args, output, /)\n--\n\nForward hook of the unit's module; also called if "
              "the forward raised, with output None.");

PyObject *zs_py_post_forward(unit_object *self, PyObject *const *args, Py_ssize_t n)
{
    output_walk walk = {.hook = zs_engine_backward_hook(self->unit), .since = self->unit->record.span.begun};
    int searched = zs_grad_mode() && n > 2 ? hook_outputs(&walk, args[2], 0) : 0;
    Py_CLEAR(walk.seen);
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_post_forward(self->unit, walk.hooked)); /* in any case: the forward is over */
    zs_py_show(zs_engine_of(self->unit));
    zs_py_signals_seen();
    end_range(self);
    if (searched < 0) return NULL;
    if (status != ZS_OK) return zs_py_raise(NULL);
    Py_RETURN_NONE;
}
