/* fake_cuda.c - a fake of libcuda.so.1: its calls. See fake_cuda.h for a description, and for injected failures.
 *
 * Each call begins with the same line, which makes a real driver's checks (is it started, has this thread a context),
 * injects failures, and writes the log. Streams and memory are in their own files.
 *
 * The library shows cuGetProcAddress_v2 alone of CUDA, as zshard asks for nothing else, and finds calls by the list
 * that zshard itself is made from; so a call that is not in the list is not there, and one whose signature changed does
 * not compile.
 */
#define _GNU_SOURCE 1
#include "fake_cuda.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOT_INITIALIZED = 3, INVALID_IMAGE = 200, IMAGE_MAGIC = (int)0xba55ed50, NAMED_ERROR_BYTES = 64 };

struct CUctx_st {
    int device;
};

static struct CUctx_st contexts[16];
static _Thread_local zs_cu_context current;
static pid_t started; /* by which process; a fork of it has no CUDA */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

long fake_number(const char *name, long usual)
{
    const char *value = getenv(name);
    return value != NULL ? atol(value) : usual;
}

/* A call that gives one thing. */
#define GIVES(call, parameters, in_context, thing) \
    zs_cu_result fake_##call parameters            \
    {                                              \
        BEGIN(in_context, "-");                    \
        *out = (thing);                            \
        return ZS_CU_SUCCESS;                      \
    }

/* --- the begin of each call --------------------------------------------------------------------------------------- */

/* The error if this is the call that must fail. */
static zs_cu_result told_to_fail(const char *call)
{
    static char spec[128];
    static int calls;
    const char *now = getenv("FAKE_CUDA_FAIL");
    zs_cu_result result = ZS_CU_SUCCESS;
    (void)pthread_mutex_lock(&lock);
    if (strncmp(now != NULL ? now : "", spec, sizeof spec - 1) != 0) {
        snprintf(spec, sizeof spec, "%s", now != NULL ? now : "");
        calls = 0;
    }
    char name[64] = "";
    int wanted = 0;
    unsigned with = ZS_CU_ERROR_UNKNOWN;
    if (sscanf(spec, "%63[^:]:%d:%u", name, &wanted, &with) >= 2 && strcmp(name, call) == 0 && ++calls == wanted)
        result = with;
    (void)pthread_mutex_unlock(&lock);
    return result;
}

__attribute__((format(printf, 2, 0))) static void write_log(const char *call, const char *fmt, va_list args)
{
    const char *path = getenv("FAKE_CUDA_LOG");
    if (path == NULL || path[0] == '\0') return;
    char line[9000];
    int n = snprintf(line, sizeof line, "%s ", call);
    n += vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, args);
    if (n > (int)sizeof line - 2) n = (int)sizeof line - 2;
    line[n++] = '\n';
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0 && write(fd, line, (size_t)n) != n) abort(); /* a torn log would mislead a test */
    if (fd >= 0) (void)close(fd);
}

zs_cu_result fake_begin(const char *call, bool in_context, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    write_log(call, fmt, args);
    va_end(args);
    zs_cu_result result = told_to_fail(call);
    if (result != ZS_CU_SUCCESS) return result;
    if (started != getpid()) return NOT_INITIALIZED;
    return in_context && current == NULL ? ZS_CU_ERROR_INVALID_CONTEXT : ZS_CU_SUCCESS;
}

/* --- devices, contexts, errors ------------------------------------------------------------------------------------ */

