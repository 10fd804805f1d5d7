/* status.h - failure reports of every part of the C core.
 *
 * A function that can fail returns a zs_status, and the first failure on a thread leaves a record (what,
 * where, native text) that later failures on the way up do not overwrite. Python exceptions are made from that record
 * in the py_*.c files only.
 */
#ifndef ZS_STATUS_H
#define ZS_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum zs_status {
    ZS_OK = 0,
    ZS_ERR_VALUE,       /* bad input: Python ValueError */
    ZS_ERR_TYPE,        /* wrong kind of input: TypeError */
    ZS_ERR_STATE,       /* used in a way the state does not allow: RuntimeError */
    ZS_ERR_UNSUPPORTED, /* a feature that is not there: NotImplementedError */
    ZS_ERR_MEMORY,      /* out of memory or address space: MemoryError */
    ZS_ERR_SYSTEM,      /* a system call failed: OSError */
    ZS_ERR_SHARD,       /* an operation that a shard does not allow: zshard.ShardError */
    ZS_ERR_PEER,        /* another rank died or left: zshard.PeerError */
    ZS_ERR_TIMEOUT,     /* another rank did not come in time: zshard.PeerTimeoutError */
    ZS_ERR_DIVERGED,    /* the ranks did different things: zshard.DivergenceError */
    ZS_ERR_CUDA,        /* the CUDA driver is missing or refused a call: zshard.CudaError */
    ZS_ERR_NCCL,        /* NCCL failed: zshard.NcclError */
    ZS_ERR_TORCH,       /* an exception out of torch; may be a Python one that is already set */
} zs_status;

enum { ZS_LINES = 3072 }; /* room for a record's lines */

/* Records a failure of kind `status` and returns it. printf-style `fmt`. A record that is already there is kept. */
zs_status zs_fail(zs_status status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Like zs_fail for a failed system call: appends strerror(err) and remembers errno value `err`. */
zs_status zs_fail_errno(int err, const char *what);

/* The message of this thread's record; "" where there is none. Borrowed, valid until the next call on this thread. */
const char *zs_last_message(void);

/* Replaces the message of this thread's record, and keeps the rest. printf-style; the old message may be an argument.
 * Returns the record's status; ZS_OK without a record. */
zs_status zs_rephrase(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Adds lines to this thread's record, which follow its message in the exception; truncates them to fit. / They; "" if
 * there are none. Borrowed, valid until the next call on this thread. */
void zs_add_lines(const char *lines);
const char *zs_last_lines(void);

/* The kind of this thread's record, ZS_OK where there is none. */
zs_status zs_last_status(void);

/* The errno of the record, 0 if it was no system call. */
int zs_last_errno(void);

/* Forgets this thread's record; call before an operation that must report its own failure. */
void zs_clear_error(void);

#define ZS_FAIL(status, ...) zs_fail((status), __VA_ARGS__)
#define ZS_FAIL_ERRNO(what) zs_fail_errno(errno, (what))
#ifdef __clang_analyzer__ /* It reads one file at a time, and would take a failure for a possible ZS_OK. */
#undef ZS_FAIL
#undef ZS_FAIL_ERRNO
#define ZS_FAIL(status, ...) ((void)zs_fail((status), __VA_ARGS__), (status))
#define ZS_FAIL_ERRNO(what) ((void)zs_fail_errno(errno, (what)), ZS_ERR_SYSTEM)
#endif

/* Return the failure of `call` to the caller. */
#define ZS_TRY(call)                                        \
    do {                                                    \
        zs_status zs_try_status_ = (call);                  \
        if (zs_try_status_ != ZS_OK) return zs_try_status_; \
    } while (0)

/* One thing after the other: makes `call` unless one before has failed. The first failure stays in `status`. */
#define ZS_THEN(status, call)                     \
    do {                                          \
        if ((status) == ZS_OK) (status) = (call); \
    } while (0)

/* Makes `call` in any case. The first failure stays in `status`. */
#define ZS_ALSO(status, call)                              \
    do {                                                   \
        zs_status zs_also_status_ = (call);                \
        if ((status) == ZS_OK) (status) = zs_also_status_; \
    } while (0)

/* Keep the failure of `call` in `status` and jump to `label`. */
#define ZS_TRY_GOTO(status, call, label)   \
    do {                                   \
        (status) = (call);                 \
        if ((status) != ZS_OK) goto label; \
    } while (0)

#endif
