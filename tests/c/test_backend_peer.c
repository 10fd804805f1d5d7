/* test_backend_peer.c - the transport "peer" between processes, over the stand-in for libcuda.
 *
 * The one idea: the stand-in's side streams are threads that work late, while the compute stream works at once on the caller's
 * thread and waits there as a stream would. So what is not waited for on the way is read too early, and memory that is
 * written too early by its owner is read too late. Here are gathers, and the tests of all
 * transports; rounds are in peer_rounds.c, what fails in peer_failures.c.
 */
#include "peer_tests.h"

#include "shim/torch_cuda.h"

/* --- what the device would take of torch ------------------------------------------------------------------------------------ */

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

/* --- what holds for all transports ------------------------------------------------------------------------------------------ */

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

/* Shards are written again as soon as a gather has been finished, which is when the optimizer would. */
static void gathers_see_each_step(rank_env *env)
{
    zs_flat_mem flats[FLATS];
    zs_mem *full[FLATS];
    begin_gpu(env);
    for (int f = 0; f < FLATS; f++) {
        OK(zs_comm_flat_new(env->comm, shard_bytes[f], &flats[f]));
        OK(zs_device_mem_new(env->comm->device, (size_t)env->world * shard_bytes[f], &full[f]));
        CHECK(flats[f].shard[0] == 0 && flats[f].shard[shard_bytes[f] - 1] == 0);
    }
    for (unsigned step = 0; step < STEPS; step++) {
        if (env->rank == (int)step % env->world) jitter(env);
        for (int f = 0; f < FLATS; f++)
            fill_pattern(flats[f].shard, shard_bytes[f], 1000 * step + 100 * (unsigned)f + (unsigned)env->rank);
        zs_gathering *on_the_way[FLATS];
        for (int f = 0; f < FLATS; f++)
            OK(zs_comm_gather_start(env->comm, &flats[f], "layer", (zs_target){.mem = full[f], .full = full[f]->ptr},
                                    &on_the_way[f]));
        for (int f = FLATS; f-- > 0;)
            OK(zs_comm_gather_finish(env->comm, on_the_way[f]));
        for (int f = 0; f < FLATS; f++)
            compare_full(env, full[f]->ptr, shard_bytes[f], 1000 * step + 100 * (unsigned)f);
    }
    for (int f = 0; f < FLATS; f++) {
        zs_comm_flat_free(env->comm, &flats[f]);
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
        OK(zs_comm_flat_new(env->comm, BYTES, &flat));
        fill_pattern(flat.shard, BYTES, 10 * step + (unsigned)env->rank);
        OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){.mem = full, .full = full->ptr}));
        compare_full(env, full->ptr, BYTES, 10 * step);
        const void *at = flat.shard;
        zs_comm_flat_free(env->comm, &flat);
        zs_peer_alloc *kept = zs_peer_alloc_at(at); /* while the peers may have it mapped */
        CHECK(kept != NULL);
        zs_peer_alloc_release(kept);
        if (step % 3 != 0) continue;
        meet(env); /* all hear that it has gone */
        CHECK(zs_peer_alloc_at(at) == NULL && zs_peer_gone(((zs_gpu_comm *)env->comm)->backend) == 0);
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
        OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){.mem = full, .full = full->ptr}));
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
    FAILS(zs_cunit_post(env->comm, units[0].cunit, &wrong, used), ZS_ERR_STATE, "peers cannot map");
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
        OK(zs_comm_broadcast_at(env->comm, env->comm->device->where, data, bytes, root));
        CHECK(has_pattern(data, bytes, (unsigned)round) && data[bytes] == (char)0xee);
    }
    FAILS(zs_comm_broadcast_at(env->comm, env->comm->device->where, data, 4, env->world), ZS_ERR_VALUE, "out of range");
    zs_mem_release(mem);
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
        TEST(first_move_that_differs_is_named, .least = 2),
        TEST(move_that_is_missing_is_named, .least = 2),
        TEST(moves_of_long_ago_are_not_named, .least = 2),
        TEST(memory_outlives_its_mappings, .least = 2),
        TEST(late_peer_keeps_its_mappings, .least = 2, .slow = true),
    };
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
