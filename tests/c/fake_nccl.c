/* fake_nccl.c - a fake of libnccl (2.28.9) for machines without a GPU: the same functions, the same rules, ranks in
 * processes.
 *
 * Every collective is sends and receives between pairs of ranks that make progress together, as one piece of work on
 * the stream. Bytes go through a file that all ranks map and that the unique id names. Behavior that the real one
 * leaves undefined (two threads in one communicator, a call after abort, a call in a forked child) ends the process
 * here.
 *
 * As in the real one, communicators are non-blocking: a call puts nothing on the stream yet, says "in progress", and
 * only when it has been asked for its state a few times (at random) is the work there; a call before that is refused,
 * and a communicator that has refused a call refuses all later ones.
 *
 *   FAKE_NCCL_FAIL=AllGather:2:3       the second ncclAllGather of the process returns 3 (default 3)
 *   FAKE_NCCL_FAIL_LATE=AllGather:2:6  likewise, but found when asked for the state
 *   FAKE_NCCL_HANG=AllGather:2         that one does not end until it is aborted
 *   FAKE_NCCL_ASYNC=5:6                after five operations the state is 6
 *   FAKE_NCCL_DELAY_US=1000            before each operation on a stream
 *   FAKE_NCCL_POLLS=20                 the most looks until a call has ended
 *   FAKE_NCCL_VERSION=23003, FAKE_NCCL_DIR=/tmp, FAKE_NCCL_LOG=path (one line per call)
 *   FAKE_CUDA_VISIBLE=2,0              ranks that name the same GPU first are refused, as two ranks on one GPU are
 * Compiled with -DFAKE_NCCL_OLD it is 2.21.5, without the optional functions.
 */
#define _GNU_SOURCE 1 /* RTLD_DEFAULT */
#include "fake_nccl_work.h"

#include <fcntl.h>
#include <sys/mman.h>

/* The functions have the types of the table. */
#define DECLARE(result, name, parameters) result nccl##name parameters;
ZS_NCCL_REQUIRED(DECLARE)
ZS_NCCL_OPTIONAL(DECLARE)

zs_nccl_result ncclGetVersion(int *version)
{
#ifdef FAKE_NCCL_OLD
    *version = 22105;
#else
    *version = (int)number_of("FAKE_NCCL_VERSION", 22809);
#endif
    return ZS_NCCL_SUCCESS;
}

const char *ncclGetErrorString(zs_nccl_result result)
{
    static const char *const words[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return result >= 0 && result <= ZS_NCCL_IN_PROGRESS ? words[result] : "unknown result code";
}

/* --- making and ending -------------------------------------------------------------------------------------------- */

zs_nccl_result ncclGetUniqueId(zs_nccl_id *id)
{
    int result = begin_call(F_GetUniqueId, NULL, 0, NULL);
    if (result != 0) return result;
    const char *folder = getenv("FAKE_NCCL_DIR");
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "%s/fake-nccl-XXXXXX", folder != NULL ? folder : "/tmp");
    int file = mkstemp(id->bytes);
    if (file < 0 || ftruncate(file, (off_t)sizeof(board)) != 0) return complain(ZS_NCCL_SYSTEM_ERROR, "no file");
    close(file);
    return ZS_NCCL_SUCCESS;
}

/* Is a config one that the real library accepts? */
static bool is_sound(const zs_nccl_config *config)
{
    bool sizes = config->magic == ZS_NCCL_CONFIG_MAGIC && config->size >= sizeof *config && config->blocking == 0;
    bool range = config->min_ctas != ZS_NCCL_CONFIG_UNSET && config->min_ctas <= 0;
    range = range || (config->max_ctas != ZS_NCCL_CONFIG_UNSET && config->max_ctas <= 0);
    return sizes && !range && config->min_ctas <= config->max_ctas &&
           (config->cta_policy == ZS_NCCL_CONFIG_UNSET || (config->cta_policy >= 0 && config->cta_policy <= 1));
}

