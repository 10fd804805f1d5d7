/* py_comm.c - _core.Comm: a transport between the ranks of one process group, as Python sees it. */
#include "comm/gpu/backend.h"
#include "comm/where.h"
#include "device/device_cuda.h"
#include "python/py_util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct comm_object {
    PyObject_HEAD
    zs_comm *comm;     /* counted reference */
    char address[128]; /* shm: where peers connect to */
} comm_object;

zs_comm *zs_py_comm(PyObject *object)
{
    if (Py_IS_TYPE(object, zs_py_get_state()->comm_type)) return ((comm_object *)object)->comm;
    PyErr_Format(PyExc_TypeError, "expected a zshard._core.Comm, got %.100s", Py_TYPE(object)->tp_name);
    return NULL;
}

static PyObject *wrap(PyTypeObject *type, zs_comm *comm, const char *address)
{
    comm_object *self = (comm_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        zs_comm_release(comm);
        return NULL;
    }
    self->comm = comm;
    memcpy(self->address, address, strlen(address) + 1); /* callers pass no more */
    return (PyObject *)self;
}

static void comm_dealloc(comm_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    zs_comm_release(self->comm);
    type->tp_free(self);
    Py_DECREF(type);
}

/* "cpu", "cuda:<number>", "cuda:<number>/host" (see zs_device_cuda). */
static zs_status find_device(const char *name, const zs_device **out)
{
    static const char cuda[] = "cuda:";
    if (strcmp(name, "cpu") == 0) {
        *out = zs_device_cpu();
        return ZS_OK;
    }
    if (strncmp(name, cuda, strlen(cuda)) == 0) {
        const char *digits = name + strlen(cuda);
        char *end;
        long index = strtol(digits, &end, 10);
        bool on_host = strcmp(end, "/host") == 0, known = end > digits && (*end == 0 || on_host);
        if (known && index == (int)index) return zs_device_cuda((int)index, on_host, out);
    }
    return ZS_FAIL(ZS_ERR_VALUE, "unknown device '%s'", name);
}

static PyObject *comm_alone(PyObject *type, PyObject *args)
{
    const char *name = "cpu";
    const zs_device *device = NULL;
    zs_comm *comm = NULL;
    if (!PyArg_ParseTuple(args, "|s:alone", &name)) return NULL;
    zs_clear_error();
    zs_status status = find_device(name, &device);
    ZS_THEN(status, zs_comm_self_new(device, &comm));
    return status == ZS_OK ? wrap((PyTypeObject *)type, comm, "") : zs_py_raise(NULL);
}

/* The backend that Python asks for. */
typedef struct backend_request {
    const char *kind, *group;
    zs_nccl_choices nccl;
} backend_request;

static zs_status new_backend(zs_comm *control, const backend_request *request, const zs_device *device,
                             zs_backend **out)
{
    if (strcmp(request->kind, "c10d") == 0) return zs_backend_c10d_new(control, device, request->group, out);
    if (strcmp(request->kind, "nccl") == 0) return zs_backend_nccl_new(control, device, &request->nccl, out);
    return ZS_FAIL(ZS_ERR_VALUE, "unknown backend '%s'", request->kind);
}

static PyObject *comm_gpu(PyObject *type, PyObject *args)
{
    PyObject *control;
    const char *where;
    const zs_device *device = NULL;
    backend_request request = {.nccl.communicators = 2};
    zs_nccl_choices *nccl = &request.nccl;
    zs_backend *backend = NULL;
    zs_comm *comm = NULL;
    if (!PyArg_ParseTuple(args, "Osss|(iiiip):gpu", &control, &request.kind, &where, &request.group, &nccl->ctas,
                          &nccl->min_ctas, &nccl->max_ctas, &nccl->communicators, &nccl->any_order))
        return NULL;
    zs_comm *hosts = zs_py_comm(control);
    if (hosts == NULL) return NULL;
    zs_py_signals_watch(); /* backwards will run on torch's threads */
    zs_clear_error();
    zs_status status = find_device(where, &device);
    if (status == ZS_OK) ZS_PY_NOGIL(status, new_backend(hosts, &request, device, &backend));
    ZS_THEN(status, zs_comm_gpu_new(hosts, backend, &comm));
    return status == ZS_OK ? wrap((PyTypeObject *)type, comm, "") : zs_py_raise(NULL);
}

static PyObject *comm_shm(PyObject *type, PyObject *args)
{
    int rank, world;
    double timeout;
    char address[128] = "";
    zs_comm *comm = NULL;
    if (!PyArg_ParseTuple(args, "iid:shm", &rank, &world, &timeout)) return NULL;
    zs_clear_error();
    if (zs_comm_shm_new(rank, world, timeout, address, sizeof address, &comm) != ZS_OK) return zs_py_raise(NULL);
    return wrap((PyTypeObject *)type, comm, address);
}

