/* py_leaves.c - _core.Engine: the micro-batches of a step, for Python. See reduce/leaves.h. */
#include "base/tree.h"
#include "python/py_engine.h"

const char zs_py_add_leaves_doc[] =
    "add_leaves($self, micro_batches, /)\n--\n\nAdd the gradients of so many backwards of all ranks in an "
    "order that does not depend on the number of ranks. Before units are made. Raises ValueError for fewer "
    "than ranks.";

PyObject *zs_py_add_leaves(engine_object *self, PyObject *number)
{
    long n = PyLong_AsLong(number);
    if (PyErr_Occurred()) return NULL;
    zs_clear_error();
    return zs_py_none(zs_engine_add_leaves(self->engine, n > 0 && n < INT32_MAX ? (int)n : 0));
}

const char zs_py_leaves_doc[] =
    "leaves($self, /)\n--\n\nReturn the micro-batch of each forward that this rank runs in a step. Where the ranks do "
    "not divide them evenly, some run their first one twice.";

PyObject *zs_py_leaves(engine_object *self, PyObject *unused)
{
    (void)unused;
    const zs_context *context = zs_engine_context(self->engine);
    const int passes = context->tree != NULL ? zs_tree_passes(context->tree) : 0;
    PyObject *list = PyList_New(passes);
    for (int pass = 0; list != NULL && pass < passes; pass++) {
        bool counts;
        PyObject *leaf = PyLong_FromLong(zs_tree_leaf(context->tree, context->ranks.all->rank, pass, &counts));
        if (leaf == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, pass, leaf);
    }
    return list;
}

const char zs_py_begin_leaf_doc[] =
    "begin_leaf($self, /)\n--\n\nBegin the next micro-batch of a step, with one backward. Raises RuntimeError "
    "if a parameter has a .grad.";

PyObject *zs_py_begin_leaf(engine_object *self, PyObject *unused)
{
    (void)unused;
    zs_clear_error();
    return zs_py_none(zs_engine_begin_leaf(self->engine));
}

const char zs_py_leaf_is_done_doc[] =
    "leaf_is_done($self, /)\n--\n\nReturn whether the backward of that micro-batch has ended.";

PyObject *zs_py_leaf_is_done(engine_object *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(zs_engine_leaf_is_done(self->engine));
}

const char zs_py_restart_step_doc[] =
    "restart_step($self, /)\n--\n\nDrop the gradients of a step that is not complete. No-op without "
    "add_leaves().";

PyObject *zs_py_restart_step(engine_object *self, PyObject *unused)
{
    (void)unused;
    zs_engine_restart_step(self->engine);
    Py_RETURN_NONE;
}
