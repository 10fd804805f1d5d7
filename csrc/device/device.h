/* device.h - a device with flat memory, and arithmetic over it: sums of all ranks' parts, casts, norms, scaling,
 * copies.
 *
 * One table for each kind of device, so that units, schedule and optimizers are the same code on all of them. On the
 * CPU a call has done its work when it returns. On a device that queues (CUDA) it has put it into a stream: a queue
 * whose work runs in order, while the host continues; a stream that needs another one's results waits by zs_device_fork
 * or zs_device_join. The host waits only where a function's comment says so.
 *
 * Every sum over ranks is taken here, in fp32 (fp64 for fp64), in rank order, for every wire dtype, so that all
 * transports and all runs give the same bits.
 */
#ifndef ZS_DEVICE_H
#define ZS_DEVICE_H

#include "base/exact.h"
#include "base/memory.h"
#include "base/status.h"
#include "shim/tensor.h"

/* Queues of a device that queues; on the CPU they mean nothing. */
typedef enum zs_stream {
    ZS_STREAM_COMPUTE, /* torch's current stream of this thread: where forward and backward compute */
    ZS_STREAM_GATHER,  /* parameters on their way here */
    ZS_STREAM_REDUCE,  /* gradients on their way, and their sums */
    ZS_STREAMS
} zs_stream;

/* Sums `world` sources elementwise in rank order: dst[i] = sum_r (src[r][i] + prev) * scale, with prev = dst[i] if
 * `accumulate` else 0; a NULL source counts as zeros. Sources are of `dtype`, dst of `to`, computed in fp32 (fp64 if
 * either is). dst may be one of the sources (same index, same dtype). On the CPU it uses torch's threads. */
typedef struct zs_sum {
    const void *const *src; /* [world] */
    int world;
    void *dst;
    int64_t numel;
    zs_dtype dtype, to;
    double scale;
    bool accumulate;
    int per_host; /* (CPU) so many neighbouring sources are summed first, unscaled; 0: none */
    /* (CPU) NULL, or the order in which to add, then to scale: `world` counts all ranks' sections. No -0 comes out, as
     * a source that is absent is as good as zeros. */
    const struct zs_tree *tree;
    zs_exact *squares; /* (CPU) NULL, or the results' squares are added to it, see zs_cpu_squares */
} zs_sum;

/* Copies `numel` numbers from `src` to `dst`, each rounded to the nearest of its dtype. Not for ZS_BYTES. */
typedef struct zs_cast {
    void *dst;
    const void *src;
    int64_t numel;
    zs_dtype to, from;
} zs_cast;

/* Flat numbers. */
typedef struct zs_numbers {
    void *data;
    int64_t numel;
    zs_dtype dtype; /* not ZS_BYTES */
} zs_numbers;

struct zs_update_job; /* jobs.h */
struct zs_constants_job;

/* Norms that stay on the device: all pointers are to its memory. */
typedef struct zs_norm_job {
    const zs_numbers *x; /* [n] on the host; read before the call returns */
    const double *parts; /* (zs_device_norm_join) [n] instead of `x` */
    size_t n;
    double p;       /* 1, 2 or infinity */
    double *result; /* gets the sum of |x|^p over all, or the largest |x|; not yet when the call returns */
    double *room;   /* ZS_NORM_ROOM + n doubles, until the work is done */
} zs_norm_job;

/* Doubles that a norm's partial sums take. */
enum { ZS_NORM_ROOM = (1 << 17) + (1 << 11) + (1 << 5) };

typedef struct zs_device zs_device;

/* The end of the work that a model has queued in the compute stream. */
typedef struct zs_trail {
    void *stream, *event; /* event NULL: nothing yet */
    bool open;            /* a pass is under way in `stream` */
    bool pending;         /* the event is the end of the last pass */
    bool captured;        /* the event was recorded in a capture */
} zs_trail;

