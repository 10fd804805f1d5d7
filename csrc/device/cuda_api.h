/* cuda_api.h - the part of the CUDA driver's interface that zshard calls, in our own declarations.
 *
 * One list, ZS_CU_CALLS, has a line for each call: its name, the CUDA version that its signature is of, and its
 * parameters. The table of function pointers, the loader and the check against NVIDIA's cuda.h
 * (tests/gpu/test_cuda_driver.py) are made from it, so no header of CUDA is needed to build, and none can disagree
 * unseen.
 */
#ifndef ZS_CUDA_API_H
#define ZS_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

typedef unsigned int zs_cu_result;        /* CUresult */
typedef int zs_cu_device;                 /* CUdevice: an ordinal, after cuDeviceGet */
typedef unsigned long long zs_cu_ptr;     /* CUdeviceptr; the same number as the `void *` that kernels and torch use */
typedef struct CUctx_st *zs_cu_context;   /* CUcontext */
typedef struct CUstream_st *zs_cu_stream; /* CUstream = cudaStream_t; NULL is the legacy default stream */
typedef struct CUevent_st *zs_cu_event;   /* CUevent */
typedef struct CUlib_st *zs_cu_library;   /* CUlibrary */
typedef struct CUkern_st *zs_cu_kernel;   /* CUkernel; may be launched as a CUfunction */
typedef struct CUfunc_st *zs_cu_function; /* CUfunction */

/* Values of cuda.h, under its names with ZS_CU_ for CU_ or CUDA_. */
enum {
    ZS_CU_SUCCESS = 0,
    ZS_CU_ERROR_INVALID_VALUE = 1,
    ZS_CU_ERROR_OUT_OF_MEMORY = 2,
    ZS_CU_ERROR_NO_DEVICE = 100,
    ZS_CU_ERROR_INVALID_CONTEXT = 201,
    ZS_CU_ERROR_NO_BINARY_FOR_GPU = 209,
    ZS_CU_ERROR_ECC_UNCORRECTABLE = 214,
    ZS_CU_ERROR_NVLINK_UNCORRECTABLE = 220,
    ZS_CU_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    ZS_CU_ERROR_CONTAINED = 226,
    ZS_CU_ERROR_NOT_FOUND = 500,
    ZS_CU_ERROR_NOT_READY = 600,
    ZS_CU_ERROR_ILLEGAL_ADDRESS = 700,
    ZS_CU_ERROR_LAUNCH_TIMEOUT = 702,
    ZS_CU_ERROR_CONTEXT_IS_DESTROYED = 709,
    ZS_CU_ERROR_ASSERT = 710,
    ZS_CU_ERROR_HARDWARE_STACK_ERROR = 714,
    ZS_CU_ERROR_ILLEGAL_INSTRUCTION = 715,
    ZS_CU_ERROR_MISALIGNED_ADDRESS = 716,
    ZS_CU_ERROR_INVALID_ADDRESS_SPACE = 717,
    ZS_CU_ERROR_INVALID_PC = 718,
    ZS_CU_ERROR_LAUNCH_FAILED = 719,
    ZS_CU_ERROR_TENSOR_MEMORY_LEAK = 721,
    ZS_CU_ERROR_MPS_CLIENT_TERMINATED = 810,
    ZS_CU_ERROR_EXTERNAL_DEVICE = 911,
    ZS_CU_ERROR_UNKNOWN = 999,

    ZS_CU_STREAM_NON_BLOCKING = 1, /* does not wait for the default stream nor make it wait */
    ZS_CU_EVENT_DISABLE_TIMING = 2,
    ZS_CU_STREAM_CAPTURE_STATUS_NONE = 0,
    ZS_CU_STREAM_CAPTURE_MODE_RELAXED = 2, /* captures on other threads do not restrict this one */
    ZS_CU_MEMHOSTALLOC_PORTABLE = 1,       /* pinned for all contexts */

    ZS_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    ZS_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    ZS_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,

    ZS_CU_GET_PROC_ADDRESS_LEGACY_STREAM = 1,
};

