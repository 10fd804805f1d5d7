/* test_mover_peer.c - the transport "peer" between processes, over the stand-in for libcuda.
 *
 * The one idea: the stand-in's side streams are threads that work late, while the compute lane works at once on the caller's
 * thread and waits there as a stream would. So what is not waited for on the way is read too early, and memory that is
 * written too early by its owner is read too late. The tests of all transports run here as well.
 */
#include "any_transport.h"

#include "cuda_image.h"
#include "device_cuda.h"
#include "file.h"
#include "peer.h"
#include "torch_cuda.h"

/* --- what the device would take of others ----------------------------------------------------------------------------------- */

static const uint64_t image[2] = {0xba55ed50u, 0};

const void *zs_cuda_image(void)
{
    return image;
}

const char *zs_cuda_image_targets(void)
{
    return "sm_90";
}

int zs_cuda_image_version(void)
{
    return 13000;
}

size_t zs_cuda_image_bytes(void)
{
    return sizeof image;
}

static const char *const no_torch = "there is no torch in this program";

zs_status zs_torch_cuda_stream(int index, void **out)
{
    (void)index;
    (void)out;
    return ZS_FAIL(ZS_ERR_STATE, "%s", no_torch);
}

zs_status zs_torch_cuda_alloc(int index, size_t bytes, void **ptr, void **owner)
{
    (void)index;
    (void)bytes;
    (void)ptr;
    (void)owner;
    return ZS_FAIL(ZS_ERR_STATE, "%s", no_torch);
}

void zs_torch_cuda_free(void *owner)
{
    (void)owner;
}

/* --- running over it -------------------------------------------------------------------------------------------------------- */

static zs_comm *hosts; /* below env->comm */

static void begin_gpu(rank_env *env)
{
    const zs_device *device = NULL;
    zs_mover *mover = NULL;
    setenv("FAKE_CUDA_DELAY_US", "20", 1);
    hosts = env->comm;
    OK(zs_device_cuda(0, true, &device));
    OK(zs_mover_peer_new(hosts, device, &mover));
    OK(zs_comm_gpu_new(hosts, mover, &env->comm));
}

static void end_gpu(rank_env *env)
{
    zs_comm_release(env->comm);
    env->comm = hosts;
}

#define OVER_GPUS(body)                    \
    static void peer_##body(rank_env *env) \
    {                                      \
        begin_gpu(env);                    \
        body(env);                         \
        end_gpu(env);                      \
    }

OVER_GPUS(rounds_in_a_row)
OVER_GPUS(sums_are_shared)
OVER_GPUS(rounds_have_an_order)
OVER_GPUS(exchanges_storm)
OVER_GPUS(broadcasts_from_all_roots)

/* --- gathers ----------------------------------------------------------------------------------------------------------------- */

enum { FLATS = 3, STEPS = 30 };
static const size_t shard_bytes[FLATS] = {512, 64, 3 << 20}; /* two of one allocation, one with its own */

static void compare_full(rank_env *env, const char *full, size_t bytes, unsigned seed)
{
    for (int r = 0; r < env->world; r++)
        CHECK(has_pattern(full + (size_t)r * bytes, bytes, seed + (unsigned)r));
}

/* Shards are written again as soon as a gather has been finished, which is when the optimizer would. */
static void gathers_see_each_step(rank_env *env)
{
    zs_flat_mem flats[FLATS];
    zs_mem *full[FLATS];
    begin_gpu(env);
    for (int f = 0; f < FLATS; f++) {
        OK(env->comm->ops->flat_new(env->comm, shard_bytes[f], &flats[f]));
        OK(zs_device_mem_new(env->comm->device, (size_t)env->world * shard_bytes[f], &full[f]));
        CHECK(flats[f].shard[0] == 0 && flats[f].shard[shard_bytes[f] - 1] == 0);
    }
    for (unsigned step = 0; step < STEPS; step++) {
        if (env->rank == (int)step % env->world) jitter(env);
        for (int f = 0; f < FLATS; f++)
            fill_pattern(flats[f].shard, shard_bytes[f], 1000 * step + 100 * (unsigned)f + (unsigned)env->rank);
        zs_gathering *on_the_way[FLATS];
        for (int f = 0; f < FLATS; f++)
            OK(env->comm->ops->gather_start(env->comm, &flats[f], "layer", (zs_target){full[f], full[f]->ptr},
                                            &on_the_way[f]));
        for (int f = FLATS; f-- > 0;)
            OK(env->comm->ops->gather_finish(env->comm, on_the_way[f]));
        for (int f = 0; f < FLATS; f++)
            compare_full(env, full[f]->ptr, shard_bytes[f], 1000 * step + 100 * (unsigned)f);
    }
    for (int f = 0; f < FLATS; f++) {
        env->comm->ops->flat_free(env->comm, &flats[f]);
        zs_mem_release(full[f]);
    }
    end_gpu(env);
}