typedef struct zs_device_ops {
    const char *name; /* "cpu", "cuda" */
    bool queues;
    zs_status (*mem_new)(const zs_device *, size_t bytes, zs_mem **out);
    zs_status (*mem_lend)(const zs_device *, size_t bytes, zs_mem **out);
    zs_status (*mem_new_host)(const zs_device *, size_t bytes, zs_mem **out); /* zeroed, pinned; NULL on the CPU */
    zs_status (*copy)(const zs_device *, zs_stream, void *dst, const void *src, size_t bytes);
    zs_status (*zero)(const zs_device *, zs_stream, void *dst, size_t bytes);
    zs_status (*sum)(const zs_device *, zs_stream, const zs_sum *);
    zs_status (*cast)(const zs_device *, zs_stream, const zs_cast *);
    zs_status (*scale)(const zs_device *, zs_stream, const zs_numbers *, double factor);
    zs_status (*norm)(const zs_device *, const zs_numbers *, size_t n, double p, double *out);
    zs_status (*same)(const zs_device *, const void *a, const void *b, size_t bytes, bool *out);
    /* NULL where nothing queues: these and what follows. */
    zs_status (*update)(const zs_device *, const struct zs_update_job *);
    zs_status (*constants)(const zs_device *, const struct zs_constants_job *);
    zs_status (*norm_queued)(const zs_device *, const zs_norm_job *);
    zs_status (*norm_join)(const zs_device *, const zs_norm_job *);
    zs_status (*scale_by)(const zs_device *, const zs_numbers *, const float *factor);
    zs_status (*capturing)(const zs_device *, bool *out);
    zs_status (*enter)(const zs_device *); /* makes it this thread's current GPU */
    void (*join_busy)(const zs_device *);  /* joins streams that were given work since they were; ignores failures */
    zs_status (*fork)(const zs_device *, zs_stream);
    zs_status (*join)(const zs_device *, zs_stream);
    zs_status (*wait)(const zs_device *);
    zs_status (*follow)(const zs_device *, zs_trail *, bool ends);
    void (*end_trail)(zs_trail *);
} zs_device_ops;

/* One device of this process. There is one object for each, for ever. */
struct zs_device {
    const zs_device_ops *ops;
    zs_where where; /* as torch calls it */
};

/* The host's processor and memory. */
const zs_device *zs_device_cpu(void);

/* The device that a block's memory belongs to. */
static inline const zs_device *zs_device_of(const zs_mem *mem)
{
    return mem->device != NULL ? mem->device : zs_device_cpu();
}

/* New block of `bytes` zeroed bytes there. ZS_ERR_MEMORY. */
static inline zs_status zs_device_mem_new(const zs_device *device, size_t bytes, zs_mem **out)
{
    return device->ops->mem_new(device, bytes, out);
}

/* New block of `bytes` for a part of a step, not zeroed, from the memory that tensors get and free. To free it costs
 * least between sessions, when streams are joined. ZS_ERR_MEMORY. */
static inline zs_status zs_device_mem_lend(const zs_device *device, size_t bytes, zs_mem **out)
{
    return device->ops->mem_lend(device, bytes, out);
}

/* Copies bytes within the device, or between it and host memory: host memory is read before it returns. */
static inline zs_status zs_device_copy(const zs_device *device, zs_stream stream, void *dst, const void *src,
                                       size_t bytes)
{
    return bytes > 0 ? device->ops->copy(device, stream, dst, src, bytes) : ZS_OK;
}

/* Zeroes bytes. */
static inline zs_status zs_device_zero(const zs_device *device, zs_stream stream, void *dst, size_t bytes)
{
    return bytes > 0 ? device->ops->zero(device, stream, dst, bytes) : ZS_OK;
}

/* Runs the sum that is described above. */
static inline zs_status zs_device_sum(const zs_device *device, zs_stream stream, const zs_sum *sum)
{
    return sum->numel > 0 ? device->ops->sum(device, stream, sum) : ZS_OK;
}

/* Runs the cast. */
static inline zs_status zs_device_cast(const zs_device *device, zs_stream stream, const zs_cast *cast)
{
    return cast->numel > 0 ? device->ops->cast(device, stream, cast) : ZS_OK;
}

/* x *= factor, in place. */
static inline zs_status zs_device_scale(const zs_device *device, zs_stream stream, const zs_numbers *x, double factor)
{
    return x->numel > 0 ? device->ops->scale(device, stream, x, factor) : ZS_OK;
}

/* Sum of |x|^p over `n` arrays in double (p = 1, 2), or max |x| for p = infinity; 0 of nothing; NaN and inf come
 * through. Waits for the compute stream, once. */
static inline zs_status zs_device_norm(const zs_device *device, const zs_numbers *x, size_t n, double p, double *out)
{
    return device->ops->norm(device, x, n, p, out);
}

