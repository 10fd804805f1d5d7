/* device_cuda.c - see device_cuda.h. */
#include "device/device_cuda.h"

#include "device/cuda_driver.h"
#include "device/cuda_kernels.h"
#include "shim/torch_cuda.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef struct cuda_device {
    zs_device base; /* first */
    int index;
    bool on_host;
    zs_cu_stream streams[ZS_STREAMS]; /* [ZS_STREAM_COMPUTE]: not used */
    zs_cu_event forks[ZS_STREAMS], joins[ZS_STREAMS];
    atomic_bool busy[ZS_STREAMS]; /* given work since they were last joined */
    pthread_mutex_t lock;         /* of the rest */
    double *scratch;              /* device memory for norms: ZS_CUDA_NORM_SCRATCH, and the result; NULL: not yet */
    double *number;               /* pinned host memory for results */
} cuda_device;

static cuda_device *of(const zs_device *device)
{
    return (cuda_device *)(uintptr_t)device;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

static zs_status cuda_enter(const zs_device *device)
{
    return zs_cuda_enter(of(device)->index);
}

zs_status zs_device_cuda_stream(const zs_device *device, zs_stream stream, zs_cu_stream *out)
{
    const cuda_device *self = of(device);
    void *current = zs_cuda_host_stream();
    ZS_TRY(zs_cuda_enter(self->index));
    if (stream == ZS_STREAM_COMPUTE && !self->on_host) ZS_TRY(zs_torch_cuda_stream(self->index, &current));
    *out = stream == ZS_STREAM_COMPUTE ? current : self->streams[stream];
    if (stream != ZS_STREAM_COMPUTE) atomic_store(&of(device)->busy[stream], true);
    return ZS_OK;
}

zs_status zs_device_cuda_event_new(const zs_device *device, zs_cu_event *out)
{
    ZS_TRY(zs_cuda_enter(of(device)->index));
    return ZS_CU(cuEventCreate, out, ZS_CU_EVENT_DISABLE_TIMING);
}

void zs_device_cuda_event_free(zs_cu_event event)
{
    if (event != NULL) ZS_CU_FREE(cuEventDestroy, event);
}

zs_status zs_device_cuda_record(const zs_device *device, zs_stream stream, zs_cu_event event)
{
    zs_cu_stream handle;
    ZS_TRY(zs_device_cuda_stream(device, stream, &handle));
    return ZS_CU(cuEventRecord, event, handle);
}

zs_status zs_device_cuda_await(const zs_device *device, zs_stream stream, zs_cu_event event)
{
    zs_cu_stream handle;
    ZS_TRY(zs_device_cuda_stream(device, stream, &handle));
    return ZS_CU(cuStreamWaitEvent, handle, event, 0);
}

bool zs_device_cuda_passed(const zs_device *device, zs_cu_event event)
{
    bool done = zs_cuda_enter(of(device)->index) != ZS_OK || zs_cuda_event_passed(event);
    zs_clear_error();
    return done;
}

/* A wait is for the event's record at the time of queueing, so one event per direction can be recorded again at
 * once. */
static zs_status cuda_fork(const zs_device *device, zs_stream stream)
{
    ZS_TRY(zs_device_cuda_record(device, ZS_STREAM_COMPUTE, of(device)->forks[stream]));
    return zs_device_cuda_await(device, stream, of(device)->forks[stream]);
}

static zs_status is_capturing(zs_cu_stream stream, bool *out)
{
    zs_cu_capture_status status = ZS_CU_STREAM_CAPTURE_STATUS_NONE;
    ZS_TRY(ZS_CU(cuStreamIsCapturing, stream, &status));
    *out = status != ZS_CU_STREAM_CAPTURE_STATUS_NONE; /* or broken: the next call reports it */
    return ZS_OK;
}

static zs_status cuda_capturing(const zs_device *device, bool *out)
{
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_COMPUTE, &stream));
    return is_capturing(stream, out);
}