zs_cu_result fake_cuInit(unsigned int flags)
{
    zs_cu_result result = fake_begin("cuInit", false, "flags=%u", flags);
    if (result != ZS_CU_SUCCESS && result != NOT_INITIALIZED) return result;
    if (fake_number("FAKE_CUDA_DEVICES", 1) == 0) return ZS_CU_ERROR_NO_DEVICE;
    started = getpid();
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuDriverGetVersion(int *out)
{
    *out = (int)fake_number("FAKE_CUDA_VERSION", 13000);
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuGetErrorName(zs_cu_result result, const char **out)
{
    static _Thread_local char name[NAMED_ERROR_BYTES];
    snprintf(name, sizeof name, result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE_%u", result);
    *out = name;
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuGetErrorString(zs_cu_result result, const char **out)
{
    static _Thread_local char text[NAMED_ERROR_BYTES];
    snprintf(text, sizeof text, "fake error %u", result);
    *out = text;
    return ZS_CU_SUCCESS;
}

GIVES(cuDeviceGetCount, (int *out), false, (int)fake_number("FAKE_CUDA_DEVICES", 1))
GIVES(cuDevicePrimaryCtxRetain, (zs_cu_context * out, zs_cu_device device), false, &contexts[device % 16])
GIVES(cuCtxGetCurrent, (zs_cu_context * out), false, current)
GIVES(cuCtxGetDevice, (zs_cu_device * out), true, current->device)
GIVES(cuKernelGetFunction, (zs_cu_function * out, zs_cu_kernel kernel), true, (zs_cu_function)kernel)

zs_cu_result fake_cuDeviceGet(zs_cu_device *out, int ordinal)
{
    BEGIN(false, "ordinal=%d", ordinal);
    *out = ordinal;
    contexts[ordinal & 15].device = ordinal;
    return ordinal >= 0 && ordinal < fake_number("FAKE_CUDA_DEVICES", 1) ? ZS_CU_SUCCESS : 101;
}

zs_cu_result fake_cuDeviceGetName(char *out, int size, zs_cu_device device)
{
    BEGIN(false, "device=%d", device);
    snprintf(out, (size_t)size, "Fake GPU");
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuDeviceGetAttribute(int *out, zs_cu_attribute attribute, zs_cu_device device)
{
    BEGIN(false, "attribute=%u device=%d", attribute, device);
    switch (attribute) {
    case ZS_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *out = (int)fake_number("FAKE_CUDA_MULTIPROCESSORS", 2);
        return ZS_CU_SUCCESS;
    case ZS_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = 9; return ZS_CU_SUCCESS;
    case ZS_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = 0; return ZS_CU_SUCCESS;
    default: return ZS_CU_ERROR_INVALID_VALUE;
    }
}

zs_cu_result fake_cuCtxSetCurrent(zs_cu_context context)
{
    BEGIN(false, "-");
    current = context;
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    BEGIN(true, "-");
    *least = 0;
    *greatest = -5;
    return ZS_CU_SUCCESS;
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

zs_cu_result fake_cuLibraryLoadData(zs_cu_library *out, const void *image, zs_cu_jit_option *options, void **values,
                                    unsigned int n, zs_cu_library_option *library_options, void **library_values,
                                    unsigned int n_library)
{
    BEGIN(false, "-");
    int magic;
    memcpy(&magic, image, sizeof magic);
    *out = (zs_cu_library)&contexts; /* something that is not NULL */
    bool plain = !options && !values && !library_options && !library_values && n + n_library == 0;
    /* A build without CUDA trains on fakes too; to a driver its text is no image. */
    bool none = getenv("ZSHARD_CUDA_ON_HOST") != NULL && strcmp(image, "// no kernels\n") == 0;
    return plain && (magic == IMAGE_MAGIC || none) ? ZS_CU_SUCCESS : INVALID_IMAGE;
}

zs_cu_result fake_cuLibraryUnload(zs_cu_library library)
{
    BEGIN(false, "-");
    return GOOD(library != NULL);
}

zs_cu_result fake_cuLibraryGetKernel(zs_cu_kernel *out, zs_cu_library library, const char *name)
{
    BEGIN(false, "kernel=%s", name);
    const fake_kernel *found = fake_kernel_find(name);
    memcpy(out, &found, sizeof found);
    return library != NULL && found != NULL ? ZS_CU_SUCCESS : ZS_CU_ERROR_NOT_FOUND;
}

zs_cu_result fake_cuFuncLoad(zs_cu_function function)
{
    BEGIN(true, "-");
    return GOOD(function != NULL);
}

/* A launch, as a stream keeps it. */
typedef struct launch {
    const fake_kernel *kernel;
    unsigned blocks, threads;
    _Alignas(16) char args[4096]; /* the most that a kernel takes */
} launch;

static void run_launch(const void *args)
{
    const launch *one = args;
    fake_kernel_run(one->kernel, one->blocks, one->threads, one->args);
}

/* The device's addresses among a kernel's arguments, as text. */
static const char *addresses(const void *args, size_t bytes, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    if (getenv("FAKE_CUDA_LOG") == NULL) return text;
    for (size_t i = 0; i + sizeof(zs_cu_ptr) <= bytes && used + 24 < size; i += sizeof(zs_cu_ptr)) {
        zs_cu_ptr word;
        memcpy(&word, (const char *)args + i, sizeof word);
        if (fake_known(word)) used += (size_t)snprintf(text + used, size - used, "%s%p", used > 0 ? "," : "", AT(word));
    }
    return text;
}

zs_cu_result fake_cuLaunchKernel(zs_cu_function function, unsigned int blocks, unsigned int y, unsigned int z,
                                 unsigned int threads, unsigned int ty, unsigned int tz, unsigned int shared,
                                 zs_cu_stream stream, void **parameters, void **extra)
{
    launch one = {.kernel = (const fake_kernel *)(const void *)function, .blocks = blocks, .threads = threads};
    char text[8000]; /* addresses in all of 4096 bytes */
    BEGIN(true, "stream=%d kernel=%s blocks=%u touches=%s", STREAM_ID, one.kernel->name, blocks,
          addresses(parameters[0], one.kernel->bytes, text, sizeof text));
    INTO_STREAM();
    bool flat = y == 1 && z == 1 && ty == 1 && tz == 1 && shared == 0 && extra == NULL;
    if (!flat || blocks == 0 || threads == 0 || threads > 1024 || one.kernel->bytes > sizeof one.args)
        return ZS_CU_ERROR_INVALID_VALUE;
    memcpy(one.args, parameters[0], one.kernel->bytes);
    fake_submit(stream, run_launch, &one, sizeof one);
    return ZS_CU_SUCCESS;
}

/* --- finding calls ------------------------------------------------------------------------------------------------ */

typedef void any_function(void);

static const struct {
    const char *name;
    any_function *function;
    int version; /* of its signature: with an earlier one a caller would get another */
} calls[] = {
#define ENTRY(name, version, parameters) {#name, (any_function *)fake_##name, version},
    ZS_CU_CALLS(ENTRY) ZS_CU_OPTIONAL_CALLS(ENTRY)
#undef ENTRY
        {"fakeHostStream", (any_function *)fake_host_stream, 0},
};

SHOWN zs_cu_result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *found);

zs_cu_result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *found)
{
    const char *missing = getenv("FAKE_CUDA_MISSING");
    any_function *function = NULL;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (strcmp(calls[i].name, name) == 0 && version >= calls[i].version) function = calls[i].function;
    if (missing != NULL && strcmp(missing, name) == 0) function = NULL;
    if (flags != ZS_CU_GET_PROC_ADDRESS_LEGACY_STREAM) return ZS_CU_ERROR_INVALID_VALUE;
    if (found != NULL) *found = function != NULL ? 0 : 1;
    memcpy(out, &function, sizeof function);
    return function != NULL ? ZS_CU_SUCCESS : ZS_CU_ERROR_NOT_FOUND;
}