/* X(name, version, (parameters)): required functions; drivers of CUDA 12.0 and later have all of them. */
#define ZS_CU_CALLS(X)                                                                                            \
    X(cuInit, 2000, (unsigned int))                                                                               \
    X(cuDriverGetVersion, 2020, (int *))                                                                          \
    X(cuGetErrorName, 6000, (zs_cu_result, const char **))                                                        \
    X(cuGetErrorString, 6000, (zs_cu_result, const char **))                                                      \
    X(cuDeviceGet, 2000, (zs_cu_device *, int))                                                                   \
    X(cuDeviceGetCount, 2000, (int *))                                                                            \
    X(cuDeviceGetName, 2000, (char *, int, zs_cu_device))                                                         \
    X(cuDeviceGetAttribute, 2000, (int *, zs_cu_attribute, zs_cu_device))                                         \
    X(cuDevicePrimaryCtxRetain, 7000, (zs_cu_context *, zs_cu_device))                                            \
    X(cuCtxGetCurrent, 4000, (zs_cu_context *))                                                                   \
    X(cuCtxSetCurrent, 4000, (zs_cu_context))                                                                     \
    X(cuCtxGetDevice, 2000, (zs_cu_device *))                                                                     \
    X(cuCtxGetStreamPriorityRange, 5050, (int *, int *))                                                          \
    X(cuLibraryLoadData, 12000,                                                                                   \
      (zs_cu_library *, const void *, zs_cu_jit_option *, void **, unsigned int, zs_cu_library_option *, void **, \
       unsigned int))                                                                                             \
    X(cuLibraryUnload, 12000, (zs_cu_library))                                                                    \
    X(cuLibraryGetKernel, 12000, (zs_cu_kernel *, zs_cu_library, const char *))                                   \
    X(cuKernelGetFunction, 12000, (zs_cu_function *, zs_cu_kernel))                                               \
    X(cuLaunchKernel, 4000,                                                                                       \
      (zs_cu_function, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,        \
       unsigned int, zs_cu_stream, void **, void **))                                                             \
    X(cuMemAlloc, 3020, (zs_cu_ptr *, size_t))                                                                    \
    X(cuMemFree, 3020, (zs_cu_ptr))                                                                               \
    X(cuMemHostAlloc, 2020, (void **, size_t, unsigned int))                                                      \
    X(cuMemFreeHost, 2000, (void *))                                                                              \
    X(cuMemcpyAsync, 4000, (zs_cu_ptr, zs_cu_ptr, size_t, zs_cu_stream))                                          \
    X(cuMemcpyDtoHAsync, 3020, (void *, zs_cu_ptr, size_t, zs_cu_stream))                                         \
    X(cuMemsetD8Async, 3020, (zs_cu_ptr, unsigned char, size_t, zs_cu_stream))                                    \
    X(cuStreamCreateWithPriority, 5050, (zs_cu_stream *, unsigned int, int))                                      \
    X(cuStreamSynchronize, 2000, (zs_cu_stream))                                                                  \
    X(cuStreamIsCapturing, 10000, (zs_cu_stream, zs_cu_capture_status *))                                         \
    X(cuThreadExchangeStreamCaptureMode, 10010, (zs_cu_capture_mode *))                                           \
    X(cuStreamWaitEvent, 3020, (zs_cu_stream, zs_cu_event, unsigned int))                                         \
    X(cuEventCreate, 2000, (zs_cu_event *, unsigned int))                                                         \
    X(cuEventRecord, 2000, (zs_cu_event, zs_cu_stream))                                                           \
    X(cuEventQuery, 2000, (zs_cu_event))                                                                          \
    X(cuEventDestroy, 4000, (zs_cu_event))

/* Optional functions (NULL if missing): this one is of CUDA 12.4. */
#define ZS_CU_OPTIONAL_CALLS(X) X(cuFuncLoad, 12040, (zs_cu_function))

typedef unsigned int zs_cu_attribute;      /* CUdevice_attribute */
typedef unsigned int zs_cu_capture_status; /* CUstreamCaptureStatus */
typedef unsigned int zs_cu_capture_mode;   /* CUstreamCaptureMode */
typedef unsigned int zs_cu_jit_option;     /* CUjit_option */
typedef unsigned int zs_cu_library_option; /* CUlibraryOption */

/* The functions, by their names. */
typedef struct zs_cu_table {
#define ZS_CU_FIELD(name, version, parameters) zs_cu_result(*name) parameters;
    ZS_CU_CALLS(ZS_CU_FIELD)
    ZS_CU_OPTIONAL_CALLS(ZS_CU_FIELD)
#undef ZS_CU_FIELD
} zs_cu_table;

#endif
