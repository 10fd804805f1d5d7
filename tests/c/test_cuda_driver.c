/* test_cuda_driver.c - cuda_driver.h on the fake of libcuda: the search, failures, and waits.
 *
 * A process looks for the driver once, so a process runs one test, `test_cuda_driver NAME`, in the environment that
 * tests/gpu/test_cuda_driver.py has made for it; some print their results, which it checks.
 */
#define _GNU_SOURCE 1
#include "device/cuda_driver.h"
#include "device/cuda_image.h"
#include "device/cuda_kernels.h"
#include "one_test.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N = 1000 };

static zs_cu_stream new_stream(void)
{
    zs_cu_stream stream;
    OK(ZS_CU(cuStreamCreateWithPriority, &stream, ZS_CU_STREAM_NON_BLOCKING, 0));
    return stream;
}

/* --- finding it --------------------------------------------------------------------------------------------------- */

/* Prints what there is, and how loading it fails. */
static void say(void)
{
    zs_cuda_info info;
    zs_cuda_describe(&info);
    zs_status status = zs_cuda_load();
    printf("found=%d version=%d devices=%d status=%d words=%s\n", info.found, info.version, info.devices, (int)status,
           zs_last_message());
    CHECK((status == ZS_OK) == (info.words[0] == '\0'));
    CHECK(status == ZS_OK || strcmp(info.words, zs_last_message()) == 0);
}

static void describe(void)
{
    zs_cuda_device device;
    OK(zs_cuda_describe_device(0, &device));
    CHECK(strcmp(device.name, "Fake GPU") == 0 && device.major == 9 && device.minor == 0);
    CHECK(device.multiprocessors == 2);
    FAILS(zs_cuda_describe_device(5, &device), ZS_ERR_CUDA, "cuDeviceGet: ");
}

/* --- contexts ----------------------------------------------------------------------------------------------------- */

static void *enter_and_allocate(void *out)
{
    FAILS(ZS_CU(cuMemAlloc, out, 100), ZS_ERR_CUDA, ""); /* a fresh thread has no context */
    OK(zs_cuda_enter(0));
    OK(ZS_CU(cuMemAlloc, out, 100));
    OK(zs_cuda_enter(0));
    return NULL;
}

static void threads_share_the_primary_context(void)
{
    pthread_t threads[2];
    zs_cu_ptr memory[3];
    OK(zs_cuda_load());
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, enter_and_allocate, &memory[i]) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    enter_and_allocate(&memory[2]);
    CHECK(zs_cuda_enter(0) == ZS_OK);
    for (int i = 0; i < 3; i++)
        CHECK(ZS_CU_FREE(cuMemFree, memory[i]) == ZS_CU_SUCCESS);
}

static void no_such_device(void)
{
    FAILS(zs_cuda_enter(1), ZS_ERR_VALUE, "CUDA device 1 is out of range: the driver reports 1");
    FAILS(zs_cuda_enter(-1), ZS_ERR_VALUE, "");
}

/* --- errors ------------------------------------------------------------------------------------------------------- */

static zs_status work_with_memory(void)
{
    zs_cu_ptr memory;
    void *host;
    static char pageable[N];
    ZS_TRY(ZS_CU(cuMemAlloc, &memory, N));
    ZS_TRY(ZS_CU(cuMemHostAlloc, &host, N, ZS_CU_MEMHOSTALLOC_PORTABLE));
    ZS_TRY(ZS_CU(cuMemsetD8Async, memory, 7, N, NULL));
    ZS_TRY(ZS_CU(cuMemcpyAsync, memory, memory + N / 2, N / 2, NULL));
    ZS_TRY(ZS_CU(cuMemcpyDtoHAsync, pageable, memory, N, NULL));
    CHECK(pageable[0] == 7 && pageable[N - 1] == 7);
    ZS_TRY(ZS_CU(cuMemFreeHost, host));
    return ZS_CU(cuMemFree, memory);
}

static zs_status work_with_streams(void)
{
    zs_cu_capture_mode mode = ZS_CU_STREAM_CAPTURE_MODE_RELAXED;
    zs_cu_capture_status captured = 1;
    int least, greatest;
    zs_cu_stream stream;
    zs_cu_event event;
    bool done;
    ZS_TRY(ZS_CU(cuCtxGetStreamPriorityRange, &least, &greatest));
    ZS_TRY(ZS_CU(cuStreamCreateWithPriority, &stream, ZS_CU_STREAM_NON_BLOCKING, greatest));
    ZS_TRY(ZS_CU(cuEventCreate, &event, ZS_CU_EVENT_DISABLE_TIMING));
    ZS_TRY(ZS_CU(cuEventRecord, event, stream));
    ZS_TRY(ZS_CU(cuStreamWaitEvent, stream, event, 0));
    ZS_TRY(ZS_CU(cuThreadExchangeStreamCaptureMode, &mode));
    CHECK(mode == 0); /* global */
    ZS_TRY(ZS_CU(cuStreamIsCapturing, stream, &captured));
    CHECK(captured == ZS_CU_STREAM_CAPTURE_STATUS_NONE);
    ZS_TRY(ZS_CU(cuStreamSynchronize, stream));
    ZS_TRY(zs_cuda_event_done(event, &done));
    CHECK(done);
    return ZS_CU(cuEventDestroy, event);
}

