/* py_clip.c - the norm of sharded gradients on the CPU, and their clipping, for Python.
 *
 * Neither needs a pass over the gradients where a call names all of a flat's: the sums over the ranks have also given
 * the squares (reduce/squares.h), and the step multiplies by the factor (device/pending.h). */
#include "python/py_util.h"

#include <math.h>
#include <stdlib.h>

#include "device/pending.h"
#include "optim/optim.h"
#include "pager/pager.h"
#include "reduce/chosen.h"
#include "reduce/squares.h"

/* The list of a call: its gradients, flat by flat. */
typedef struct grad_list {
    PyObject *objects; /* borrowed */
    zs_chosen chosen;
    int64_t *at; /* [len(objects)] each one's flat; owned */
} grad_list;

static void free_list(grad_list *list)
{
    zs_chosen_free(&list->chosen);
    PyMem_Free(list->at);
}

static zs_status find_flats(PyObject *objects, grad_list *list)
{
    const Py_ssize_t n = PyList_GET_SIZE(objects);
    *list = (grad_list){.objects = objects, .at = PyMem_Calloc((size_t)n + 1, sizeof *list->at)};
    if (list->at == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for a list of gradients");
    for (Py_ssize_t i = 0; i < n; i++) {
        zs_tensor *grad;
        ZS_TRY(zs_py_tensor(PyList_GET_ITEM(objects, i), &grad));
        zs_status status = zs_chosen_add(&list->chosen, grad, &list->at[i]);
        zs_tensor_free(grad);
        ZS_TRY(status);
    }
    return ZS_OK;
}

/* --- norms -------------------------------------------------------------------------------------------------------- */

static zs_status square_memory(zs_numbers *numbers, zs_exact *sum)
{
    const size_t bytes = (size_t)numbers->numel * zs_dtype_size(numbers->dtype);
    ZS_TRY(zs_pager_want(numbers->data, bytes, ZS_PAGER_READ));
    zs_cpu_squares(numbers, sum);
    zs_pager_done(numbers->data, bytes);
    return ZS_OK;
}

/* The elements as they lie in memory, without the factor that waits for them. `caller`: the function, for messages. */
static zs_status square_elements(const zs_tensor *tensor, const char *caller, zs_exact *sum)
{
    zs_tensor_info info;
    zs_numbers numbers = {0};
    ZS_TRY(zs_tensor_describe(tensor, &info));
    if (info.where.type != ZS_ON_CPU || !info.contiguous || info.dtype == ZS_BYTES)
        return ZS_FAIL(ZS_ERR_TYPE, "%s() expects contiguous floating-point tensors on the CPU", caller);
    if (info.numel == 0) return ZS_OK;
    ZS_TRY(zs_tensor_data(tensor, &numbers.data));
    numbers.numel = info.numel;
    numbers.dtype = info.dtype;
    return square_memory(&numbers, sum);
}

static zs_status square_tensor(PyObject *object, zs_exact *sum)
{
    zs_tensor *tensor;
    ZS_TRY(zs_py_tensor(object, &tensor));
    zs_pending_settle(zs_tensor_mem(tensor));
    zs_status status = square_elements(tensor, "squares", sum);
    zs_tensor_free(tensor);
    return status;
}

/* Adds the known sums of flats, and reads the other tensors. */
static zs_status add_squares(grad_list *list, zs_exact *sum)
{
    for (int64_t k = 0; k < list->chosen.n; k++) {
        zs_chosen_flat *chosen = &list->chosen.flats[k];
        chosen->done = zs_chosen_is_squared(chosen);
        if (chosen->done) zs_squares_add(&chosen->unit->flats[chosen->flat], sum);
        ZS_TRY(zs_squares_ask(&chosen->unit->flats[chosen->flat]));
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list->objects); i++) {
        bool done = list->at[i] >= 0 && list->chosen.flats[list->at[i]].done;
        if (!done) ZS_TRY(square_tensor(PyList_GET_ITEM(list->objects, i), sum));
    }
    return ZS_OK;
}

static PyObject *squares(PyObject *module, PyObject *objects)
{
    grad_list list;
    zs_exact sum = {0};
    double numbers[ZS_EXACT_NUMBERS];
    if (!PyList_Check(objects)) return PyErr_Format(PyExc_TypeError, "squares() expects a list of tensors");
    zs_clear_error();
    zs_status status = find_flats(objects, &list);
    ZS_THEN(status, add_squares(&list, &sum));
    free_list(&list);
    if (status != ZS_OK) return zs_py_raise(module);
    zs_exact_numbers(&sum, numbers);
    PyObject *result = PyList_New(ZS_EXACT_NUMBERS);
    for (int i = 0; result != NULL && i < ZS_EXACT_NUMBERS; i++) {
        PyObject *number = PyFloat_FromDouble(numbers[i]);
        if (number == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, i, number);
    }
    return result;
}

static PyObject *squares_value(PyObject *module, PyObject *list)
{
    (void)module;
    double numbers[ZS_EXACT_NUMBERS];
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != ZS_EXACT_NUMBERS)
        return PyErr_Format(PyExc_TypeError, "squares_value() expects the %d numbers of squares()", ZS_EXACT_NUMBERS);
    for (int i = 0; i < ZS_EXACT_NUMBERS; i++) {
        numbers[i] = PyFloat_AsDouble(PyList_GET_ITEM(list, i));
        if (PyErr_Occurred()) return NULL;
    }
    return PyFloat_FromDouble(zs_exact_value(numbers));
}

/* --- finite gradients --------------------------------------------------------------------------------------------- */

