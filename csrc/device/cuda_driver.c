/* cuda_driver.c - see cuda_driver.h. */
#define _GNU_SOURCE 1
#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OLDEST_DRIVER = 12000 }; /* CUDA 12.0: kernels that belong to no context came with it */

typedef zs_cu_result get_proc_address(const char *, void **, int, uint64_t, int *);

static struct {
    pthread_once_t once;
    zs_cu_table table;
    void *(*host_stream)(void); /* of a fake driver only */
    zs_cuda_info info;
    char words[1024]; /* info.words */
} driver = {.once = PTHREAD_ONCE_INIT};

/* The first error that spoiled the context. */
static struct {
    pthread_mutex_t lock;
    atomic_bool set;
    char words[512];
} spoiled = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct {
    pthread_mutex_t lock;
    /* Retained for good: a context that is given back while others run is lost to torch. */
    zs_cu_context of[ZS_CUDA_MAX_DEVICES];
} primary = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* --- finding the driver ------------------------------------------------------------------------------------------- */

static void off(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Says why CUDA is off. */
static void off(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(driver.words, sizeof driver.words, fmt, args);
    va_end(args);
}

/* Puts one function into the table. A function that the driver lacks stays NULL. */
static bool find(get_proc_address *get, const char *name, int version, void *field)
{
    void *function = NULL;
    zs_cu_result result = get(name, &function, version, ZS_CU_GET_PROC_ADDRESS_LEGACY_STREAM, NULL);
    if (result != ZS_CU_SUCCESS) function = NULL;
    memcpy(field, &function, sizeof function);
    return function != NULL;
}

/* The first needed function that is missing; NULL if all are there. */
static const char *fill_table(get_proc_address *get)
{
    const char *missing = NULL;
#define NEED(name, version, parameters) \
    if (!find(get, #name, version, &driver.table.name) && missing == NULL) missing = #name;
#define MAY_HAVE(name, version, parameters) (void)find(get, #name, version, &driver.table.name);
    ZS_CU_CALLS(NEED)
    ZS_CU_OPTIONAL_CALLS(MAY_HAVE)
    (void)find(get, "fakeHostStream", 0, &driver.host_stream);
#undef NEED
#undef MAY_HAVE
    return missing;
}

static const char *name_of(zs_cu_result result)
{
    const char *name = NULL;
    if (driver.table.cuGetErrorName == NULL || driver.table.cuGetErrorName(result, &name) != ZS_CU_SUCCESS) name = NULL;
    return name != NULL ? name : "unrecognized CUDA error";
}

static const char *text_of(zs_cu_result result)
{
    const char *text = NULL;
    if (driver.table.cuGetErrorString == NULL || driver.table.cuGetErrorString(result, &text) != ZS_CU_SUCCESS)
        text = NULL;
    return text != NULL ? text : "no description";
}

static bool start(void)
{
    zs_cu_result result = driver.table.cuInit(0);
    if (result == ZS_CU_SUCCESS) result = driver.table.cuDeviceGetCount(&driver.info.devices);
    if (result == ZS_CU_SUCCESS && driver.info.devices == 0) result = ZS_CU_ERROR_NO_DEVICE;
    if (result == ZS_CU_SUCCESS) return true;
    driver.info.devices = 0;
    off("cannot initialize the CUDA driver %s: %s (%u): %s; check that nvidia-smi lists a GPU and that "
        "CUDA_VISIBLE_DEVICES does not hide it",
        driver.info.path, name_of(result), result, text_of(result));
    return false;
}

static void open_driver(void)
{
    const char *wanted = getenv("ZSHARD_CUDA_LIB");
    bool named = wanted != NULL && wanted[0] != '\0';
    driver.info.path = strdup(named ? wanted : "libcuda.so.1");
    driver.info.words = driver.words;
    if (driver.info.path == NULL) {
        driver.info.path = "libcuda.so.1";
        off("out of memory");
        return;
    }
    void *library = dlopen(driver.info.path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        off("CUDA driver not found: %s; %s", why != NULL ? why : driver.info.path,
            named ? "unset ZSHARD_CUDA_LIB, or set it to a libcuda.so.1"
                  : "install the NVIDIA driver, or give the container access to the GPUs (docker run --gpus all)");
        return;
    }
    get_proc_address *get;
    void *symbol = dlsym(library, "cuGetProcAddress_v2");
    memcpy(&get, &symbol, sizeof get);
    const char *missing = get != NULL ? fill_table(get) : "cuGetProcAddress_v2";
    if (driver.table.cuDriverGetVersion != NULL) (void)driver.table.cuDriverGetVersion(&driver.info.version);
    if (missing != NULL || driver.info.version < OLDEST_DRIVER) {
        off("the CUDA driver %s (CUDA %d.%d) is too old%s%s: upgrade to driver 525 (CUDA %d.%d) or newer",
            driver.info.path, driver.info.version / 1000, driver.info.version % 1000 / 10,
            missing != NULL ? ", it lacks " : "", missing != NULL ? missing : "", OLDEST_DRIVER / 1000,
            OLDEST_DRIVER % 1000 / 10);
        return;
    }
    driver.info.found = true;
    (void)start();
}

zs_status zs_cuda_load(void)
{
    (void)pthread_once(&driver.once, open_driver);
    if (driver.words[0] != '\0') return ZS_FAIL(ZS_ERR_CUDA, "%s", driver.words);
    return ZS_OK;
}

void zs_cuda_describe(zs_cuda_info *info)
{
    (void)pthread_once(&driver.once, open_driver);
    *info = driver.info;
}

const zs_cu_table *zs_cuda_table(void)
{
    return &driver.table;
}

zs_cu_stream zs_cuda_host_stream(void)
{
    return driver.host_stream != NULL ? driver.host_stream() : NULL;
}

/* --- errors ------------------------------------------------------------------------------------------------------- */

/* Is the context lost after this error? (Per the driver's documentation: "the process must be terminated".) */
static bool spoils(zs_cu_result result)
{
    switch (result) {
    case ZS_CU_ERROR_ECC_UNCORRECTABLE:
    case ZS_CU_ERROR_NVLINK_UNCORRECTABLE:
    case ZS_CU_ERROR_CONTAINED:
    case ZS_CU_ERROR_ILLEGAL_ADDRESS:
    case ZS_CU_ERROR_LAUNCH_TIMEOUT:
    case ZS_CU_ERROR_CONTEXT_IS_DESTROYED:
    case ZS_CU_ERROR_ASSERT:
    case ZS_CU_ERROR_HARDWARE_STACK_ERROR:
    case ZS_CU_ERROR_ILLEGAL_INSTRUCTION:
    case ZS_CU_ERROR_MISALIGNED_ADDRESS:
    case ZS_CU_ERROR_INVALID_ADDRESS_SPACE:
    case ZS_CU_ERROR_INVALID_PC:
    case ZS_CU_ERROR_LAUNCH_FAILED:
    case ZS_CU_ERROR_TENSOR_MEMORY_LEAK:
    case ZS_CU_ERROR_MPS_CLIENT_TERMINATED:
    case ZS_CU_ERROR_EXTERNAL_DEVICE: return true;
    default: return false;
    }
}

static void remember(const char *call, zs_cu_result result)
{
    if (!spoils(result)) return;
    (void)pthread_mutex_lock(&spoiled.lock);
    if (!atomic_load(&spoiled.set)) {
        snprintf(spoiled.words, sizeof spoiled.words, "%s: %s (%u): %s", call, name_of(result), result,
                 text_of(result));
        atomic_store(&spoiled.set, true);
    }
    (void)pthread_mutex_unlock(&spoiled.lock);
}

zs_status zs_cuda_check(const char *call, zs_cu_result result)
{
    if (result == ZS_CU_SUCCESS) return ZS_OK;
    remember(call, result);
    if (result == ZS_CU_ERROR_OUT_OF_MEMORY)
        return zs_fail(ZS_ERR_MEMORY, "%s: the GPU is out of memory (%s)", call, name_of(result));
    return zs_fail(ZS_ERR_CUDA, "%s: %s (%u): %s", call, name_of(result), result, text_of(result));
}

zs_status zs_cuda_alive(void)
{
    if (!atomic_load_explicit(&spoiled.set, memory_order_acquire)) return ZS_OK;
    return zs_fail(ZS_ERR_CUDA, "CUDA is unusable in this process after an earlier error: %s; restart the process",
                   spoiled.words);
}

zs_cu_result zs_cuda_note(zs_cu_result result)
{
    remember("a call that releases a resource", result);
    return result;
}

/* --- contexts, devices, events ------------------------------------------------------------------------------------ */

/* The primary context of a device, retained when it is first asked for. */
static zs_status primary_of(int ordinal, zs_cu_context *out)
{
    if (ordinal < 0 || ordinal >= driver.info.devices || ordinal >= ZS_CUDA_MAX_DEVICES)
        return ZS_FAIL(ZS_ERR_VALUE, "CUDA device %d is out of range: the driver reports %d devices", ordinal,
                       driver.info.devices);
    zs_status status = ZS_OK;
    (void)pthread_mutex_lock(&primary.lock);
    if (primary.of[ordinal] == NULL) {
        zs_cu_device device;
        status = ZS_CU(cuDeviceGet, &device, ordinal);
        ZS_THEN(status, ZS_CU(cuDevicePrimaryCtxRetain, &primary.of[ordinal], device));
    }
    *out = primary.of[ordinal];
    (void)pthread_mutex_unlock(&primary.lock);
    return status;
}

zs_status zs_cuda_enter(int ordinal)
{
    ZS_TRY(zs_cuda_load());
    zs_cu_context context = NULL;
    ZS_TRY(ZS_CU(cuCtxGetCurrent, &context));
    if (context != NULL) return ZS_OK;
    ZS_TRY(primary_of(ordinal, &context));
    return ZS_CU(cuCtxSetCurrent, context);
}

zs_status zs_cuda_describe_device(int ordinal, zs_cuda_device *out)
{
    zs_cu_device device;
    ZS_TRY(zs_cuda_load());
    ZS_TRY(ZS_CU(cuDeviceGet, &device, ordinal));
    ZS_TRY(ZS_CU(cuDeviceGetName, out->name, (int)sizeof out->name, device));
    ZS_TRY(ZS_CU(cuDeviceGetAttribute, &out->major, ZS_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    ZS_TRY(ZS_CU(cuDeviceGetAttribute, &out->minor, ZS_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    return ZS_CU(cuDeviceGetAttribute, &out->multiprocessors, ZS_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
}

zs_status zs_cuda_event_done(zs_cu_event event, bool *done)
{
    ZS_TRY(zs_cuda_alive());
    zs_cu_result result = driver.table.cuEventQuery(event);
    *done = result == ZS_CU_SUCCESS;
    return result == ZS_CU_ERROR_NOT_READY ? ZS_OK : zs_cuda_check("cuEventQuery", result);
}

bool zs_cuda_event_passed(zs_cu_event event)
{
    zs_cu_capture_mode mode = ZS_CU_STREAM_CAPTURE_MODE_RELAXED;
    bool done = true;
    if (ZS_CU(cuThreadExchangeStreamCaptureMode, &mode) != ZS_OK || zs_cuda_event_done(event, &done) != ZS_OK)
        return true;
    return done;
}