/* What goes on one rank may be there on another one for a while; the driver may give its place to what comes next. */
static void memory_that_comes_and_goes(rank_env *env)
{
    enum { BYTES = 4 << 20 };
    zs_mem *full = NULL;
    begin_gpu(env);
    OK(zs_device_mem_new(env->comm->device, (size_t)env->world * BYTES, &full));
    for (unsigned step = 0; step < STEPS; step++) {
        zs_flat_mem flat;
        OK(env->comm->ops->flat_new(env->comm, BYTES, &flat));
        fill_pattern(flat.shard, BYTES, 10 * step + (unsigned)env->rank);
        OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){full, full->ptr}));
        compare_full(env, full->ptr, BYTES, 10 * step);
        const void *at = flat.shard;
        env->comm->ops->flat_free(env->comm, &flat);
        zs_peer_alloc *kept = zs_peer_alloc_at(at); /* while the peers may have it mapped */
        CHECK(kept != NULL);
        zs_peer_alloc_release(kept);
        if (step % 3 != 0) continue;
        meet(env); /* all hear that it has gone */
        CHECK(zs_peer_alloc_at(at) == NULL && zs_peer_gone(((zs_gpu_comm *)env->comm)->mover) == 0);
    }
    zs_mem_release(full);
    end_gpu(env);
}

/* Shards that peers can not map, as offloaded ones are, of several sizes. */
static void shards_of_the_host(rank_env *env)
{
    enum { MOST = 3 << 20 };
    const size_t sizes[] = {512, MOST, 64, 4096};
    zs_mem *full = NULL;
    zs_mem *own = NULL;
    OK(zs_mem_new_private(4 * MOST, &own));
    begin_gpu(env);
    OK(zs_device_mem_new(env->comm->device, (size_t)env->world * MOST, &full));
    for (unsigned round = 0; round < 24; round++) {
        size_t bytes = sizes[round % 4];
        zs_flat_mem flat = {.mem = own, .shard_bytes = bytes};
        flat.shard = (char *)own->ptr + (size_t)(round % 4) * MOST;
        own->on_host = round % 3 != 0;
        fill_pattern(flat.shard, bytes, 10 * round + (unsigned)env->rank);
        OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){full, full->ptr}));
        compare_full(env, full->ptr, bytes, 10 * round);
        if (round % 7 == 0) meet(env);
    }
    zs_mem_release(full);
    zs_mem_release(own);
    end_gpu(env);
}

static void bucket_of_another_kind_is_refused(rank_env *env)
{
    test_unit units[UNITS];
    zs_mem *own = NULL;
    uint64_t used[2] = {0};
    begin_gpu(env);
    make_units(env, units, ZS_REDUCE_SCATTER);
    zs_bucket wrong = units[0].bucket;
    OK(zs_device_mem_new(env->comm->device, wrong.bytes, &own));
    wrong.ptr = own->ptr;
    FAILS(env->comm->ops->post(env->comm, units[0].cunit, &wrong, used), ZS_ERR_STATE, "peers can map");
    zs_mem_release(own);
    free_units(env, units);
    end_gpu(env);
}