/* Clears *finite if an element, times the factor that waits for it, is infinite or NaN. */
static zs_status look_at_tensor(PyObject *object, bool *finite)
{
    zs_tensor *tensor;
    ZS_TRY(zs_py_tensor(object, &tensor));
    const float factor = zs_pending_of(zs_tensor_mem(tensor));
    zs_exact sum = {0};
    if (fabsf(factor) > 1) zs_pending_settle(zs_tensor_mem(tensor));
    zs_status status = square_elements(tensor, "finite", &sum);
    zs_tensor_free(tensor);
    *finite = *finite && isfinite(factor) && isfinite(sum.beyond);
    return status;
}

/* Looks at flats whose sums over the ranks show it, and at the other tensors until one is not finite. */
static zs_status look_at_all(grad_list *list, bool *finite)
{
    for (int64_t k = 0; k < list->chosen.n; k++) {
        zs_chosen_flat *chosen = &list->chosen.flats[k];
        chosen->done = zs_chosen_is_finite(chosen);
        ZS_TRY(zs_squares_ask(&chosen->unit->flats[chosen->flat]));
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list->objects) && *finite; i++) {
        bool done = list->at[i] >= 0 && list->chosen.flats[list->at[i]].done;
        if (!done) ZS_TRY(look_at_tensor(PyList_GET_ITEM(list->objects, i), finite));
    }
    return ZS_OK;
}

static PyObject *are_all_finite(PyObject *module, PyObject *objects)
{
    grad_list list;
    bool finite = true;
    if (!PyList_Check(objects)) return PyErr_Format(PyExc_TypeError, "finite() expects a list of tensors");
    zs_clear_error();
    zs_status status = find_flats(objects, &list);
    ZS_THEN(status, look_at_all(&list, &finite));
    free_list(&list);
    return status == ZS_OK ? PyBool_FromLong(finite) : zs_py_raise(module);
}

static PyObject *expect_norms(PyObject *module, PyObject *list)
{
    size_t n;
    zs_unit **units = zs_py_units(list, &n);
    if (units == NULL) return NULL;
    zs_clear_error();
    zs_status status = ZS_OK;
    for (size_t k = 0; k < n; k++)
        for (int f = 0; f < units[k]->n_flats; f++)
            ZS_THEN(status, zs_squares_ask(&units[k]->flats[f]));
    free(units);
    if (status != ZS_OK) return zs_py_raise(module);
    Py_RETURN_NONE;
}

/* --- clipping ----------------------------------------------------------------------------------------------------- */

/* The tensors of the list whose flats are not scaled later, as a new list. */
static PyObject *left_over(const grad_list *list)
{
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left != NULL && i < PyList_GET_SIZE(list->objects); i++) {
        bool done = list->at[i] >= 0 && list->chosen.flats[list->at[i]].done;
        if (!done && PyList_Append(left, PyList_GET_ITEM(list->objects, i)) < 0) Py_CLEAR(left);
    }
    return left;
}

static PyObject *scale_later(PyObject *module, PyObject *args)
{
    PyObject *objects;
    float factor;
    grad_list list;
    if (!PyArg_ParseTuple(args, "O!f:scale_later", &PyList_Type, &objects, &factor)) return NULL;
    zs_clear_error();
    zs_status status = find_flats(objects, &list);
    for (int64_t k = 0; status == ZS_OK && k < list.chosen.n; k++)
        list.chosen.flats[k].done = factor != 0 && zs_chosen_scale_later(&list.chosen.flats[k], factor);
    PyObject *left = status == ZS_OK ? left_over(&list) : zs_py_raise(module);
    free_list(&list);
    return left;
}

static PyObject *apply_pending(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object;
    int writes;
    if (!PyArg_ParseTuple(args, "Op:apply_pending", &object, &writes)) return NULL;
    zs_mem *mem = zs_py_mem(object);
    zs_pending_settle(mem);
    if (writes) zs_squares_spoil(mem);
    Py_RETURN_NONE;
}

static PyObject *has_pending(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(zs_pending_any());
}

static PyObject *bytes_passed(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromUnsignedLongLong(zs_count_bytes(0));
}

static PyMethodDef functions[] = {
    {"bytes_passed", bytes_passed, METH_NOARGS,
     "bytes_passed($module, /)\n--\n\nReturn the bytes of CPU memory that steps of zshard's optimizers, norms and "
     "scalings of gradients have read and written in this process."},
    {"has_pending", has_pending, METH_NOARGS,
     "has_pending($module, /)\n--\n\nWhether any gradients are yet to be multiplied."},
    {"expect_norms", expect_norms, METH_O,
     "expect_norms($module, units, /)\n--\n\nTake the squares of gradients from the next backward on, as if their norm "
     "or finite() had been asked for."},
    {"finite", are_all_finite, METH_O,
     "finite($module, tensors, /)\n--\n\nWhether the squares of all elements of a list of contiguous CPU tensors, such "
     "as gradients, are finite."},
    {"squares", squares, METH_O,
     "squares($module, tensors, /)\n--\n\nReturn the sum of squares over all elements of a list of contiguous CPU "
     "tensors, such as gradients, as a list of numbers: add those of several ranks one by one, without rounding, and "
     "pass them to squares_value()."},
    {"squares_value", squares_value, METH_O,
     "squares_value($module, numbers, /)\n--\n\nReturn the sum that numbers of squares(), added over ranks, stand for, "
     "rounded once."},
    {"scale_later", scale_later, METH_VARARGS,
     "scale_later($module, gradients, factor, /)\n--\n\nHave gradients multiplied by a factor when they are next read: "
     "by the step of an optimizer of zshard, else before the read."},
    {"apply_pending", apply_pending, METH_VARARGS,
     "apply_pending($module, tensor, writes, /)\n--\n\nMultiply gradients by the factors that are pending for them, as "
     "other "
     "code is to read this tensor, or (writes) may write to it unseen."},
    {0},
};

int zs_py_clip_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
