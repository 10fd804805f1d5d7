/* py_in_backward.c - the stepper of a unit (in_backward.h) that calls Python.
 *
 * A unit lives as long as its parameters, and Python's optimizer refers to those: the unit must not hold anything
 * that leads back to it, or neither would ever be freed. So it holds a weak reference, which is called to get the
 * method. */
#include "python/py_unit.h"

#include "reduce/in_backward.h"

#include <stdlib.h>

typedef struct python_stepper {
    PyObject *weak;   /* weakref.WeakMethod of a method (index); owned reference */
    Py_ssize_t index; /* its argument: this unit's number */
} python_stepper;

static zs_status call(const python_stepper *stepper, Py_ssize_t index)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = NULL, *method = NULL;
    if (!PyErr_Occurred()) method = PyObject_CallNoArgs(stepper->weak); /* after an exception no script's code runs */
    if (method == Py_None)
        PyErr_SetString(PyExc_RuntimeError,
                        "optimizer_in_backward(): the model that it was called on was deleted, but some of its modules "
                        "are still trained; call optimizer_in_backward() on those");
    else if (method != NULL)
        result = PyObject_CallFunction(method, "n", index);
    bool good = result != NULL;
    Py_XDECREF(method);
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return good ? ZS_OK : ZS_FAIL(ZS_ERR_TORCH, "a Python exception was raised");
}

static zs_status step(void *ctx)
{
    const python_stepper *stepper = ctx;
    return call(stepper, stepper->index);
}

/* Special values of the index; zshard/optim/in_backward.py has the same. */
enum { OVER = -1, BEGIN = -2 };

static zs_status begin(void *ctx)
{
    return call(ctx, BEGIN);
}

static zs_status over(void *ctx)
{
    return call(ctx, OVER);
}

static void release(void *ctx)
{
    python_stepper *stepper = ctx;
    if (Py_IsInitialized()) { /* units may outlive Python */
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF(stepper->weak);
        PyGILState_Release(gil);
    }
    free(stepper);
}

const char zs_py_step_in_backward_doc[] =
    PyDoc_STR("step_in_backward($self, method, index, params, /)\n--\n\nCall method()(index) in each backward once the "
              "gradients of `params`, a set of indices, are reduced: it steps these parameters, and their .grad is "
              "None afterwards. method: a weakref.WeakMethod. For the unit of index 0, also call method()(-2) at the "
              "start and method()(-1) at the end of each backward.");

PyObject *zs_py_step_in_backward(unit_object *self, PyObject *args)
{
    PyObject *method, *params;
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "OnO!:step_in_backward", &method, &index, &PySet_Type, &params)) return NULL;
    zs_unit *unit = self->unit;
    bool *stepped = calloc((size_t)unit->n_params + 1, sizeof *stepped);
    python_stepper *ctx = malloc(sizeof *ctx);
    bool good = stepped != NULL && ctx != NULL;
    if (!good) PyErr_NoMemory();
    for (Py_ssize_t i = 0; good && i < unit->n_params; i++) {
        PyObject *number = PyLong_FromSsize_t(i);
        int found = number != NULL ? PySet_Contains(params, number) : -1;
        Py_XDECREF(number);
        good = found >= 0;
        stepped[i] = found > 0;
    }
    if (!good) {
        free(ctx);
        free(stepped);
        return NULL;
    }
    *ctx = (python_stepper){Py_NewRef(method), index};
    zs_stepper stepper = {.step = step, .release = release, .ctx = ctx};
    if (index == 0) {
        stepper.begin = begin;
        stepper.over = over;
    }
    zs_clear_error();
    zs_status status = zs_in_backward_attach(unit, &stepper, stepped);
    free(stepped);
    return zs_py_none(status);
}

const char zs_py_step_by_hand_doc[] = PyDoc_STR("step_by_hand($self, /)\n--\n\nUndo step_in_backward().");

PyObject *zs_py_step_by_hand(unit_object *self, PyObject *unused)
{
    (void)unused;
    if (zs_in_backward())
        return PyErr_Format(PyExc_RuntimeError, "remove() cannot be called during a backward; call it after");
    zs_in_backward_detach(self->unit);
    Py_RETURN_NONE;
}