static zs_status work_with_everything(void)
{
    int count;
    ZS_TRY(zs_cuda_load());
    ZS_TRY(zs_cuda_enter(0));
    zs_cuda_device device;
    zs_cu_device current;
    ZS_TRY(zs_cuda_describe_device(0, &device));
    ZS_TRY(ZS_CU(cuCtxGetDevice, &current));
    ZS_TRY(ZS_CU(cuDeviceGetCount, &count));
    ZS_TRY(work_with_memory());
    ZS_TRY(work_with_streams());
    ZS_TRY(zs_cuda_kernels_load());
    zs_cu_library library;
    ZS_TRY(ZS_CU(cuLibraryLoadData, &library, zs_cuda_image(), NULL, NULL, 0, NULL, NULL, 0));
    ZS_TRY(ZS_CU(cuLibraryUnload, library));
    float x[4] = {1, 2, 3, 4};
    const zs_numbers numbers = {x, 4, ZS_F32};
    return zs_cuda_scale(&numbers, 2.0, NULL, NULL);
}

/* Prints the outcome of the work; the record names any failure. */
static void work(void)
{
    zs_status status = work_with_everything();
    CHECK((status == ZS_OK) == (zs_last_message()[0] == '\0'));
    printf("%d %s\n", (int)status, zs_last_message());
}

/* cuStreamSynchronize fails once by an error that spoils the context. */
static void spoiled_context_refuses_all(void)
{
    zs_cu_ptr memory;
    bool done;
    OK(zs_cuda_enter(0));
    zs_cu_stream stream = new_stream();
    const char *first = "cuStreamSynchronize: CUDA_ERROR_FAKE_700 (700): fake error 700";
    FAILS(ZS_CU(cuStreamSynchronize, stream), ZS_ERR_CUDA, first);
    FAILS(ZS_CU(cuMemAlloc, &memory, 100), ZS_ERR_CUDA, first);
    FAILS(zs_cuda_enter(0), ZS_ERR_CUDA, first);
    FAILS(zs_cuda_kernels_load(), ZS_ERR_CUDA, first);
    FAILS(zs_cuda_event_done(NULL, &done), ZS_ERR_CUDA, first);
    FAILS(ZS_CU(cuStreamSynchronize, stream), ZS_ERR_CUDA, "restart the process");
}

static void out_of_memory_is_told_apart(void)
{
    zs_cu_ptr memory;
    OK(zs_cuda_enter(0));
    FAILS(ZS_CU(cuMemAlloc, &memory, (size_t)1 << 50), ZS_ERR_MEMORY,
          "cuMemAlloc: the GPU is out of memory (CUDA_ERROR_OUT_OF_MEMORY)");
    OK(ZS_CU(cuMemAlloc, &memory, 100)); /* and all continues */
}

static void giving_back_leaves_no_record(void)
{
    OK(zs_cuda_enter(0));
    CHECK(ZS_CU_FREE(cuMemFree, 12345) == ZS_CU_ERROR_INVALID_VALUE);
    CHECK(zs_last_status() == ZS_OK);
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

static void launch_waits_for_its_kernel_if_told_to(void)
{
    OK(zs_cuda_enter(0));
    float x[4] = {1, 2, 3, 4};
    const zs_numbers numbers = {x, 4, ZS_F32};
    OK(zs_cuda_scale(&numbers, 2.0, NULL, new_stream()));
    CHECK(x[3] == 8);
}

/* --- running one -------------------------------------------------------------------------------------------------- */

static const one_test tests[] = {
    TEST(say),
    TEST(work),
    TEST(describe),
    TEST(threads_share_the_primary_context),
    TEST(no_such_device),
    TEST(spoiled_context_refuses_all),
    TEST(out_of_memory_is_told_apart),
    TEST(giving_back_leaves_no_record),
    TEST(launch_waits_for_its_kernel_if_told_to),
};

int main(int argc, char **argv)
{
    return run_one_test(tests, COUNT(tests), argc, argv);
}