static void device_broadcasts(rank_env *env)
{
    const size_t sizes[] = {0, 12, 4096, ZS_PEER_STAGE, 3 * ZS_PEER_STAGE + 4};
    zs_mem *mem = NULL;
    begin_gpu(env);
    OK(zs_device_mem_new(env->comm->device, 4 * ZS_PEER_STAGE, &mem));
    char *data = mem->ptr;
    for (int round = 0; round < 20; round++) {
        int root = round % env->world;
        size_t bytes = sizes[round % 5];
        memset(data, 0xee, mem->bytes);
        if (env->rank == root) fill_pattern(data, bytes, (unsigned)round);
        jitter(env);
        OK(env->comm->ops->broadcast_device(env->comm, data, bytes, root));
        CHECK(has_pattern(data, bytes, (unsigned)round) && data[bytes] == (char)0xee);
    }
    FAILS(env->comm->ops->broadcast_device(env->comm, data, 4, env->world), ZS_ERR_VALUE, "no rank");
    zs_mem_release(mem);
    end_gpu(env);
}

/* --- rounds ------------------------------------------------------------------------------------------------------------------ */

/* Several ranks get the same slice, of each of two flats. */
static void parts_are_shared(rank_env *env)
{
    enum { PARTS = 2, SLICE = 256 };
    int part_of[MAX_RANKS];
    for (int r = 0; r < env->world; r++)
        part_of[r] = r % PARTS;
    zs_cunit_spec spec = {.name = "layer", .n_params = 3, .n_slices = 2, .parts = PARTS, .part_of = part_of};
    spec.slice_bytes[0] = SLICE;
    spec.slice_bytes[1] = 64;
    zs_cunit *cunit = NULL;
    zs_bucket bucket;
    zs_sources from;
    bool ready = false;
    uint64_t used = 5;
    begin_gpu(env);
    OK(env->comm->ops->cunit_new(env->comm, &spec, &cunit));
    OK(env->comm->ops->bucket_new(env->comm, PARTS * (SLICE + 64), &bucket));
    for (unsigned round = 0; round < 50; round++) {
        OK(env->comm->ops->reusable(env->comm, cunit, ZS_WAIT, &ready));
        for (unsigned p = 0; p < PARTS; p++) {
            fill_pattern(bucket.ptr + p * SLICE, SLICE, 100 * round + 10 * p + (unsigned)env->rank);
            fill_pattern(bucket.ptr + PARTS * SLICE + p * 64, 64, 7000 * round + 10 * p + (unsigned)env->rank);
        }
        OK(env->comm->ops->post(env->comm, cunit, &bucket, &used));
        OK(env->comm->ops->collect(env->comm, cunit, ZS_WAIT, &ready, &from));
        catch_up(env);
        unsigned part = (unsigned)part_of[env->rank];
        for (int r = 0; r < env->world; r++) {
            CHECK(has_pattern(from.data[r] + from.at[0], SLICE, 100 * round + 10 * part + (unsigned)r));
            CHECK(has_pattern(from.data[r] + from.at[1], 64, 7000 * round + 10 * part + (unsigned)r));
            CHECK(*from.used[r] == 5);
        }
        OK(env->comm->ops->release(env->comm, cunit));
    }
    meet(env);
    env->comm->ops->cunit_free(env->comm, cunit);
    env->comm->ops->bucket_free(env->comm, &bucket);
    end_gpu(env);
}

/* What rank `r` brings in a round, for the slice of rank `part`. */
static unsigned late_seed(unsigned round, int r, int part)
{
    return 1000 * round + 10 * (unsigned)r + (unsigned)part;
}

/* Queues the sum's reading: a copy of the own slice of every rank's bucket, this rank's last. */
static void read_late(rank_env *env, const zs_sources *from, char *result, size_t bytes)
{
    for (int i = 1; i <= env->world; i++) {
        int r = (env->rank + i) % env->world;
        OK(zs_device_copy(env->comm->device, ZS_LANE_REDUCE, result + (size_t)r * bytes, from->data[r] + from->at[0],
                          bytes));
    }
}

