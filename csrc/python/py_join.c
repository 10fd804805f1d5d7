/* py_join.c - _core.Engine: the announcements of join() for Python. See engine/join.h. */
#include "engine/join.h"
#include "python/py_engine.h"
#include "python/py_faces.h"

#include <string.h>

const char zs_py_join_begin_doc[] = "join_begin($self, by_all, throws, /)\n--\n\nBegin join(). by_all: divide "
                                    "gradients by all ranks, not only by those "
                                    "that have data; throws: raise RuntimeError on all ranks if one's data ends early.";

PyObject *zs_py_join_begin(engine_object *self, PyObject *args)
{
    int by_all, throws;
    if (!PyArg_ParseTuple(args, "pp:join_begin", &by_all, &throws)) return NULL;
    zs_clear_error();
    return zs_py_none(zs_join_begin(self->engine, by_all != 0, throws != 0));
}

const char zs_py_join_end_doc[] = "join_end($self, /)\n--\n\nEnd join(), whatever has come of it.";

PyObject *zs_py_join_end(engine_object *self, PyObject *unused)
{
    (void)unused;
    zs_join_end(self->engine);
    Py_RETURN_NONE;
}

/* RuntimeError outside of join(). */
static int check_joined(const engine_object *self)
{
    if (zs_join_received(self->engine) != NULL) return 0;
    PyErr_SetString(PyExc_RuntimeError, "join() is not active on this model");
    return -1;
}

const char zs_py_join_call_doc[] =
    "join_call($self, number, text, meetings, /)\n--\n\nSay that this rank is about to do `number`, which `text` "
    "describes, and in which it meets the others so many times. Return whether some rank follows it. Collective.";

PyObject *zs_py_join_call(engine_object *self, PyObject *args)
{
    int number, meetings;
    const char *text;
    bool followed = false;
    if (!PyArg_ParseTuple(args, "isi:join_call", &number, &text, &meetings) || check_joined(self) < 0) return NULL;
    zs_status status;
    ZS_PY_NOGIL(status, zs_join_call(self->engine, (uint32_t)number, text, meetings, &followed));
    if (status != ZS_OK) return zs_py_raise(NULL);
    return PyBool_FromLong(followed);
}

const char zs_py_join_share_doc[] =
    "join_share($self, data, /)\n--\n\nReturn the bytes that the leading rank gives here, after a join_call() that is "
    "followed. Collective.";

PyObject *zs_py_join_share(engine_object *self, PyObject *data)
{
    if (!PyBytes_Check(data)) return PyErr_Format(PyExc_TypeError, "join_share() expects bytes");
    if (check_joined(self) < 0) return NULL;
    uint64_t size = (uint64_t)PyBytes_GET_SIZE(data);
    zs_status status;
    ZS_PY_NOGIL(status, zs_join_share(self->engine, &size, sizeof size));
    if (status != ZS_OK) return zs_py_raise(NULL);
    PyObject *shared = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (shared == NULL) return NULL;
    char *to = PyBytes_AS_STRING(shared);
    if ((uint64_t)PyBytes_GET_SIZE(data) == size) memcpy(to, PyBytes_AS_STRING(data), size);
    if (size > 0) ZS_PY_NOGIL(status, zs_join_share(self->engine, to, size));
    if (status == ZS_OK) return shared;
    Py_DECREF(shared);
    return zs_py_raise(NULL);
}

const char zs_py_join_leave_doc[] =
    "join_leave($self, text, /)\n--\n\nLeave join() by an exception, of which the other ranks' next calls raise. Waits "
    "until they have heard.";

PyObject *zs_py_join_leave(engine_object *self, PyObject *object)
{
    const char *text = PyUnicode_AsUTF8(object);
    if (text == NULL || check_joined(self) < 0) return NULL;
    zs_status status;
    ZS_PY_NOGIL(status, zs_join_leave(self->engine, text));
    return status == ZS_OK ? Py_NewRef(Py_None) : zs_py_raise(NULL);
}

const char zs_py_join_follow_doc[] = "join_follow($self, /)\n--\n\nThis rank's data has ended: follow the others' "
                                     "passes. Return True if they are about to "
                                     "make a join_call(), False once no rank has data.";

PyObject *zs_py_join_follow(engine_object *self, PyObject *unused)
{
    (void)unused;
    bool called = false;
    if (check_joined(self) < 0) return NULL;
    zs_status status;
    ZS_PY_NOGIL(status, zs_engine_follow(self->engine, &called));
    zs_py_show(self->engine);
    return status == ZS_OK ? PyBool_FromLong(called) : zs_py_raise(NULL);
}

const char zs_py_join_news_doc[] =
    "join_news($self, /)\n--\n\nReturn what was said last: (number of ranks with data, the lowest and the highest of "
    "them, whether any rank has followed others). Without data on any rank, the ranks are those that had it last. None "
    "outside of join().";

PyObject *zs_py_join_news(engine_object *self, PyObject *unused)
{
    (void)unused;
    const zs_join_news *news = zs_join_received(self->engine);
    if (news == NULL) Py_RETURN_NONE;
    return Py_BuildValue("(iiiO)", news->n_active, news->leader, news->latest, news->followed ? Py_True : Py_False);
}
