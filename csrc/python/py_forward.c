/* py_forward.c - the two hooks that nn.Module calls around a unit's forward, and the preparation of a backward.
 *
 * They are plain C methods bound to the unit, so a module's forward costs two C calls and no Python frame. A
 * backward is announced once, with its roots; its hooks are C all the way. */
#include "engine/engine.h"
#include "python/py_faces.h"
#include "python/py_slices.h"

/* Records which parameters are no longer at their places, in any module (`linear.bias = None`). */
static void note_removed(const unit_object *self)
{
    for (Py_ssize_t i = 0; i < self->n_places; i++)
        self->unit->params[self->places[i].index].removed = true;
    for (Py_ssize_t i = 0; i < self->n_places; i++) {
        const param_place *place = &self->places[i];
        bool here = PyDict_GetItemWithError(place->dict, place->key) == place->param;
        if (here) self->unit->params[place->index].removed = false;
    }
}

/* Does torch.func.functional_call() temporarily put this tensor in a parameter's place? Nothing else puts a tensor
 * there that is not an nn.Parameter. -1 with an exception. */
static int is_lent(PyObject *now)
{
    int is_parameter = PyObject_IsInstance(now, (PyObject *)zs_py_guard_types.parameter);
    return is_parameter < 0 ? -1 : !is_parameter;
}

/* Checks places: a module's parameter that was replaced by another object would train alone on each rank. */
static int check_places(unit_object *self)
{
    bool lacks = false;
    for (Py_ssize_t i = 0; i < self->n_places; i++) {
        const param_place *place = &self->places[i];
        PyObject *now = PyDict_GetItemWithError(place->dict, place->key);
        if (now == place->param) continue;
        if (now == NULL && PyErr_Occurred()) return -1;
        lacks = true;
        if (now == NULL || now == Py_None) continue;
        int lent = is_lent(now);
        if (lent < 0) return -1;
        if (lent) return 0;
        PyErr_Format(PyExc_ValueError,
                     "parameter '%s' of unit '%s' was replaced by another object after FSDP(...), so its values and "
                     "gradients would no longer be synchronized across ranks: write into the parameter instead (with "
                     "torch.no_grad(): p.copy_(...)), change the model before FSDP(...), or call it with other values "
                     "by torch.func.functional_call(), which takes tensors such as p.detach(), no nn.Parameter",
                     self->unit->params[place->index].name, zs_unit_label(self->unit->name));
        return -1;
    }
    if (lacks || self->lacks) note_removed(self);
    self->lacks = lacks;
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

/* A module that calls itself has one range, which ends with the inner call. */
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
    bool begins = zs_engine_n_open(zs_engine_of(self->unit)) == 0; /* a session, whose pass has one kind */
    bool training = begins && n > 0 && is_training(args[0]);
    if (begins && zs_py_list_buffers(self) < 0) return NULL;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_pre_forward(self->unit, training));
    zs_py_show(zs_engine_of(self->unit));
    if (status == ZS_OK && check_places(self) < 0) return NULL;
    return zs_py_none(status);
}

const char zs_py_post_forward_doc[] =
    PyDoc_STR("post_forward($self, module, args, output, /)\n--\n\nForward hook of the unit's module; also called if "
              "the forward raised, with output None.");

PyObject *zs_py_post_forward(unit_object *self, PyObject *const *args, Py_ssize_t n)
{
    (void)args, (void)n;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_post_forward(self->unit));
    zs_py_show(zs_engine_of(self->unit));
    zs_py_signals_seen();
    end_range(self);
    return zs_py_none(status);
}

const char zs_py_read_doc[] = PyDoc_STR(
    "read($self, operation, /)\n--\n\nAn operation makes values of the parameters: if a forward of the model runs on "
    "this thread, unshard them until it ends. operation: its number, the same for all that it reads. Over c10d, "
    "collective then.");

PyObject *zs_py_read(unit_object *self, PyObject *operation)
{
    zs_status status;
    unsigned long long number = PyLong_AsUnsignedLongLong(operation);
    if (PyErr_Occurred()) return NULL;
    ZS_PY_NOGIL(status, zs_engine_read(self->unit, number));
    return zs_py_shown(zs_engine_of(self->unit), status);
}

const char zs_py_unread_doc[] = PyDoc_STR("unread($self, /)\n--\n\nAn operation is about to write to the "
                                          "parameters: what read() alone has unsharded is "
                                          "sharded again, if a forward of the model runs on this thread.");

PyObject *zs_py_unread(unit_object *self, PyObject *unused)
{
    (void)unused;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_unread(self->unit));
    return zs_py_shown(zs_engine_of(self->unit), status);
}

static zs_status visit(void *roots, const zs_graph_visitor *visitor)
{
    return zs_py_visit_graph(roots, visitor);
}

static PyObject *before_backward(PyObject *module, PyObject *roots)
{
    (void)module;
    zs_clear_error();
    return zs_py_none(zs_entries_hook(visit, roots));
}

static PyMethodDef functions[] = {
    {"before_backward", before_backward, METH_O,
     "before_backward($module, roots, /)\n--\n\nHave the backward from these roots, the tuple that autograd's engine "
     "gets, unshard each unit where it comes to what a forward of the unit has recorded."},
    {0},
};

int zs_py_forward_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