/* The host is about to wait for numbers, which a capture does not compute. */
static zs_status refuse_capture(zs_cu_stream handle, const char *what)
{
    bool capturing = false;
    ZS_TRY(is_capturing(handle, &capturing));
    if (!capturing) return ZS_OK;
    return ZS_FAIL(
        ZS_ERR_UNSUPPORTED,
        "cannot read %s on the host during CUDA graph capture: docs/gpus.md lists what a captured step may do", what);
}

/* A stream outside of the compute stream's capture holds no work to wait for: the session that queued earlier work has
 * joined it. */
static zs_status cuda_join(const zs_device *device, zs_stream stream)
{
    bool capturing = false, both = true;
    ZS_TRY(cuda_capturing(device, &capturing));
    if (capturing) ZS_TRY(is_capturing(of(device)->streams[stream], &both));
    if (!both) return ZS_OK;
    ZS_TRY(zs_device_cuda_record(device, stream, of(device)->joins[stream]));
    ZS_TRY(zs_device_cuda_await(device, ZS_STREAM_COMPUTE, of(device)->joins[stream]));
    atomic_store(&of(device)->busy[stream], false);
    return ZS_OK;
}

static zs_status cuda_wait(const zs_device *device)
{
    zs_cu_stream handle;
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_COMPUTE, &handle));
    ZS_TRY(refuse_capture(handle, "model data"));
    return ZS_CU(cuStreamSynchronize, handle);
}

static zs_status cuda_follow(const zs_device *device, zs_trail *trail, bool ends)
{
    zs_cu_stream now;
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_COMPUTE, &now));
    return ends ? zs_cuda_trail_end_pass(trail, now) : zs_cuda_trail_follow(trail, now);
}

static void cuda_join_busy(const zs_device *device)
{
    bool failed = zs_last_status() != ZS_OK;
    for (zs_stream stream = ZS_STREAM_COMPUTE + 1; stream < ZS_STREAMS; stream++)
        if (atomic_load(&of(device)->busy[stream])) (void)cuda_join(device, stream);
    if (!failed) zs_clear_error();
}

static zs_cu_ptr address(const void *ptr)
{
    return (zs_cu_ptr)(uintptr_t)ptr;
}

static zs_status cuda_copy(const zs_device *device, zs_stream stream, void *dst, const void *src, size_t bytes)
{
    zs_cu_stream handle;
    ZS_TRY(zs_device_cuda_stream(device, stream, &handle));
    return ZS_CU(cuMemcpyAsync, address(dst), address(src), bytes, handle);
}

static zs_status cuda_zero(const zs_device *device, zs_stream stream, void *dst, size_t bytes)
{
    zs_cu_stream handle;
    ZS_TRY(zs_device_cuda_stream(device, stream, &handle));
    return ZS_CU(cuMemsetD8Async, address(dst), 0, bytes, handle);
}

/* --- arithmetic --------------------------------------------------------------------------------------------------- */

static zs_status cuda_sum(const zs_device *device, zs_stream stream, const zs_sum *sum)
{
    zs_cu_stream handle;
    ZS_TRY(zs_device_cuda_stream(device, stream, &handle));
    return zs_cuda_sum(sum, handle);
}

static zs_status cuda_cast(const zs_device *device, zs_stream stream, const zs_cast *cast)
{
    zs_cu_stream handle;
    ZS_TRY(zs_device_cuda_stream(device, stream, &handle));
    return zs_cuda_cast(cast, false, handle);
}

static zs_status cuda_scale(const zs_device *device, zs_stream stream, const zs_numbers *x, double factor)
{
    zs_cu_stream handle;
    ZS_TRY(zs_device_cuda_stream(device, stream, &handle));
    return zs_cuda_scale(x, factor, NULL, handle);
}

static zs_status cuda_update(const zs_device *device, const zs_update_job *job)
{
    zs_cu_stream stream;
    zs_cuda_update_job on_gpu = {.rule = job->rule, .full = job->full, .runs = job->run, .n_runs = job->n_runs};
    if (job->live != NULL) {
        on_gpu.live = true;
        on_gpu.grad_factor = job->live->grad_factor;
        on_gpu.found_inf = job->live->found_inf;
    }
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_COMPUTE, &stream));
    return zs_cuda_update(&on_gpu, stream);
}

