/* cuda_driver.h - the CUDA driver: found when the program runs, called through one table, its errors turned into
 * records.
 *
 * Nothing is linked. The driver is opened when CUDA is first needed, each call goes through ZS_CU, which says what
 * failed in the driver's own words, and an error after which the device's context is lost (an illegal address, a launch
 * that failed) is remembered: every later call fails with the first such record, and none touches the driver.
 */
#ifndef ZS_CUDA_DRIVER_H
#define ZS_CUDA_DRIVER_H

#include "base/status.h"
#include "device/cuda_api.h"

enum { ZS_CUDA_MAX_DEVICES = 64 }; /* the most devices of a process */

/* Facts about the driver. */
typedef struct zs_cuda_info {
    bool found;        /* its library was opened and has every call that is needed */
    int version;       /* CUDA version that it knows, 13010 is 13.1; 0 if it could not be asked */
    int devices;       /* how many it offers */
    const char *path;  /* the library that was asked for */
    const char *words; /* why CUDA is off; "" where it is not */
} zs_cuda_info;

/* Facts about one device. */
typedef struct zs_cuda_device {
    char name[128];
    int major, minor; /* compute capability */
    int multiprocessors;
} zs_cuda_device;

/* Opens and starts the driver, once per process: libcuda.so.1, or what the environment variable ZSHARD_CUDA_LIB names.
 * ZS_ERR_CUDA with the reason and a remedy if it is missing, is too old or finds no device. Any thread. */
zs_status zs_cuda_load(void);

/* The same without failing: fills `info`, whose texts live as long as the process. */
void zs_cuda_describe(zs_cuda_info *info);

/* Fills `out` for device number `ordinal`. */
zs_status zs_cuda_describe_device(int ordinal, zs_cuda_device *out);

/* Ensures that this thread has a context, after zs_cuda_load if necessary: a current one stays (torch sets it), else
 * the primary one of device `ordinal`, which torch uses as well, becomes current. Cheap: call it whenever a thread
 * comes in. */
zs_status zs_cuda_enter(int ordinal);

/* The table; only after zs_cuda_load has succeeded. */
const zs_cu_table *zs_cuda_table(void);

/* Torch's current stream on a device that is the host: a fake driver's choice, else the default stream. */
zs_cu_stream zs_cuda_host_stream(void);

/* Turns the result of a call into a status and a record, and remembers the first that spoils the context. Out of
 * memory is ZS_ERR_MEMORY, all else ZS_ERR_CUDA. */
zs_status zs_cuda_check(const char *call, zs_cu_result result);

/* Has an error spoiled the context? Then fails with that error. */
zs_status zs_cuda_alive(void);

/* The same without a record, for calls that free something: there is nothing better to do than continue. Returns
 * `result`. */
zs_cu_result zs_cuda_note(zs_cu_result result);

/* Is all work done that was queued before the event was recorded? */
zs_status zs_cuda_event_done(zs_cu_event event, bool *done);

/* The same for a thread that only polls: its capture mode becomes relaxed for good. True if the driver cannot tell. */
bool zs_cuda_event_passed(zs_cu_event event);

/* Calls a function of the driver: ZS_TRY(ZS_CU(cuMemAlloc, &memory, bytes)). After zs_cuda_load. */
#define ZS_CU(name, ...) \
    (zs_cuda_alive() != ZS_OK ? ZS_ERR_CUDA : zs_cuda_check(#name, zs_cuda_table()->name(__VA_ARGS__)))

/* Calls one that frees something, leaving no record. */
#define ZS_CU_FREE(name, ...) zs_cuda_note(zs_cuda_table()->name(__VA_ARGS__))

#endif
