/* fs_faults.c - the Python module _file_faults: faults in zshard's file calls, and a log of them. See
 * tests/lib/file_faults.py.
 *
 * zshard._core has a capsule by which its calls can be watched; this module has the watcher. Each call asks it before
 * and reports after. So calls are counted, the nth can fail, be cut short or be the process's last, and all can be
 * written down.
 *
 * An entry of the log is a line, `call pid fd errno offset length a b c`, and behind it a bytes of the path, b of the
 * other path and c of the written data. Each entry is one write to a file that is open for appending: ranks may share a
 * log, and the order of its entries is one in which the calls can have happened.
 */
#define _GNU_SOURCE /* kill, writev */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "checkpoint/fs_watch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SHORT = -4, KILL, KILL_AFTER, KILL_SHORT }; /* in place of an errno */

static struct {
    _Atomic long calls; /* so far */
    _Atomic bool watch; /* anything below is in use. Else no lock is taken: a fork could leave it locked in the child */
    pthread_mutex_t lock;
    long first, last; /* those calls that suffer, from 1 on: none where last is 0 */
    int fault;        /* an errno, or one of the above */
    int log;          /* a descriptor, -1: there is none */
    int log_err;
} tests = {.lock = PTHREAD_MUTEX_INITIALIZER, .log = -1};

#define ERRNO(name) {#name, name}

static const struct {
    const char *name;
    int fault;
} faults[] = {ERRNO(EACCES),
              ERRNO(EDQUOT),
              ERRNO(EEXIST),
              ERRNO(EINTR),
              ERRNO(EINVAL),
              ERRNO(EIO),
              ERRNO(EMFILE),
              ERRNO(ENOENT),
              ERRNO(ENOSPC),
              ERRNO(ENOSYS),
              ERRNO(EROFS),
              ERRNO(EOPNOTSUPP),
              {"short", SHORT},
              {"kill", KILL},
              {"killafter", KILL_AFTER},
              {"killshort", KILL_SHORT}};

PyDoc_STRVAR(faults_doc, "file_faults($module, nth, what='', times=1, /)\n--\n\nInject faults into file calls"
                         ": the nth call from now (1: the next) and the `times` - 1 calls after it are subject to "
                         "`what`: the name of an errno to fail with (ENOSPC, EIO, EINTR, ...); 'short': read or write "
                         "half; 'kill', 'killafter', 'killshort': kill the process before the call, after it, or after "
                         "half of it. nth 0 injects none. Returns the number of calls since the last file_faults().");

static PyObject *file_faults(PyObject *module, PyObject *args)
{
    (void)module;
    long nth, times = 1, calls = 0;
    const char *what = "";
    size_t i = 0;
    if (!PyArg_ParseTuple(args, "l|sl:file_faults", &nth, &what, &times)) return NULL;
    while (nth > 0 && i < sizeof faults / sizeof *faults && strcmp(what, faults[i].name) != 0)
        i++;
    if (nth < 0 || times < 1 || times > LONG_MAX - nth || i == sizeof faults / sizeof *faults)
        return PyErr_Format(PyExc_ValueError, "no fault '%s' at call %ld, %ld times", what, nth, times);
    pthread_mutex_lock(&tests.lock);
    calls = atomic_exchange(&tests.calls, 0);
    tests.first = nth;
    tests.last = nth == 0 ? 0 : nth + times - 1;
    tests.fault = faults[i].fault;
    tests.watch = nth != 0 || tests.log >= 0;
    pthread_mutex_unlock(&tests.lock);
    return PyLong_FromLong(calls);
}

PyDoc_STRVAR(log_doc, "file_log($module, path, /)\n--\n\nLog all file calls and the data they write to the file "
                      "`path`, for tests (read by tests/lib/power_cut.py); None stops logging. Raises OSError if that "
                      "fails, or if an earlier call could not be logged.");

static PyObject *file_log(PyObject *module, PyObject *path)
{
    (void)module;
    PyObject *raw = NULL;
    int log = -1;
    if (path != Py_None && !PyUnicode_FSConverter(path, &raw)) return NULL;
    if (raw != NULL) log = open(PyBytes_AS_STRING(raw), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    Py_XDECREF(raw);
    if (raw != NULL && log < 0) return PyErr_SetFromErrno(PyExc_OSError);
    pthread_mutex_lock(&tests.lock);
    int old = tests.log;
    errno = tests.log_err;
    tests.log = log;
    tests.log_err = 0;
    tests.watch = log >= 0 || tests.last != 0;
    pthread_mutex_unlock(&tests.lock);
    if (errno != 0) PyErr_SetFromErrno(PyExc_OSError);
    if (old >= 0) close(old);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* --- the watcher -------------------------------------------------------------------------------------------------- */

static void die(void)
{
    kill(getpid(), SIGKILL);
    pause(); /* until it has come */
}

static zs_fs_fate before(void)
{
    zs_fs_fate fate = {0};
    long call = atomic_fetch_add(&tests.calls, 1) + 1;
    if (!tests.watch) return fate;
    pthread_mutex_lock(&tests.lock);
    int fault = call >= tests.first && call <= tests.last ? tests.fault : 0;
    pthread_mutex_unlock(&tests.lock);
    if (fault == KILL) die();
    fate.err = fault > 0 ? fault : 0;
    fate.half = fault == SHORT || fault == KILL_SHORT;
    fate.kill_after = fault == KILL_AFTER || fault == KILL_SHORT;
    return fate;
}

static size_t length_of(const char *text)
{
    return text == NULL ? 0 : strlen(text);
}

/* Appends an entry; the caller holds the lock. */
static void append(const zs_fs_entry *entry, int err)
{
    char line[256];
    size_t lengths[] = {length_of(entry->path), length_of(entry->to), 0};
    if (entry->data != NULL && err == 0) lengths[2] = (size_t)entry->length;
    int n = snprintf(line, sizeof line, "%s %ld %d %d %lld %lld %zu %zu %zu\n", entry->call, (long)getpid(), entry->fd,
                     err, (long long)entry->offset, (long long)entry->length, lengths[0], lengths[1], lengths[2]);
    struct iovec parts[] = {{line, (size_t)n},
                            {(void *)(uintptr_t)entry->path, lengths[0]},
                            {(void *)(uintptr_t)entry->to, lengths[1]},
                            {(void *)(uintptr_t)entry->data, lengths[2]}};
    ssize_t all = (ssize_t)((size_t)n + lengths[0] + lengths[1] + lengths[2]);
    ssize_t done = writev(tests.log, parts, 4);
    if (done != all) tests.log_err = done < 0 ? errno : EIO;
}

static long after(zs_fs_fate fate, long result, const zs_fs_entry *entry)
{
    if (!tests.watch) return result;
    int err = errno;
    pthread_mutex_lock(&tests.lock);
    if (tests.log >= 0) append(entry, result < 0 ? err : 0);
    pthread_mutex_unlock(&tests.lock);
    if (fate.kill_after) die();
    errno = err;
    return result;
}

static const zs_fs_watcher watcher = {before, after};

/* --- the module --------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"file_faults", file_faults, METH_VARARGS, faults_doc},
    {"file_log", file_log, METH_O, log_doc},
    {0},
};

static int begin(PyObject *module)
{
    (void)module;
    const zs_fs_watching *core = PyCapsule_Import("zshard._core._file_watch", 0);
    if (core == NULL) return -1;
    core->watch(&watcher);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, begin}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_file_faults",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__file_faults(void);
PyMODINIT_FUNC PyInit__file_faults(void)
{
    return PyModuleDef_Init(&module_def);
}