static zs_status cuda_constants(const zs_device *device, const zs_constants_job *job)
{
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_COMPUTE, &stream));
    return zs_cuda_constants_make(job, stream);
}

static zs_status cuda_scale_by(const zs_device *device, const zs_numbers *x, const float *factor)
{
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_COMPUTE, &stream));
    return zs_cuda_scale(x, 1, factor, stream);
}

static zs_status cuda_norm_join(const zs_device *device, const zs_norm_job *job)
{
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_COMPUTE, &stream));
    return zs_cuda_norm_join(job->parts, (int64_t)job->n, job->p, job->result, stream);
}

static zs_status cuda_norm_queued(const zs_device *device, const zs_norm_job *job)
{
    zs_cu_stream stream;
    double *each = job->room + ZS_CUDA_NORM_SCRATCH;
    ZS_TRY(zs_device_cuda_stream(device, ZS_STREAM_COMPUTE, &stream));
    for (size_t i = 0; i < job->n; i++) {
        zs_cuda_norm_job one = {job->x[i], job->p, each + i, job->room};
        ZS_TRY(zs_cuda_norm(&one, stream));
    }
    return zs_cuda_norm_join(each, (int64_t)job->n, job->p, job->result, stream);
}

enum { NORMS = 1024 }; /* arrays whose norms are joined at a time */

static zs_status make_scratch(cuda_device *self)
{
    if (self->scratch != NULL) return ZS_OK;
    zs_cu_ptr ptr = 0;
    void *number = NULL;
    ZS_TRY(ZS_CU(cuMemHostAlloc, &number, sizeof *self->number, ZS_CU_MEMHOSTALLOC_PORTABLE));
    self->number = number; /* for as long as the process */
    ZS_TRY(ZS_CU(cuMemAlloc, &ptr, (ZS_CUDA_NORM_SCRATCH + NORMS + 1) * sizeof *self->scratch));
    self->scratch = (double *)(uintptr_t)ptr; /* NOLINT */
    return ZS_OK;
}

/* Brings one number of the scratch memory to the host. */
static zs_status fetch(cuda_device *self, const double *from, zs_cu_stream stream)
{
    ZS_TRY(refuse_capture(stream, "a number (a norm, or whether memory was changed)"));
    ZS_TRY(ZS_CU(cuMemcpyDtoHAsync, self->number, address(from), sizeof *from, stream));
    return ZS_CU(cuStreamSynchronize, stream);
}

/* At most NORMS arrays. */
static zs_status norms_locked(cuda_device *self, const zs_numbers *x, size_t n, double p, double *out)
{
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(&self->base, ZS_STREAM_COMPUTE, &stream));
    ZS_TRY(make_scratch(self));
    double *result = self->scratch + ZS_CUDA_NORM_SCRATCH + NORMS;
    zs_norm_job job = {.x = x, .n = n, .p = p, .result = result, .room = self->scratch};
    ZS_TRY(cuda_norm_queued(&self->base, &job));
    ZS_TRY(fetch(self, result, stream));
    *out = *self->number;
    return ZS_OK;
}

static zs_status cuda_norm(const zs_device *device, const zs_numbers *x, size_t n, double p, double *out)
{
    cuda_device *self = of(device);
    zs_status status = ZS_OK;
    *out = 0;
    pthread_mutex_lock(&self->lock);
    for (size_t at = 0; at < n && status == ZS_OK; at += NORMS) {
        double part = 0;
        status = norms_locked(self, x + at, n - at < NORMS ? n - at : NORMS, p, &part);
        *out = zs_norm_join(*out, part, p);
    }
    pthread_mutex_unlock(&self->lock);
    return status;
}

