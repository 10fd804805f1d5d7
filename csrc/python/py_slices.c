/* py_slices.c - see py_slices.h. */
#include "python/py_slices.h"
#include "device/pending.h"

#include "python/py_util.h"

zs_guard_types zs_py_guard_types;

static PyObject *parts_table; /* {id of a parameter: (reference, Part)} */

static struct {
    PyObject *part, *geometry, *is_whole;
} names;

void zs_py_set_parts(PyObject *parts)
{
    parts_table = Py_NewRef(parts);
}

bool zs_py_is_guarded(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    return type == zs_py_guard_types.shard_tensor || type == zs_py_guard_types.shard_parameter;
}

/* Borrowed; NULL without exception for a parameter that is not in the table: a copy, which has it as an attribute. */
static PyObject *part_in_table(PyObject *param)
{
    PyObject *key = PyLong_FromVoidPtr(param);
    if (key == NULL) return NULL;
    PyObject *entry = PyDict_GetItemWithError(parts_table, key);
    Py_DECREF(key);
    return entry != NULL && PyTuple_Check(entry) ? PyTuple_GET_ITEM(entry, 1) : NULL;
}

PyObject *zs_py_part_of_param(PyObject *object)
{
    return Py_TYPE(object) == zs_py_guard_types.shard_parameter ? part_in_table(object) : NULL;
}

/* Borrowed: the table or the object owns it. */
static PyObject *part_of(PyObject *object)
{
    PyObject *part = zs_py_part_of_param(object);
    if (part != NULL || PyErr_Occurred()) return part;
    part = PyObject_GetAttr(object, names.part);
    Py_XDECREF(part);
    return part;
}

bool zs_py_has_shape(PyObject *tensor, PyObject *shape)
{
    int64_t sizes[ZS_MAX_DIM];
    int ndim = zs_py_sizes(tensor, sizes);
    if (ndim != PyTuple_GET_SIZE(shape)) return false;
    for (int d = 0; d < ndim; d++)
        if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d)) != sizes[d]) return false;
    return true;
}

/* Is this guarded parameter now unsharded, as while a backward recomputes? -1 with an exception. */
static int is_whole(PyObject *object, const zs_operand *slice)
{
    if (Py_TYPE(object) != zs_py_guard_types.shard_parameter) return 0;
    if (zs_py_own_shape(slice) != zs_py_whole_shape(slice)) return !zs_py_has_shape(object, zs_py_own_shape(slice));
    PyObject *answer = PyObject_CallMethodNoArgs(slice->part, names.is_whole);
    int result = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return result;
}

PyObject *zs_py_geometry(PyObject *part)
{
    PyObject *shape = PyObject_GetAttr(part, names.geometry);
    Py_XDECREF(shape); /* the Part owns it */
    return shape;
}

int zs_py_look_at(PyObject *object, zs_operand *out)
{
    *out = (zs_operand){.object = object};
    if (!zs_py_is_guarded(object)) return 0;
    PyObject *part = part_of(object);
    if (part == NULL || part == Py_None) return PyErr_Occurred() ? -1 : 0;
    PyObject *shape = zs_py_geometry(part);
    if (shape == NULL) return -1;
    zs_operand found = {object, part, shape};
    int whole = is_whole(object, &found);
    if (whole < 0) return -1;
    if (!whole) *out = found;
    return 0;
}

int zs_py_slice_part(PyObject *object, PyObject **part)
{
    zs_operand found = {0};
    if (zs_pending_any()) zs_pending_settle(zs_py_mem(object)); /* Python asks, to use it */
    if (zs_py_is_tensor(object) && zs_py_look_at(object, &found) < 0) return -1;
    *part = found.part;
    return 0;
}

int zs_py_slices_init(void)
{
    names.part = PyUnicode_InternFromString("_zshard_part");
    names.geometry = PyUnicode_InternFromString("geometry");
    names.is_whole = PyUnicode_InternFromString("is_whole_now");
    return names.part != NULL && names.geometry != NULL && names.is_whole != NULL ? 0 : -1;
}