static PyObject *comm_shm_needs(PyObject *type, PyObject *args)
{
    int world;
    (void)type;
    if (!PyArg_ParseTuple(args, "i:shm_needs", &world)) return NULL;
    if (world < 1) return PyErr_Format(PyExc_ValueError, "world size must be positive, got %d", world);
    zs_shm_needs needs = zs_comm_shm_needs(world);
    return Py_BuildValue("{s:n,s:n,s:n,s:n}", "descriptors", (Py_ssize_t)needs.descriptors, "meeting",
                         (Py_ssize_t)needs.meeting, "mappings", (Py_ssize_t)needs.mappings, "bytes",
                         (Py_ssize_t)needs.bytes);
}

static PyObject *comm_c10d(PyObject *type, PyObject *args)
{
    const char *name;
    zs_ranks_of_hosts ranks = {0};
    double timeout;
    zs_comm *comm = NULL;
    if (!PyArg_ParseTuple(args, "siid|i:c10d", &name, &ranks.rank, &ranks.world, &timeout, &ranks.per_host))
        return NULL;
    zs_clear_error();
    if (zs_comm_c10d_new(name, &ranks, timeout, &comm) != ZS_OK) return zs_py_raise(NULL);
    return wrap((PyTypeObject *)type, comm, "");
}

static PyObject *comm_hosts(PyObject *type, PyObject *args)
{
    const char *group, *fds;
    Py_ssize_t bytes;
    PyObject *local;
    zs_ranks_of_hosts ranks = {0};
    double timeout;
    zs_comm *comm = NULL;
    if (!PyArg_ParseTuple(args, "sy#O!iid:hosts", &group, &fds, &bytes, (PyTypeObject *)type, &local, &ranks.rank,
                          &ranks.world, &timeout))
        return NULL;
    zs_comm *within = ((comm_object *)local)->comm;
    ranks.per_host = within->world;
    if ((size_t)bytes != 2 * sizeof(int) * (size_t)(ranks.world / ranks.per_host)) {
        PyErr_SetString(PyExc_ValueError, "expected two connections for each host");
        return NULL;
    }
    zs_clear_error();
    if (zs_comm_hosts_new(group, (const int *)(const void *)fds, within, &ranks, timeout, &comm) != ZS_OK)
        return zs_py_raise(NULL);
    return wrap((PyTypeObject *)type, comm, "");
}

static PyObject *comm_dry(PyObject *type, PyObject *args)
{
    const char *name;
    zs_ranks_of_hosts ranks = {0};
    zs_comm *comm = NULL;
    if (!PyArg_ParseTuple(args, "sii|i:dry_run", &name, &ranks.rank, &ranks.world, &ranks.per_host)) return NULL;
    zs_clear_error();
    if (zs_comm_dry_new(name, &ranks, &comm) != ZS_OK) return zs_py_raise(NULL);
    return wrap((PyTypeObject *)type, comm, "");
}

static PyObject *comm_connect(comm_object *self, PyObject *args)
{
    PyObject *list;
    const char *token;
    Py_ssize_t token_size;
    if (!PyArg_ParseTuple(args, "O!y#:connect", &PyList_Type, &list, &token, &token_size)) return NULL;
    if (PyList_GET_SIZE(list) != self->comm->world || token_size != 16) {
        PyErr_SetString(PyExc_ValueError, "connect() expects one address per rank and a 16-byte token");
        return NULL;
    }
    const char **addresses = calloc((size_t)self->comm->world, sizeof *addresses);
    if (addresses == NULL) return PyErr_NoMemory();
    zs_status status = ZS_OK;
    for (int r = 0; r < self->comm->world && status == ZS_OK; r++) {
        addresses[r] = PyUnicode_AsUTF8(PyList_GET_ITEM(list, r));
        if (addresses[r] == NULL) status = ZS_ERR_TORCH;
    }
    if (status == ZS_OK) ZS_PY_NOGIL(status, zs_comm_shm_connect(self->comm, addresses, (const unsigned char *)token));
    free(addresses);
    return zs_py_none(status);
}

static PyObject *comm_exchange(comm_object *self, PyObject *data)
{
    char *mine;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(data, &mine, &size) < 0) return NULL;
    PyObject *all = PyBytes_FromStringAndSize(NULL, size * self->comm->world);
    if (all == NULL) return NULL;
    char *space = PyBytes_AS_STRING(all);
    zs_status status;
    ZS_PY_NOGIL(status, zs_comm_exchange(self->comm, mine, (size_t)size, space));
    PyObject *list = status == ZS_OK ? PyList_New(self->comm->world) : zs_py_raise(NULL);
    for (int r = 0; list != NULL && r < self->comm->world; r++) {
        PyObject *item = PyBytes_FromStringAndSize(space + r * size, size);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, r, item);
    }
    Py_DECREF(all);
    return list;
}

