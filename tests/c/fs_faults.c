/* fs_faults.c - see fs_faults.h.
 *
 * An entry of the log is a line, `call pid fd errno offset length a b c`, and behind it a bytes of the path, b of the other path
 * and c of what was written. Each entry is one write to a file that is open for appending: ranks may share a log, and the order
 * of its entries is one in which the calls can have happened.
 */
#define _GNU_SOURCE /* kill, writev */
#include "fs_faults.h"

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

typedef enum fault_kind { FAIL, SHORT, KILL, KILL_AFTER, KILL_SHORT } fault_kind;

static struct {
    _Atomic long calls; /* so far */
    _Atomic bool watch; /* anything below is in use. Else no lock is taken: a fork could leave it locked in the child */
    pthread_mutex_t lock;
    long first, last; /* those calls that suffer, from 1 on: none where last is 0 */
    fault_kind kind;
    int err;
    int log; /* a descriptor, -1: there is none */
    int log_err;
} tests = {.lock = PTHREAD_MUTEX_INITIALIZER, .log = -1};

static const struct {
    const char *name;
    fault_kind kind;
    int err;
} faults[] = {
    {"EACCES", FAIL, EACCES},     {"EDQUOT", FAIL, EDQUOT}, {"EEXIST", FAIL, EEXIST},
    {"EINTR", FAIL, EINTR},       {"EINVAL", FAIL, EINVAL}, {"EIO", FAIL, EIO},
    {"EMFILE", FAIL, EMFILE},     {"ENOENT", FAIL, ENOENT}, {"ENOSPC", FAIL, ENOSPC},
    {"ENOSYS", FAIL, ENOSYS},     {"EROFS", FAIL, EROFS},   {"EOPNOTSUPP", FAIL, EOPNOTSUPP},
    {"killafter", KILL_AFTER, 0}, {"kill", KILL, 0},        {"killshort", KILL_SHORT, 0},
    {"short", SHORT, 0},
};

static zs_status find_fault(const char *what, fault_kind *kind, int *err)
{
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        if (strcmp(what, faults[i].name) != 0) continue;
        *kind = faults[i].kind;
        *err = faults[i].err;
        return ZS_OK;
    }
    return ZS_FAIL(ZS_ERR_VALUE, "there is no fault '%s': an errno by name, short, kill, killafter or killshort", what);
}

zs_status zs_fs_set_faults(long nth, const char *what, long times, long *calls)
{
    fault_kind kind = FAIL;
    int err = 0;
    if (nth < 0 || times < 1 || times > LONG_MAX - nth)
        return ZS_FAIL(ZS_ERR_VALUE, "no call is number %ld, or %ld times", nth, times);
    if (nth > 0) ZS_TRY(find_fault(what, &kind, &err));
    pthread_mutex_lock(&tests.lock);
    *calls = atomic_exchange(&tests.calls, 0);
    tests.first = nth;
    tests.last = nth == 0 ? 0 : nth + times - 1;
    tests.kind = kind;
    tests.err = err;
    tests.watch = nth != 0 || tests.log >= 0;
    pthread_mutex_unlock(&tests.lock);
    return ZS_OK;
}

zs_status zs_fs_set_log(const char *path)
{
    int log = path == NULL ? -1 : open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (path != NULL && log < 0) return ZS_FAIL_ERRNO("opening a log of calls");
    pthread_mutex_lock(&tests.lock);
    int old = tests.log, err = tests.log_err;
    tests.log = log;
    tests.log_err = 0;
    tests.watch = log >= 0 || tests.last != 0;
    pthread_mutex_unlock(&tests.lock);
    if (old >= 0) close(old);
    if (err == 0) return ZS_OK;
    errno = err;
    return ZS_FAIL_ERRNO("the log of calls lacks some");
}

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
    bool suffers = call >= tests.first && call <= tests.last;
    fault_kind kind = tests.kind;
    if (suffers && kind == FAIL) fate.err = tests.err;
    pthread_mutex_unlock(&tests.lock);
    if (!suffers) return fate;
    if (kind == KILL) die();
    fate.half = kind == SHORT || kind == KILL_SHORT;
    fate.kill_after = kind == KILL_AFTER || kind == KILL_SHORT;
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

const zs_fs_watcher zs_fs_faults = {before, after};
