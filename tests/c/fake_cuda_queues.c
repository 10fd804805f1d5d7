/* fake_cuda_queues.c - the stand-in for libcuda.so.1: calls for streams and events, and how all calls are found.
 *
 * The library shows cuGetProcAddress_v2 alone, as zshard asks for nothing else, and finds calls by the list that
 * zshard itself is made from; so a call that is not in the list is not there, and one whose signature changed does not compile.
 */
#define _GNU_SOURCE 1
#include "fake_cuda.h"

#include <stdlib.h>
#include <string.h>

#define SHOWN __attribute__((visibility("default")))

/* --- streams ------------------------------------------------------------------------------------------------------------- */

zs_cu_result fake_cuStreamCreateWithPriority(zs_cu_stream *out, unsigned int flags, int priority)
{
    BEGIN(true, "flags=%u priority=%d", flags, priority);
    if (flags != ZS_CU_STREAM_NON_BLOCKING)
        return ZS_CU_ERROR_INVALID_VALUE; /* others synchronize with the NULL stream */
    *out = fake_stream_new();
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuStreamSynchronize(zs_cu_stream stream)
{
    BEGIN(true, "stream=%d", STREAM_ID);
    UNCAPTURED();
    fake_drain(stream);
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuStreamWaitEvent(zs_cu_stream stream, zs_cu_event event, unsigned int flags)
{
    BEGIN(true, "stream=%d event=%p", STREAM_ID, (void *)event);
    INTO_STREAM();
    if (flags != 0) return ZS_CU_ERROR_INVALID_VALUE;
    zs_cu_result result = fake_capture_wait(stream, event);
    if (result == ZS_CU_SUCCESS) fake_event_wait(stream, event);
    return result;
}

zs_cu_result fake_cuStreamIsCapturing(zs_cu_stream stream, zs_cu_capture_status *out)
{
    BEGIN(true, "stream=%d", STREAM_ID);
    *out = fake_stream_broken(stream) ? 2 : fake_stream_captured(stream) ? 1 : ZS_CU_STREAM_CAPTURE_STATUS_NONE;
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuThreadExchangeStreamCaptureMode(zs_cu_capture_mode *mode)
{
    BEGIN(false, "mode=%u", *mode);
    if (*mode > ZS_CU_STREAM_CAPTURE_MODE_RELAXED) return ZS_CU_ERROR_INVALID_VALUE;
    *mode = fake_capture_exchange(*mode);
    return ZS_CU_SUCCESS;
}

/* A function of the host in a stream, for the stand-in of NCCL. */
typedef struct callback {
    void (*call)(void *);
    void *data;
} callback;

static void run_callback(const void *args)
{
    const callback *one = args;
    one->call(one->data);
}

static zs_cu_result fake_cuLaunchHostFunc(zs_cu_stream stream, void (*call)(void *), void *data)
{
    BEGIN(true, "stream=%d", STREAM_ID);
    callback one = {call, data};
    fake_submit(stream, run_callback, &one, sizeof one);
    return ZS_CU_SUCCESS;
}

/* --- events ---------------------------------------------------------------------------------------------------------------- */

zs_cu_result fake_cuEventCreate(zs_cu_event *out, unsigned int flags)
{
    BEGIN(true, "flags=%u", flags);
    *out = fake_event_new();
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuEventRecord(zs_cu_event event, zs_cu_stream stream)
{
    BEGIN(true, "stream=%d event=%p", STREAM_ID, (void *)event);
    INTO_STREAM();
    fake_event_record(event, stream);
    return ZS_CU_SUCCESS;
}

zs_cu_result fake_cuEventQuery(zs_cu_event event)
{
    BEGIN(false, "event=%p", (void *)event);
    if (fake_event_captured(event)) return FAKE_CAPTURED_EVENT;
    UNCAPTURED();
    return fake_event_done(event) ? ZS_CU_SUCCESS : ZS_CU_ERROR_NOT_READY;
}

zs_cu_result fake_cuEventDestroy(zs_cu_event event)
{
    BEGIN(false, "event=%p", (void *)event);
    return event != NULL ? ZS_CU_SUCCESS
                         : ZS_CU_ERROR_INVALID_VALUE; /* its memory stays: a stream may look at it yet */
}

/* --- finding them ------------------------------------------------------------------------------------------------------------ */

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
    {"cuLaunchHostFunc", (any_function *)fake_cuLaunchHostFunc, 10000},
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
