/* check_cuda_api.c - csrc/device/cuda_api.h against NVIDIA's headers; compiled, never run
 * (tests/gpu/test_cuda_driver.py).
 *
 * cudaTypedefs.h has a type for each function and version, PFN_<name>_v<version>, and ours are made from one list; so
 * each line of the list is compared with its type.
 */
#include <cuda.h>

#include <cudaTypedefs.h>

#include "cuda_api.h"

/* gcc takes an enum and the integer type under it for compatible; pointers to them need a cast. */
#define SAME(a, b) __builtin_types_compatible_p(a, b)

/* Types that are one under two names. */
_Static_assert(SAME(zs_cu_result, CUresult) && SAME(zs_cu_device, CUdevice) && SAME(zs_cu_ptr, CUdeviceptr), "");
_Static_assert(SAME(zs_cu_context, CUcontext) && SAME(zs_cu_stream, CUstream) && SAME(zs_cu_event, CUevent), "");
_Static_assert(SAME(zs_cu_library, CUlibrary) && SAME(zs_cu_kernel, CUkernel), "");
_Static_assert(SAME(zs_cu_function, CUfunction), "");
_Static_assert(SAME(zs_cu_attribute, CUdevice_attribute), "");
_Static_assert(SAME(zs_cu_capture_status, CUstreamCaptureStatus), "");
_Static_assert(SAME(zs_cu_capture_mode, CUstreamCaptureMode), "");
_Static_assert(SAME(zs_cu_jit_option, CUjit_option) && SAME(zs_cu_library_option, CUlibraryOption), "");

/* The signatures, with our types under NVIDIA's names wherever these are pointers to enums. */
#define zs_cu_jit_option CUjit_option
#define zs_cu_library_option CUlibraryOption
#define zs_cu_capture_status CUstreamCaptureStatus
#define zs_cu_capture_mode CUstreamCaptureMode
#define CHECK(name, version, parameters)          \
    typedef zs_cu_result(*its_##name) parameters; \
    _Static_assert(SAME(its_##name, PFN_##name##_v##version), #name " has another signature");
ZS_CU_CALLS(CHECK)
ZS_CU_OPTIONAL_CALLS(CHECK)

/* The values. CU_ and CUDA_ERROR_ are our ZS_CU_ and ZS_CU_ERROR_. */
#define VALUE(name) _Static_assert((int)ZS_CU_##name == (int)CU_##name, #name)
#define ERROR(name) _Static_assert((int)ZS_CU_ERROR_##name == (int)CUDA_ERROR_##name, #name)
#include "check_cuda_values.h"