static zs_status same_locked(cuda_device *self, const void *a, const void *b, size_t bytes, bool *out)
{
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(&self->base, ZS_STREAM_COMPUTE, &stream));
    ZS_TRY(make_scratch(self));
    uint32_t *flag = (uint32_t *)(void *)self->scratch;
    ZS_TRY(ZS_CU(cuMemsetD8Async, address(flag), 0, sizeof *self->scratch, stream));
    ZS_TRY(zs_cuda_differs(a, b, bytes, flag, stream));
    ZS_TRY(fetch(self, self->scratch, stream));
    *out = *(const uint32_t *)(const void *)self->number == 0;
    return ZS_OK;
}

static zs_status cuda_same(const zs_device *device, const void *a, const void *b, size_t bytes, bool *out)
{
    cuda_device *self = of(device);
    pthread_mutex_lock(&self->lock);
    zs_status status = same_locked(self, a, b, bytes, out);
    pthread_mutex_unlock(&self->lock);
    return status;
}

/* --- devices ------------------------------------------------------------------------------------------------------ */

static const zs_device_ops cuda_ops = {
    .name = "cuda",
    .queues = true,
    .mem_new = zs_cuda_mem_new,
    .mem_lend = zs_cuda_mem_lend,
    .mem_new_host = zs_cuda_mem_new_host,
    .copy = cuda_copy,
    .zero = cuda_zero,
    .sum = cuda_sum,
    .cast = cuda_cast,
    .scale = cuda_scale,
    .norm = cuda_norm,
    .same = cuda_same,
    .update = cuda_update,
    .constants = cuda_constants,
    .norm_queued = cuda_norm_queued,
    .norm_join = cuda_norm_join,
    .scale_by = cuda_scale_by,
    .capturing = cuda_capturing,
    .enter = cuda_enter,
    .join_busy = cuda_join_busy,
    .fork = cuda_fork,
    .join = cuda_join,
    .wait = cuda_wait,
    .follow = cuda_follow,
    .end_trail = zs_cuda_trail_end,
};

/* Gathers are waited for first, so theirs is the higher priority; either comes before torch's usual streams. */
static zs_status make_streams(cuda_device *self)
{
    int least = 0, greatest = 0;
    ZS_TRY(ZS_CU(cuCtxGetStreamPriorityRange, &least, &greatest));
    for (zs_stream stream = ZS_STREAM_COMPUTE + 1; stream < ZS_STREAMS; stream++) {
        int priority = stream == ZS_STREAM_GATHER || greatest == least ? greatest : greatest + 1;
        ZS_TRY(ZS_CU(cuStreamCreateWithPriority, &self->streams[stream], ZS_CU_STREAM_NON_BLOCKING, priority));
        ZS_TRY(zs_device_cuda_event_new(&self->base, &self->forks[stream]));
        ZS_TRY(zs_device_cuda_event_new(&self->base, &self->joins[stream]));
    }
    return ZS_OK;
}

static zs_status make_device(int index, bool on_host, cuda_device **out)
{
    ZS_TRY(zs_cuda_enter(index));
    ZS_TRY(zs_cuda_kernels_load());
    cuda_device *self = calloc(1, sizeof *self);
    if (self == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a device");
    self->base.ops = &cuda_ops;
    self->base.where = on_host ? (zs_where){ZS_ON_CPU, 0} : (zs_where){ZS_ON_CUDA, index};
    self->index = index;
    self->on_host = on_host;
    pthread_mutex_init(&self->lock, NULL);
    zs_status status = make_streams(self);
    if (status == ZS_OK)
        *out = self;
    else
        free(self); /* without its streams: the driver is of no use */
    return status;
}

zs_status zs_device_cuda(int index, bool on_host, const zs_device **out)
{
    static cuda_device *devices[ZS_CUDA_MAX_DEVICES][2];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (index < 0 || index >= ZS_CUDA_MAX_DEVICES) return ZS_FAIL(ZS_ERR_VALUE, "GPU index %d is out of range", index);
    pthread_mutex_lock(&lock);
    cuda_device *made = devices[index][on_host];
    zs_status status = made == NULL ? make_device(index, on_host, &made) : ZS_OK;
    if (status == ZS_OK) devices[index][on_host] = made;
    pthread_mutex_unlock(&lock);
    if (status == ZS_OK) *out = &made->base;
    return status;
}