/* Buckets are packed and read by streams that work late, and packed again as soon as they may be. */
static void streams_work_late(rank_env *env)
{
    enum { SLICE = 4096, ROUNDS = 40 };
    zs_cunit_spec spec = {.name = "layer", .n_params = 3, .n_slices = 1, .slice_bytes = {SLICE}};
    zs_cunit *cunit = NULL;
    zs_bucket bucket;
    zs_sources from;
    zs_mem *results = NULL;
    bool ready = false;
    uint64_t used = 5;
    size_t whole = (size_t)env->world * SLICE;
    char *packed = malloc(whole);
    CHECK(packed != NULL);
    begin_gpu(env);
    setenv("FAKE_CUDA_DELAY_US", env->rank == 0 ? "1500" : "200", 1);
    OK(env->comm->ops->cunit_new(env->comm, &spec, &cunit));
    OK(env->comm->ops->bucket_new(env->comm, whole, &bucket));
    OK(zs_device_mem_new(env->comm->device, ROUNDS * whole, &results));
    for (unsigned round = 0; round < ROUNDS; round++) {
        OK(env->comm->ops->reusable(env->comm, cunit, ZS_WAIT, &ready));
        CHECK(ready);
        for (int p = 0; p < env->world; p++)
            fill_pattern(packed + p * SLICE, SLICE, late_seed(round, env->rank, p));
        if (round % 2 == 0) /* at once, as it is on the compute lane; or by the lane itself */
            memcpy(bucket.ptr, packed, whole);
        else
            OK(zs_device_copy(env->comm->device, ZS_LANE_REDUCE, bucket.ptr, packed, whole));
        OK(env->comm->ops->post(env->comm, cunit, &bucket, &used));
        OK(env->comm->ops->collect(env->comm, cunit, ZS_WAIT, &ready, &from));
        read_late(env, &from, (char *)results->ptr + round * whole, SLICE);
        OK(env->comm->ops->release(env->comm, cunit));
    }
    catch_up(env);
    for (unsigned round = 0; round < ROUNDS; round++)
        for (int r = 0; r < env->world; r++)
            CHECK(has_pattern((char *)results->ptr + round * whole + (size_t)r * SLICE, SLICE,
                              late_seed(round, r, env->rank)));
    meet(env);
    env->comm->ops->cunit_free(env->comm, cunit);
    env->comm->ops->bucket_free(env->comm, &bucket);
    zs_mem_release(results);
    free(packed);
    end_gpu(env);
}

/* Rounds of several units are out at a time, and buckets go from one unit to another from round to round. */
static void buckets_change_hands(rank_env *env)
{
    test_unit units[UNITS];
    begin_gpu(env);
    make_units(env, units, ZS_REDUCE_SCATTER);
    zs_bucket large[2];
    size_t bytes = (size_t)env->world * (UNITS * 512 + 64);
    for (int b = 0; b < 2; b++)
        OK(env->comm->ops->bucket_new(env->comm, bytes, &large[b]));
    for (int u = 0; u < UNITS; u++)
        env->comm->ops->bucket_free(env->comm, &units[u].bucket);
    for (int round = 0; round < 60; round++) {
        bool other = draw(env, 2) == 1; /* the ranks differ in this */
        for (int u = 0; u < 2; u++)
            units[u].bucket = large[other ? 1 - u : u];
        /* Both are idle before either is packed, as the pool of buckets has it. */
        for (int u = 0; u < 2; u++) {
            bool ready = false;
            OK(env->comm->ops->reusable(env->comm, units[u].cunit, ZS_WAIT, &ready));
            CHECK(ready);
        }
        for (int u = 0; u < 2; u++)
            post_unit(env, &units[u], u, false);
        for (int u = 0; u < 2; u++)
            finish_unit(env, &units[u], u);
    }
    meet(env);
    for (int u = 0; u < UNITS; u++)
        env->comm->ops->cunit_free(env->comm, units[u].cunit);
    for (int b = 0; b < 2; b++)
        env->comm->ops->bucket_free(env->comm, &large[b]);
    end_gpu(env);
}

/* A unit that was not there long ago has the place of one that has gone. */
static void units_come_and_go(rank_env *env)
{
    begin_gpu(env);
    for (int model = 0; model < 10; model++) {
        test_unit units[UNITS];
        make_units(env, units, ZS_REDUCE_SCATTER);
        zs_peer_of(env->comm)->units = ZS_PEER_UNITS - UNITS; /* the next ones begin anew */
        if (model % 2 == 1) zs_peer_of(env->comm)->units = 0;
        for (int u = 0; u < UNITS; u++) {
            post_unit(env, &units[u], u, false);
            finish_unit(env, &units[u], u);
        }
        free_units(env, units);
    }
    end_gpu(env);
}

