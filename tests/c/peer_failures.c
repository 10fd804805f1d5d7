/* peer_failures.c - the transport "peer" when ranks die, do not come or are refused by the driver (test_backend_peer.c).
 *
 * The one idea: nobody hangs: streams that wait for a rank are let go, and the next call says which rank, and why.
 */
#include "peer_tests.h"

#include "device/cuda_driver.h"

#include <signal.h>

/* --- failures ---------------------------------------------------------------------------------------------------------------- */

/* A rank dies, and the others' streams wait for it: they are let go, and the next call names the rank. */
void killed_rank_lets_streams_go(rank_env *env)
{
    zs_flat_mem flat;
    zs_mem *full = NULL;
    begin_gpu(env);
    OK(zs_comm_flat_new(env->comm, 512, &flat));
    OK(zs_device_mem_new(env->comm->device, (size_t)env->world * 512, &full));
    OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){.mem = full, .full = full->ptr}));
    meet(env);
    if (env->rank == 1) raise(SIGKILL);
    double start = now();
    zs_target to = {.mem = full, .full = full->ptr};
    zs_status status = zs_comm_gather(env->comm, &flat, "layer", to); /* returns when the stream goes on */
    if (status == ZS_OK) status = zs_comm_gather(env->comm, &flat, "layer", to);
    CHECK(status == ZS_ERR_PEER && strstr(zs_last_message(), "rank 1 (pid") != NULL);
    zs_clear_error();
    FAILS(zs_comm_gather(env->comm, &flat, "layer", to), ZS_ERR_STATE, "rank 1 (pid");
    CHECK(now() - start < 20.0);
    zs_comm_flat_free(env->comm, &flat);
    zs_mem_release(full);
    end_gpu(env);
}

/* A rank that does not come is an error when the time is over. */
void absent_rank_is_a_timeout(rank_env *env)
{
    zs_flat_mem flat;
    zs_mem *full = NULL;
    begin_gpu(env);
    hosts->timeout = 2.0;
    OK(zs_comm_flat_new(env->comm, 512, &flat));
    OK(zs_device_mem_new(env->comm->device, (size_t)env->world * 512, &full));
    zs_target to = {.mem = full, .full = full->ptr};
    zs_gathering *on_the_way = NULL;
    OK(zs_comm_gather(env->comm, &flat, "layer", to));
    if (env->rank == 1) {
        sleep_us(4000000);
    } else {
        OK(zs_comm_gather_start(env->comm, &flat, "layer", to, &on_the_way));
        OK(zs_comm_gather_finish(env->comm, on_the_way));
        CHECK(zs_comm_gather_start(env->comm, &flat, "layer", to, &on_the_way) == ZS_ERR_TIMEOUT);
        CHECK(strstr(zs_last_message(), "the all-gather of parameters did not finish on the GPU of rank") != NULL);
        CHECK(strstr(zs_last_message(), "transfer 2, the last that rank") != NULL);
        zs_clear_error();
    }
    zs_comm_flat_free(env->comm, &flat);
    zs_mem_release(full);
    end_gpu(env);
}

/* One rank's driver refuses a call: it fails there, and the others do not hang. */
void failing_call_lets_the_peers_go(rank_env *env)
{
    zs_flat_mem flat;
    zs_mem *full = NULL;
    begin_gpu(env);
    OK(zs_comm_flat_new(env->comm, 512, &flat));
    OK(zs_device_mem_new(env->comm->device, (size_t)env->world * 512, &full));
    zs_target to = {.mem = full, .full = full->ptr};
    OK(zs_comm_gather(env->comm, &flat, "layer", to));
    meet(env);
    if (env->rank == 1) {
        setenv("FAKE_CUDA_FAIL", "cuMemcpyAsync:1", 1);
        FAILS(zs_comm_gather(env->comm, &flat, "layer", to), ZS_ERR_CUDA, "cuMemcpyAsync");
        unsetenv("FAKE_CUDA_FAIL");
        FAILS(zs_comm_gather(env->comm, &flat, "layer", to), ZS_ERR_STATE, "after an earlier failure");
    } else {
        zs_status status = zs_comm_gather(env->comm, &flat, "layer", to);
        char all[MAX_RANKS];
        if (status == ZS_OK) status = zs_comm_exchange(env->comm, "", 1, all);
        CHECK(status != ZS_OK && strstr(zs_last_message(), "cuMemcpyAsync") != NULL);
        zs_clear_error();
    }
    zs_comm_flat_free(env->comm, &flat);
    zs_mem_release(full);
    end_gpu(env);
}

/* The making fails on all ranks where it does on one. */
void birth_fails_on_all_ranks(rank_env *env)
{
    const zs_device *device = NULL;
    zs_backend *backend = NULL;
    static const char *const calls[] = {"cuMemAlloc:1:2", "cuIpcGetMemHandle:1", "cuIpcOpenMemHandle:1",
                                        "cuStreamCreateWithPriority:1"};
    static const char *const names[] = {"cuMemAlloc", "cuIpcGetMemHandle", "cuIpcOpenMemHandle",
                                        "cuStreamCreateWithPriority"};
    OK(zs_device_cuda(0, true, &device));
    for (int i = 0; i < 4; i++) {
        if (env->rank == 1) setenv("FAKE_CUDA_FAIL", calls[i], 1);
        zs_clear_error();
        CHECK(zs_backend_peer_new(env->comm, device, &backend) == (i == 0 ? ZS_ERR_MEMORY : ZS_ERR_CUDA));
        CHECK(strstr(zs_last_message(), "transport 'peer' on rank 1: ") != NULL);
        CHECK(strstr(zs_last_message(), names[i]) != NULL);
        zs_clear_error();
        unsetenv("FAKE_CUDA_FAIL");
    }
    begin_gpu(env);
    meet(env);
    end_gpu(env);
}

