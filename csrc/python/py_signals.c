/* py_signals.c - Ctrl-C during a wait for other ranks: on the main thread, and on one of torch's.
 *
 * Python handles signals only on the main thread, which during a backward on a GPU waits in torch for the thread
 * that waits here. So SIGINT's handler in C is wrapped once: ours counts and calls Python's. A wait on another
 * thread that sees the count grow fails; then the main thread leaves torch, and Python raises KeyboardInterrupt
 * itself. A handler of the script may want the backward to end normally, so it sees the signal only afterwards. */
#define _GNU_SOURCE 1 /* syscall */
#include "python/py_util.h"

#include "shim/tensor.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void handler(int);

static _Atomic(handler *) pythons; /* NULL: nothing is wrapped */
static atomic_uint pressed, seen;

static void count_and_pass_on(int number)
{
    atomic_fetch_add(&pressed, 1);
    handler *next = atomic_load(&pythons);
    if (next != NULL) next(number);
}

/* signal.signal() restores Python's handler, so this is called again. A third handler may call ours: it stays. */
void zs_py_signals_watch(void)
{
    struct sigaction now;
    handler *known = atomic_load(&pythons);
    if (sigaction(SIGINT, NULL, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0) return;
    if (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN || now.sa_handler == count_and_pass_on) return;
    if (known != NULL && now.sa_handler != known) return;
    atomic_store(&pythons, now.sa_handler);
    now.sa_handler = count_and_pass_on;
    (void)sigaction(SIGINT, &now, NULL);
}

/* Does Ctrl-C raise KeyboardInterrupt? */
static bool raises(void)
{
    PyObject *module = PyImport_ImportModule("signal");
    PyObject *own = module != NULL ? PyObject_CallMethod(module, "getsignal", "i", SIGINT) : NULL;
    PyObject *usual = own != NULL ? PyObject_GetAttrString(module, "default_int_handler") : NULL;
    bool yes = usual != NULL && own == usual;
    Py_XDECREF(usual);
    Py_XDECREF(own);
    Py_XDECREF(module);
    PyErr_Clear();
    return yes;
}

void zs_py_signals_seen(void)
{
    atomic_store(&seen, atomic_load(&pressed));
}

/* gettid() needs glibc 2.30, and wheels are for older ones. */
bool zs_py_on_main_thread(void)
{
    return getpid() == (pid_t)syscall(SYS_gettid);
}

/* Was it pressed since the last forward? Python has raised for earlier ones. */
static bool pressed_meanwhile(void)
{
    unsigned count = atomic_load(&pressed);
    return atomic_exchange(&seen, count) != count;
}

/* What a signal has last raised in a wait of this thread: its type, to compare only. Later waits fail as well. */
static _Thread_local const PyObject *by_signal;

/* Runs the handlers of signals; true with their exception. */
static bool handle_signals(void)
{
    bool raised = PyErr_CheckSignals() != 0;
    by_signal = raised ? PyErr_Occurred() : NULL;
    return raised;
}

/* For other threads than the main one; those that run no backward, such as one that saves, continue. */
static bool was_pressed(void)
{
    if (zs_py_on_main_thread() || !zs_in_backward()) return false;
    zs_py_signals_watch();
    return pressed_meanwhile() && raises();
}

/* What a hook or step has raised is set aside meanwhile: this rank completes its rounds, for which peers wait. */
bool zs_py_interrupted(void)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    bool again = type != NULL && type == by_signal, now = !again && handle_signals();
    bool yes = again || now || was_pressed();
    if (now) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    } else {
        PyErr_Restore(type, value, trace);
    }
    PyGILState_Release(gil);
    return yes;
}