zs_nccl_result ncclCommInitRankConfig(zs_nccl_handle *out, int world, zs_nccl_id id, int rank, zs_nccl_config *config)
{
    *out = NULL;
    int result = begin_call(F_CommInitRankConfig, NULL, 0, NULL);
    if (result != 0) return result;
    write_log("config policy=%d min=%d max=%d\n", config->cta_policy, config->min_ctas, config->max_ctas);
    if (!is_sound(config) || world < 1 || world > MOST_RANKS || rank < 0 || rank >= world)
        return complain(ZS_NCCL_INVALID_ARGUMENT, "not a config, or a rank, of this stand-in");
    int file = open(id.bytes, O_RDWR | O_CLOEXEC);
    if (file < 0) return complain(ZS_NCCL_SYSTEM_ERROR, "the id's file is gone");
    fake *comm = calloc(1, sizeof *comm);
    if (comm == NULL) die("out of memory");
    *comm = (fake){.rank = rank, .world = world, .pid = getpid()};
    comm->shared = mmap(NULL, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (comm->shared == MAP_FAILED) die("cannot map the id's file");
    close(file);
    memcpy(comm->path, id.bytes, sizeof comm->path - 1);
    pthread_mutex_lock(&lock);
    comm->next = comms;
    comms = comm;
    pthread_mutex_unlock(&lock);
    comm->late = planned("FAKE_NCCL_FAIL_LATE", F_CommInitRankConfig);
    atomic_store(&comm->shared->gpus[rank], 1 + (int)number_of("FAKE_CUDA_VISIBLE", -1));
    atomic_store(&comm->shared->processes[rank], getpid());
    atomic_fetch_add(&comm->shared->arrived, 1);
    *out = comm;
    return set_busy(comm, F_CommInitRankConfig);
}

/* Do two ranks report the same GPU? */
static bool share_a_gpu(const fake *comm)
{
    board *shared = comm->shared;
    for (int r = 0; r < comm->world; r++)
        for (int s = 0; s < r; s++)
            if (shared->gpus[r] != 0 && shared->gpus[r] == shared->gpus[s]) return true;
    return false;
}

/* The event that a communicator waits for besides its number of looks; ZS_NCCL_IN_PROGRESS: not yet. */
static int outcome(fake *comm)
{
    board *shared = comm->shared;
    if (comm->late != 0) return complain(comm->late, "the stand-in was told to fail late");
    switch (comm->busy_with) {
    case F_CommInitRankConfig:
        if (atomic_load(&shared->aborted) != 0) return complain(ZS_NCCL_REMOTE_ERROR, "a rank has gone while all met");
        if (atomic_load(&shared->arrived) < comm->world) return ZS_NCCL_IN_PROGRESS;
        if (comm->rank == 0) unlink(comm->path);
        if (share_a_gpu(comm)) return complain(ZS_NCCL_INVALID_USAGE, "Duplicate GPU detected");
        return ZS_NCCL_SUCCESS;
    case F_CommFinalize: return atomic_load(&comm->ended) < comm->begun ? ZS_NCCL_IN_PROGRESS : ZS_NCCL_SUCCESS;
    default:
        atomic_store(&comm->state, ZS_NCCL_SUCCESS);
        put_on_streams(comm);
        return atomic_load(&comm->state);
    }
}

zs_nccl_result ncclCommGetAsyncError(zs_nccl_handle handle, zs_nccl_result *state)
{
    fake *comm = enter(handle, F_CommGetAsyncError);
    int failed = begin_call(F_CommGetAsyncError, comm, 0, NULL);
    if (failed != 0) return leave(comm, failed);
    if (atomic_load(&comm->state) == ZS_NCCL_IN_PROGRESS && comm->polls-- <= 0)
        atomic_store(&comm->state, outcome(comm));
    *state = atomic_load(&comm->state);
    return leave(comm, ZS_NCCL_SUCCESS);
}

zs_nccl_result ncclCommFinalize(zs_nccl_handle handle)
{
    fake *comm = enter(handle, F_CommFinalize);
    int result = begin_call(F_CommFinalize, comm, 0, NULL);
    if (result == 0) result = ready(comm);
    if (result != 0) {
        atomic_store(&comm->state, result);
        return leave(comm, result);
    }
    return leave(comm, set_busy(comm, F_CommFinalize));
}

/* Both end in the background in the real one; here the jobs see that it is aborted. */
static int end(fake *comm, bool by_force)
{
    if (by_force) {
        atomic_store(&comm->aborted, 1);
        atomic_fetch_add(&comm->shared->aborted, 1);
    } else if (atomic_load(&comm->ended) < comm->begun) {
        die("ncclCommDestroy with %d operations under way", (int)(comm->begun - comm->ended));
    }
    atomic_store(&comm->shared->processes[comm->rank], -1);
    drop_jobs(comm->pending);
    comm->pending = NULL;
    comm->dead = true;
    return leave(comm, ZS_NCCL_SUCCESS);
}

zs_nccl_result ncclCommDestroy(zs_nccl_handle handle)
{
    fake *comm = enter(handle, F_CommDestroy);
    (void)begin_call(F_CommDestroy, comm, 0, NULL);
    return end(comm, false);
}

zs_nccl_result ncclCommAbort(zs_nccl_handle handle)
{
    fake *comm = enter(handle, F_CommAbort);
    (void)begin_call(F_CommAbort, comm, 0, NULL);
    return end(comm, true);
}

/* --- operations --------------------------------------------------------------------------------------------------- */

/* A communicator's operation; zshard sends bytes. */
static job *begin_operation(zs_nccl_handle handle, function f, zs_nccl_type type, zs_nccl_stream stream)
{
    if (type != ZS_NCCL_INT8) die("an operation on numbers of type %d", type);
    return new_job(enter(handle, f), f, stream);
}

zs_nccl_result ncclAllGather(const void *send, void *receive, size_t count, zs_nccl_type type, zs_nccl_handle handle,
                             zs_nccl_stream stream)
{
    job *work = begin_operation(handle, F_AllGather, type, stream);
    for (int r = 0; r < work->comm->world; r++) {
        add_send(work, r, send, count);
        add_receive(work, r, (char *)receive + (size_t)r * count, count);
    }
    return submit(work, count);
}

zs_nccl_result ncclBroadcast(const void *send, void *receive, size_t count, zs_nccl_type type, int root,
                             zs_nccl_handle handle, zs_nccl_stream stream)
{
    job *work = begin_operation(handle, F_Broadcast, type, stream);
    for (int r = 0; r < work->comm->world && work->comm->rank == root; r++)
        add_send(work, r, send, count);
    add_receive(work, root, receive, count);
    return submit(work, count);
}

zs_nccl_result ncclSend(const void *send, size_t count, zs_nccl_type type, int peer, zs_nccl_handle handle,
                        zs_nccl_stream stream)
{
    job *work = begin_operation(handle, F_Send, type, stream);
    add_send(work, peer, send, count);
    return submit(work, count);
}

zs_nccl_result ncclRecv(void *receive, size_t count, zs_nccl_type type, int peer, zs_nccl_handle handle,
                        zs_nccl_stream stream)
{
    job *work = begin_operation(handle, F_Recv, type, stream);
    work->function = F_Send; /* which it has to meet */
    add_receive(work, peer, receive, count);
    return submit(work, count);
}

zs_nccl_result ncclGroupStart(void)
{
    int result = begin_call(F_GroupStart, NULL, 0, NULL);
    if (result != 0) return result;
    depth++;
    return ZS_NCCL_SUCCESS;
}

zs_nccl_result ncclGroupEnd(void)
{
    int result = begin_call(F_GroupEnd, NULL, 0, NULL);
    if (depth == 0) return complain(ZS_NCCL_INVALID_USAGE, "ncclGroupEnd: not in a group call.");
    if (--depth > 0) return ZS_NCCL_SUCCESS;
    job *jobs = group_jobs;
    if (group_error != 0) result = group_error;
    group_jobs = group_pairs = NULL;
    group_error = 0;
    if (jobs == NULL) return result;
    fake *comm = enter(jobs->comm, F_GroupEnd);
    if (result != 0) {
        drop_jobs(jobs);
        atomic_store(&comm->state, result);
        return leave(comm, result);
    }
    comm->pending = jobs;
    comm->late = comm->late != 0 ? comm->late : planned("FAKE_NCCL_FAIL_LATE", F_GroupEnd);
    return leave(comm, set_busy(comm, F_GroupEnd));
}

#ifndef FAKE_NCCL_OLD

const char *ncclGetLastError(zs_nccl_handle handle)
{
    (void)handle;
    return last_error;
}

#endif