/* The same, but the host does not wait; in the compute stream of a device that queues. The bits are those of
 * zs_device_norm there. */
static inline zs_status zs_device_norm_queued(const zs_device *device, const zs_norm_job *job)
{
    return device->ops->norm_queued(device, job);
}

/* Joins norms that were taken apart (`parts`), in their order. Needs no room. */
static inline zs_status zs_device_norm_join(const zs_device *device, const zs_norm_job *job)
{
    return device->ops->norm_join(device, job);
}

/* x *= *factor, a number on the device that queues, in its compute stream. */
static inline zs_status zs_device_scale_by(const zs_device *device, const zs_numbers *x, const float *factor)
{
    return x->numel > 0 ? device->ops->scale_by(device, x, factor) : ZS_OK;
}

/* Is work queued in the compute stream now captured in a CUDA graph, and not done? */
static inline zs_status zs_device_capturing(const zs_device *device, bool *out)
{
    *out = false;
    return device->ops->queues ? device->ops->capturing(device, out) : ZS_OK;
}

/* Two of them in one, the sums or the larger. */
static inline double zs_norm_join(double a, double b, double p)
{
    if (p == 1 || p == 2) return a + b;
    return a >= b || a != a ? a : b;
}

/* Are they equal byte for byte? Waits for the compute stream. */
static inline zs_status zs_device_same(const zs_device *device, const void *a, const void *b, size_t bytes, bool *out)
{
    return device->ops->same(device, a, b, bytes, out);
}

/* Later work in `stream` comes after all work that the compute stream has now. */
static inline zs_status zs_device_fork(const zs_device *device, zs_stream stream)
{
    return device->ops->queues && stream != ZS_STREAM_COMPUTE ? device->ops->fork(device, stream) : ZS_OK;
}

/* Later work in the compute stream comes after all work that `stream` has now. */
static inline zs_status zs_device_join(const zs_device *device, zs_stream stream)
{
    return device->ops->queues && stream != ZS_STREAM_COMPUTE ? device->ops->join(device, stream) : ZS_OK;
}

/* The host waits for all that is queued in the compute stream now. */
static inline zs_status zs_device_wait(const zs_device *device)
{
    return device->ops->queues ? device->ops->wait(device) : ZS_OK;
}

/* A script may run parts of a pass in several streams of torch's, and autograd then runs their backward there. Later
 * work in the compute stream comes after all work of the model's hooks so far, in any compute stream. */
static inline zs_status zs_device_follow(const zs_device *device, zs_trail *trail)
{
    return device->ops->queues ? device->ops->follow(device, trail, false) : ZS_OK;
}

/* The pass ends here: the next one comes after this. */
static inline zs_status zs_device_end_pass(const zs_device *device, zs_trail *trail)
{
    return device->ops->queues ? device->ops->follow(device, trail, true) : ZS_OK;
}

/* Frees the trail's event. */
static inline void zs_device_end_trail(const zs_device *device, zs_trail *trail)
{
    if (device->ops->queues) device->ops->end_trail(trail);
}

/* Counts bytes that an optimizer's step, a norm or a scaling reads from memory or writes there, and returns the bytes
 * of this process so far. */
uint64_t zs_count_bytes(uint64_t bytes);

/* Size of one element in bytes (1 for ZS_BYTES). */
size_t zs_dtype_size(zs_dtype dtype);

/* The dtype of a partial sum over some ranks that is sent on to the others: the one it is computed in. */
zs_dtype zs_dtype_of_partial_sum(zs_dtype dtype);

/* --- the loops of the CPU (device_cpu.c), which others use where memory is the host's for sure -------------------- */

/* As above. */
void zs_cpu_sum(const zs_sum *sum);
void zs_cpu_cast(const zs_cast *cast);
void zs_cpu_scale(const zs_numbers *x, double factor);
double zs_cpu_norm(const zs_numbers *x, double p);

/* --- sums of squares on the CPU (squares_cpu.c) ------------------------------------------------------------------- */

/* Adds the squares of `x`, whose first element begins a group of 32, to `sum`. */
void zs_cpu_squares(const zs_numbers *x, zs_exact *sum);

/* As zs_cpu_sum, and adds the squares of the results to sum->squares. */
void zs_cpu_sum_squared(const zs_sum *sum);

#endif