static void too_many_units_are_refused(rank_env *env)
{
    zs_cunit *first = NULL, *second = NULL;
    zs_cunit_spec spec = {.name = "layer", .n_params = 1};
    begin_gpu(env);
    OK(env->comm->ops->cunit_new(env->comm, &spec, &first));
    zs_peer_of(env->comm)->units = ZS_PEER_UNITS;
    FAILS(env->comm->ops->cunit_new(env->comm, &spec, &second), ZS_ERR_STATE, "4096 units");
    env->comm->ops->cunit_free(env->comm, first);
    end_gpu(env);
}

/* --- failures ---------------------------------------------------------------------------------------------------------------- */

/* A rank dies, and the others' streams wait for it: they are let go, and the next call names the rank. */
static void killed_rank_lets_streams_go(rank_env *env)
{
    zs_flat_mem flat;
    zs_mem *full = NULL;
    begin_gpu(env);
    OK(env->comm->ops->flat_new(env->comm, 512, &flat));
    OK(zs_device_mem_new(env->comm->device, (size_t)env->world * 512, &full));
    OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){full, full->ptr}));
    meet(env);
    if (env->rank == 1) raise(SIGKILL);
    double start = now();
    zs_target to = {full, full->ptr};
    zs_status status = zs_comm_gather(env->comm, &flat, "layer", to); /* returns when the stream goes on */
    if (status == ZS_OK) status = zs_comm_gather(env->comm, &flat, "layer", to);
    CHECK(status == ZS_ERR_PEER && strstr(zs_last_message(), "rank 1 (pid") != NULL);
    zs_clear_error();
    FAILS(zs_comm_gather(env->comm, &flat, "layer", to), ZS_ERR_STATE, "rank 1 (pid");
    CHECK(now() - start < 20.0);
    env->comm->ops->flat_free(env->comm, &flat);
    zs_mem_release(full);
    end_gpu(env);
}

/* A rank that does not come is an error when the time is over. */
static void absent_rank_is_a_timeout(rank_env *env)
{
    zs_flat_mem flat;
    zs_mem *full = NULL;
    begin_gpu(env);
    hosts->timeout = 2.0;
    OK(env->comm->ops->flat_new(env->comm, 512, &flat));
    OK(zs_device_mem_new(env->comm->device, (size_t)env->world * 512, &full));
    zs_target to = {full, full->ptr};
    zs_gathering *on_the_way = NULL;
    OK(zs_comm_gather(env->comm, &flat, "layer", to));
    if (env->rank == 1) {
        sleep_us(4000000);
    } else {
        OK(env->comm->ops->gather_start(env->comm, &flat, "layer", to, &on_the_way));
        OK(env->comm->ops->gather_finish(env->comm, on_the_way));
        FAILS(env->comm->ops->gather_start(env->comm, &flat, "layer", to, &on_the_way), ZS_ERR_TIMEOUT,
              "the gather of parameters has not ended on the GPU of rank");
    }
    env->comm->ops->flat_free(env->comm, &flat);
    zs_mem_release(full);
    end_gpu(env);
}

/* One rank's driver refuses a call: it fails there, and the others do not hang. */
static void failing_call_lets_the_peers_go(rank_env *env)
{
    zs_flat_mem flat;
    zs_mem *full = NULL;
    begin_gpu(env);
    OK(env->comm->ops->flat_new(env->comm, 512, &flat));
    OK(zs_device_mem_new(env->comm->device, (size_t)env->world * 512, &full));
    zs_target to = {full, full->ptr};
    OK(zs_comm_gather(env->comm, &flat, "layer", to));
    meet(env);
    if (env->rank == 1) {
        setenv("FAKE_CUDA_FAIL", "cuMemcpyAsync:1", 1);
        FAILS(zs_comm_gather(env->comm, &flat, "layer", to), ZS_ERR_CUDA, "cuMemcpyAsync");
        unsetenv("FAKE_CUDA_FAIL");
        FAILS(zs_comm_gather(env->comm, &flat, "layer", to), ZS_ERR_STATE, "since an earlier failure");
    } else {
        zs_status status = zs_comm_gather(env->comm, &flat, "layer", to);
        char all[MAX_RANKS];
        if (status == ZS_OK) status = env->comm->ops->exchange(env->comm, "", 1, all);
        CHECK(status != ZS_OK && strstr(zs_last_message(), "cuMemcpyAsync") != NULL);
        zs_clear_error();
    }
    env->comm->ops->flat_free(env->comm, &flat);
    zs_mem_release(full);
    end_gpu(env);
}