static PyObject *comm_align(comm_object *self, PyObject *unused)
{
    (void)unused;
    zs_status status;
    ZS_PY_NOGIL(status, zs_comm_align(self->comm));
    return zs_py_none(status);
}

static PyObject *comm_broadcast(comm_object *self, PyObject *args)
{
    PyObject *object;
    int root;
    if (!PyArg_ParseTuple(args, "Oi:broadcast", &object, &root)) return NULL;
    zs_tensor *tensor = NULL;
    zs_tensor_info info;
    void *data = NULL;
    zs_clear_error();
    zs_status status = zs_py_tensor(object, &tensor);
    ZS_THEN(status, zs_tensor_describe(tensor, &info));
    if (status == ZS_OK && !(info.contiguous && info.where.type == ZS_ON_CPU))
        status = ZS_FAIL(ZS_ERR_VALUE, "broadcast() expects a contiguous CPU tensor");
    ZS_THEN(status, zs_tensor_data(tensor, &data));
    if (status == ZS_OK) {
        size_t bytes = (size_t)info.numel * info.itemsize;
        ZS_PY_NOGIL(status, zs_comm_broadcast(self->comm, data, bytes, root));
    }
    zs_tensor_free(tensor);
    return zs_py_none(status);
}

static PyObject *comm_abort(comm_object *self, PyObject *reason)
{
    const char *text = PyUnicode_AsUTF8(reason);
    if (text == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    zs_comm_abort(self->comm, text);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *comm_publish_failure(comm_object *self, PyObject *what)
{
    const char *text = PyUnicode_AsUTF8(what);
    if (text == NULL) return NULL;
    zs_comm_publish(self->comm, ZS_ON_FAILURE, text);
    Py_RETURN_NONE;
}

static PyObject *comm_answer(comm_object *self, PyObject *line)
{
    const char *text = PyUnicode_AsUTF8(line);
    if (text == NULL) return NULL;
    if (self->comm->ops->talk->answer != NULL) self->comm->ops->talk->answer(self->comm, text);
    Py_RETURN_NONE;
}

static PyObject *comm_locate(comm_object *self, PyObject *unused)
{
    (void)unused;
    char lines[ZS_LINES];
    Py_BEGIN_ALLOW_THREADS
    zs_comm_locate_all(self->comm, lines, sizeof lines);
    Py_END_ALLOW_THREADS
    return PyErr_Occurred() ? NULL : PyUnicode_DecodeUTF8(lines, (Py_ssize_t)strlen(lines), "replace");
}

static PyObject *comm_end(comm_object *self, PyObject *unused)
{
    (void)unused;
    zs_status status;
    ZS_PY_NOGIL(status, zs_comm_end(self->comm));
    return zs_py_none(status);
}

static PyObject *comm_close(comm_object *self, PyObject *unused)
{
    (void)unused;
    Py_BEGIN_ALLOW_THREADS /* peers may need another thread of this rank to finish */
    zs_comm_close(self->comm);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* The facts of a transport for Python. */
typedef enum fact { RANK, WORLD, PER_HOST, TRANSPORT, ADDRESS, TIMEOUT, IS_WAITING, IS_ASKED, LOST } fact;

static PyObject *comm_fact(comm_object *self, void *which)
{
    const zs_comm *comm = self->comm;
    const char *lost = comm->lost != NULL ? comm->lost : "";
    switch ((fact)(uintptr_t)which) {
    case RANK: return PyLong_FromLong(comm->rank);
    case WORLD: return PyLong_FromLong(comm->world);
    case PER_HOST: return PyLong_FromLong(comm->per_host);
    case TRANSPORT: return PyUnicode_FromString(comm->ops->name);
    case ADDRESS: return PyUnicode_FromString(self->address);
    case TIMEOUT: return PyFloat_FromDouble(comm->timeout);
    case IS_WAITING: return PyBool_FromLong(atomic_load_explicit(&comm->waiting, memory_order_relaxed));
    case IS_ASKED: return PyBool_FromLong(comm->ops->talk->asked != NULL && comm->ops->talk->asked(comm));
    case LOST: return PyUnicode_DecodeUTF8(lost, (Py_ssize_t)strlen(lost), "replace");
    }
    return NULL;
}

#define FACT(name, which, doc) {name, (getter)comm_fact, NULL, doc, (void *)(uintptr_t)(which)}

static PyGetSetDef comm_getset[] = {
    FACT("rank", RANK, "This rank."),
    FACT("world", WORLD, "Number of ranks."),
    FACT("per_host", PER_HOST, "Ranks of each host, which are neighbors; 0 if all are on one."),
    FACT("transport", TRANSPORT, "'self', 'shm', 'c10d' or 'hosts'; on GPUs 'nccl' or 'c10d_gpu'."),
    FACT("address", ADDRESS, "Address that peers connect to (shm)."),
    FACT("timeout", TIMEOUT, "Timeout of one wait, in seconds."),
    FACT("is_waiting", IS_WAITING, "Whether this rank waits for the others to come to a collective (c10d)."),
    FACT("is_asked", IS_ASKED, "Whether a peer asks where this rank's script is (shm)."),
    FACT("lost", LOST, "Why the transport is unusable (c10d); '' if it is usable."),
    {0},
};

static PyMethodDef comm_methods[] = {
    {"alone", comm_alone, METH_VARARGS | METH_CLASS,
     "alone($type, device='cpu', /)\n--\n\nCreate the transport of a single process (world size 1), which exchanges "
     "nothing."},
    {"gpu", comm_gpu, METH_VARARGS | METH_CLASS,
     "gpu($type, control, backend, device, group_name, nccl=(0, 0, 0, 2, False), /)\n--\n\nCreate a transport between "
     "GPUs."},
    {"shm", comm_shm, METH_VARARGS | METH_CLASS,
     "shm($type, rank, world, timeout, /)\n--\n\nOpen this rank's end of a shared-memory transport."},
    {"shm_needs", comm_shm_needs, METH_VARARGS | METH_CLASS,
     "shm_needs($type, world, /)\n--\n\nReturn what a shared-memory transport of `world` ranks takes on each rank, "
     "besides memory and what models add, as a dict: descriptors (open files), meeting (open files while the ranks "
     "connect), mappings, and bytes of address space."},
    {"c10d", comm_c10d, METH_VARARGS | METH_CLASS,
     "c10d($type, group_name, rank, world, timeout, per_host=0, /)\n--\n\nCreate a transport over a torch.distributed "
     "process group."},
    {"hosts", comm_hosts, METH_VARARGS | METH_CLASS,
     "hosts($type, group_name, connections, local, rank, world, timeout, /)\n--\n\nCreate a transport in two "
     "levels."},
    {"dry_run", comm_dry, METH_VARARGS | METH_CLASS,
     "dry_run($type, transport, rank, world, per_host=0, /)\n--\n\nCreate the placeholder of a transport for a dry "
     "run, which only computes sizes."},
    {"connect", (PyCFunction)comm_connect, METH_VARARGS,
     "connect($self, addresses, token, /)\n--\n\nConnect to all ranks."},
    {"exchange", (PyCFunction)comm_exchange, METH_O,
     "exchange($self, data, /)\n--\n\nAll-gather `data`: return the bytes of all ranks in rank order."},
    {"align", (PyCFunction)comm_align, METH_NOARGS,
     "align($self, /)\n--\n\nNumber what is made from now on as all other ranks do, also after an error on some of "
     "them. Collective."},
    {"broadcast", (PyCFunction)comm_broadcast, METH_VARARGS,
     "broadcast($self, tensor, root, /)\n--\n\nBroadcast the values of a contiguous CPU tensor from rank `root`."},
    {"publish_failure", (PyCFunction)comm_publish_failure, METH_O,
     "publish_failure($self, what, /)\n--\n\nTell the peers what has failed here, for their next error, such as "
     "'raised ValueError: ...'; '' to take it back. Never waits."},
    {"answer", (PyCFunction)comm_answer, METH_O,
     "answer($self, line, /)\n--\n\nTell a peer that has asked (see is_asked) where this rank's script is (shm)."},
    {"locate", (PyCFunction)comm_locate, METH_NOARGS,
     "locate($self, /)\n--\n\nReturn where the script of each rank is, as lines to append to an error that all ranks "
     "raise. Collective."},
    {"end", (PyCFunction)comm_end, METH_NOARGS,
     "end($self, /)\n--\n\nTell the peers that this rank has come to its orderly end."},
    {"close", (PyCFunction)comm_close, METH_NOARGS,
     "close($self, /)\n--\n\nDisconnect from the peers in an orderly way."},
    {"abort", (PyCFunction)comm_abort, METH_O,
     "abort($self, reason, /)\n--\n\nTell the peers that this rank cannot continue; their waits fail with `reason`."},
    {0},
};

static PyType_Slot comm_slots[] = {
    {Py_tp_doc, "A transport between the ranks of one process group."},
    {Py_tp_dealloc, comm_dealloc},
    {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_getset},
    {0, NULL},
};

static PyType_Spec comm_spec = {
    .name = "zshard._core.Comm",
    .basicsize = sizeof(comm_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = comm_slots,
};

int zs_py_comm_init(PyObject *module, zs_py_state *state)
{
    return zs_py_add_type(module, &comm_spec, &state->comm_type);
}