void child_is_refused(rank_env *env)
{
    begin_gpu(env);
    char all[MAX_RANKS];
    pid_t pid = fork();
    if (pid == 0) {
        FAILS(zs_comm_exchange(env->comm, "", 1, all), ZS_ERR_STATE, "a process forked from rank");
        zs_comm_release(env->comm);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    meet(env);
    end_gpu(env);
}

/* Two transports map the same memory: each closes for itself. */
void two_transports(rank_env *env)
{
    zs_flat_mem flat;
    zs_mem *full = NULL;
    begin_gpu(env);
    zs_comm *first = env->comm;
    env->comm = hosts;
    begin_gpu(env);
    OK(zs_comm_flat_new(first, 512, &flat));
    OK(zs_device_mem_new(first->device, (size_t)env->world * 512, &full));
    fill_pattern(flat.shard, 512, (unsigned)env->rank);
    OK(zs_comm_gather(first, &flat, "layer", (zs_target){.mem = full, .full = full->ptr}));
    OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){.mem = full, .full = full->ptr}));
    zs_comm_release(first);
    memset(full->ptr, 0, full->bytes);
    OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){.mem = full, .full = full->ptr}));
    compare_full(env, full->ptr, 512, 0);
    const void *at = flat.shard;
    zs_comm_flat_free(env->comm, &flat);
    meet(env);
    CHECK(zs_peer_alloc_at(at) == NULL);
    zs_mem_release(full);
    end_gpu(env);
}

/* --- other orders ------------------------------------------------------------------------------------------------------------- */

/* Ranks agree on some moves, then ask for `count` and `count_of_last`, of which on the last rank move `other` is another. */
static void ask_apart(rank_env *env, int count, int count_of_last, int other, const char *said)
{
    bool last = env->rank == env->world - 1;
    char name[16], text[160];
    begin_gpu(env);
    zs_gpu_comm *gpu = (zs_gpu_comm *)env->comm;
    for (int i = 0; i < 5; i++)
        OK(zs_gpu_note(gpu, "parameters", "before", 64));
    OK(zs_gpu_read_end(env->comm, NULL, (zs_phase)0));
    for (int i = 0; i < (last ? count_of_last : count); i++) {
        snprintf(name, sizeof name, "%d%s", i, last && i == other ? "x" : "");
        OK(zs_gpu_note(gpu, "parameters", name, 64));
    }
    snprintf(text, sizeof text, said, env->world - 1);
    FAILS(zs_gpu_read_end(env->comm, NULL, (zs_phase)0), ZS_ERR_DIVERGED, text);
    end_gpu(env);
}

/* Not the last one, which all ranks have asked for. */
void first_move_that_differs_is_named(rank_env *env)
{
    ask_apart(env, 9, 9, 2,
              "transfer 8 is parameters of unit '2' (64 bytes per rank) on rank 0, but parameters of unit '2x' (64 "
              "bytes per rank) "
              "on rank %d");
}

void move_that_is_missing_is_named(rank_env *env)
{
    ask_apart(env, 4, 3, -1,
              "transfer 9 is parameters of unit '3' (64 bytes per rank) on rank 0, but not queued on rank %d");
}

/* Of so many, the first are remembered. */
void moves_of_long_ago_are_not_named(rank_env *env)
{
    ask_apart(env, ZS_GPU_MOVES + 3, ZS_GPU_MOVES + 2, -1,
              "last: parameters of unit '258' (64 bytes per rank), but rank %d");
}

/* --- ends -------------------------------------------------------------------------------------------------------------------- */

/* What each rank gathers of the others is mapped there; the stand-in ends a process that frees it too early. */
static const void *gather_large(rank_env *env)
{
    enum { LARGE = 4 << 20 };
    zs_flat_mem flat;
    zs_mem *full = NULL;
    OK(zs_comm_flat_new(env->comm, LARGE, &flat));
    OK(zs_device_mem_new(env->comm->device, (size_t)env->world * LARGE, &full));
    fill_pattern(flat.shard, LARGE, (unsigned)env->rank);
    OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){.mem = full, .full = full->ptr}));
    compare_full(env, full->ptr, LARGE, 0);
    const void *at = flat.shard;
    zs_comm_flat_free(env->comm, &flat);
    zs_mem_release(full);
    return at;
}

static size_t memory_left(void)
{
    size_t left = 0, total = 0;
    OK(ZS_CU(cuMemGetInfo, &left, &total));
    return left;
}

/* Ranks come to their end one after the other, again and again: nothing is freed while a peer has it mapped, nothing stays. */
void memory_outlives_its_mappings(rank_env *env)
{
    size_t left = 0;
    for (int round = 0; round < 6; round++) {
        begin_gpu(env);
        const void *at = gather_large(env);
        if (env->rank == round % env->world) sleep_us(200000);
        zs_comm_close(env->comm);
        FAILS(zs_peer_check(((zs_gpu_comm *)env->comm)->backend), ZS_ERR_STATE, "is closed");
        end_gpu(env);
        CHECK(zs_peer_alloc_at(at) == NULL);
        if (round > 0) CHECK(memory_left() == left);
        left = memory_left();
    }
}

/* A rank does not wait for ever for a peer that goes on; what that has mapped is never freed then. */
void late_peer_keeps_its_mappings(rank_env *env)
{
    begin_gpu(env);
    const void *at = gather_large(env);
    double start = now();
    if (env->rank == 1) sleep_us(13000000);
    end_gpu(env);
    CHECK(now() - start < 30.0);
    zs_peer_alloc *kept = zs_peer_alloc_at(at);
    CHECK((kept != NULL) == (env->rank != 1));
    zs_peer_alloc_release(kept);
    meet(env);
}