/* The making fails on all ranks where it does on one. */
static void birth_fails_on_all_ranks(rank_env *env)
{
    const zs_device *device = NULL;
    zs_mover *mover = NULL;
    static const char *const calls[] = {"cuMemAlloc:1:2", "cuIpcGetMemHandle:1", "cuIpcOpenMemHandle:1",
                                        "cuStreamCreateWithPriority:1"};
    OK(zs_device_cuda(0, true, &device));
    for (int i = 0; i < 4; i++) {
        if (env->rank == 1) setenv("FAKE_CUDA_FAIL", calls[i], 1);
        zs_clear_error();
        CHECK(zs_mover_peer_new(env->comm, device, &mover) == (i == 0 ? ZS_ERR_MEMORY : ZS_ERR_CUDA));
        CHECK(strstr(zs_last_message(), "rank 1: cu") != NULL);
        zs_clear_error();
        unsetenv("FAKE_CUDA_FAIL");
    }
    begin_gpu(env);
    meet(env);
    end_gpu(env);
}

static void child_is_refused(rank_env *env)
{
    begin_gpu(env);
    char all[MAX_RANKS];
    pid_t pid = fork();
    if (pid == 0) {
        FAILS(env->comm->ops->exchange(env->comm, "", 1, all), ZS_ERR_STATE, "a process forked from rank");
        zs_comm_release(env->comm);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    meet(env);
    end_gpu(env);
}

/* Two transports map the same memory: each closes for itself. */
static void two_transports(rank_env *env)
{
    zs_flat_mem flat;
    zs_mem *full = NULL;
    begin_gpu(env);
    zs_comm *first = env->comm;
    env->comm = hosts;
    begin_gpu(env);
    OK(first->ops->flat_new(first, 512, &flat));
    OK(zs_device_mem_new(first->device, (size_t)env->world * 512, &full));
    fill_pattern(flat.shard, 512, (unsigned)env->rank);
    OK(zs_comm_gather(first, &flat, "layer", (zs_target){full, full->ptr}));
    OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){full, full->ptr}));
    zs_comm_release(first);
    memset(full->ptr, 0, full->bytes);
    OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){full, full->ptr}));
    compare_full(env, full->ptr, 512, 0);
    const void *at = flat.shard;
    env->comm->ops->flat_free(env->comm, &flat);
    meet(env);
    CHECK(zs_peer_alloc_at(at) == NULL);
    zs_mem_release(full);
    end_gpu(env);
}

int main(int argc, char **argv)
{
    static const rank_test tests[] = {
        TEST(peer_rounds_in_a_row, .least = 2),
        TEST(peer_sums_are_shared, .least = 2),
        TEST(peer_rounds_have_an_order, .least = 2),
        TEST(peer_exchanges_storm, .least = 2),
        TEST(peer_broadcasts_from_all_roots, .least = 2),
        TEST(gathers_see_each_step, .least = 2),
        TEST(memory_that_comes_and_goes, .least = 2),
        TEST(shards_of_the_host, .least = 2),
        TEST(bucket_of_another_kind_is_refused, .least = 2),
        TEST(device_broadcasts, .least = 2),
        TEST(parts_are_shared, .least = 2),
        TEST(streams_work_late, .least = 2),
        TEST(buckets_change_hands, .least = 2),
        TEST(units_come_and_go, .least = 2),
        TEST(too_many_units_are_refused, .least = 2),
        TEST(killed_rank_lets_streams_go, .least = 2, .killed = 1),
        TEST(absent_rank_is_a_timeout, .least = 2),
        TEST(failing_call_lets_the_peers_go, .least = 2),
        TEST(birth_fails_on_all_ranks, .least = 2),
        TEST(child_is_refused, .least = 2),
        TEST(two_transports, .least = 2),
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
