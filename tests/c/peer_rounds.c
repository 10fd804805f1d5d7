/* peer_rounds.c - rounds of the transport "peer": parts, streams that work late, buckets and units that change (test_backend_peer.c).
 *
 * The one idea: what a rank posts follows from (rank, part, round), so each rank can check every byte that it reads, however
 * late its stream does.
 */
#include "peer_tests.h"

/* --- rounds ------------------------------------------------------------------------------------------------------------------ */

/* Several ranks get the same slice, of each of two flats. */
void parts_are_shared(rank_env *env)
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
    OK(zs_cunit_new(env->comm, &spec, &cunit));
    OK(zs_comm_bucket_new(env->comm, PARTS * (SLICE + 64), &bucket));
    for (unsigned round = 0; round < 50; round++) {
        OK(zs_cunit_reusable(env->comm, cunit, ZS_WAIT, &ready));
        for (unsigned p = 0; p < PARTS; p++) {
            fill_pattern(bucket.ptr + p * SLICE, SLICE, 100 * round + 10 * p + (unsigned)env->rank);
            fill_pattern(bucket.ptr + PARTS * SLICE + p * 64, 64, 7000 * round + 10 * p + (unsigned)env->rank);
        }
        OK(zs_cunit_post(env->comm, cunit, &bucket, &used));
        OK(zs_cunit_collect(env->comm, cunit, ZS_WAIT, &ready, &from));
        catch_up(env);
        unsigned part = (unsigned)part_of[env->rank];
        for (int r = 0; r < env->world; r++) {
            CHECK(has_pattern(from.data[r] + from.at[0], SLICE, 100 * round + 10 * part + (unsigned)r));
            CHECK(has_pattern(from.data[r] + from.at[1], 64, 7000 * round + 10 * part + (unsigned)r));
            CHECK(*from.used[r] == 5);
        }
        OK(zs_cunit_release(env->comm, cunit));
    }
    meet(env);
    zs_cunit_free(env->comm, cunit);
    zs_comm_bucket_free(env->comm, &bucket);
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
        OK(zs_device_copy(env->comm->device, ZS_STREAM_REDUCE, result + (size_t)r * bytes, from->data[r] + from->at[0],
                          bytes));
    }
}

/* Buckets are packed and read by streams that work late, and packed again as soon as they may be. */
void streams_work_late(rank_env *env)
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
    OK(zs_cunit_new(env->comm, &spec, &cunit));
    OK(zs_comm_bucket_new(env->comm, whole, &bucket));
    OK(zs_device_mem_new(env->comm->device, ROUNDS * whole, &results));
    for (unsigned round = 0; round < ROUNDS; round++) {
        OK(zs_cunit_reusable(env->comm, cunit, ZS_WAIT, &ready));
        CHECK(ready);
        for (int p = 0; p < env->world; p++)
            fill_pattern(packed + p * SLICE, SLICE, late_seed(round, env->rank, p));
        if (round % 2 == 0) /* at once, as it is on the compute stream; or by the reduce stream itself */
            memcpy(bucket.ptr, packed, whole);
        else
            OK(zs_device_copy(env->comm->device, ZS_STREAM_REDUCE, bucket.ptr, packed, whole));
        OK(zs_cunit_post(env->comm, cunit, &bucket, &used));
        OK(zs_cunit_collect(env->comm, cunit, ZS_WAIT, &ready, &from));
        read_late(env, &from, (char *)results->ptr + round * whole, SLICE);
        OK(zs_cunit_release(env->comm, cunit));
    }
    catch_up(env);
    for (unsigned round = 0; round < ROUNDS; round++)
        for (int r = 0; r < env->world; r++)
            CHECK(has_pattern((char *)results->ptr + round * whole + (size_t)r * SLICE, SLICE,
                              late_seed(round, r, env->rank)));
    meet(env);
    zs_cunit_free(env->comm, cunit);
    zs_comm_bucket_free(env->comm, &bucket);
    zs_mem_release(results);
    free(packed);
    end_gpu(env);
}

/* Rounds of several units are out at a time, and buckets go from one unit to another from round to round. */
void buckets_change_hands(rank_env *env)
{
    test_unit units[UNITS];
    begin_gpu(env);
    make_units(env, units, ZS_REDUCE_SCATTER);
    zs_bucket large[2];
    size_t bytes = (size_t)env->world * (UNITS * 512 + 64);
    for (int b = 0; b < 2; b++)
        OK(zs_comm_bucket_new(env->comm, bytes, &large[b]));
    for (int u = 0; u < UNITS; u++)
        zs_comm_bucket_free(env->comm, &units[u].bucket);
    for (int round = 0; round < 60; round++) {
        bool other = draw(env, 2) == 1; /* the ranks differ in this */
        for (int u = 0; u < 2; u++)
            units[u].bucket = large[other ? 1 - u : u];
        /* Both are idle before either is packed, as the pool of buckets has it. */
        for (int u = 0; u < 2; u++) {
            bool ready = false;
            OK(zs_cunit_reusable(env->comm, units[u].cunit, ZS_WAIT, &ready));
            CHECK(ready);
        }
        for (int u = 0; u < 2; u++)
            post_unit(env, &units[u], u, false);
        for (int u = 0; u < 2; u++)
            finish_unit(env, &units[u], u);
    }
    meet(env);
    for (int u = 0; u < UNITS; u++)
        zs_cunit_free(env->comm, units[u].cunit);
    for (int b = 0; b < 2; b++)
        zs_comm_bucket_free(env->comm, &large[b]);
    end_gpu(env);
}

/* A unit that was not there long ago has the place of one that has gone. */
void units_come_and_go(rank_env *env)
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

void too_many_units_are_refused(rank_env *env)
{
    zs_cunit *first = NULL, *second = NULL;
    zs_cunit_spec spec = {.name = "layer", .n_params = 1};
    begin_gpu(env);
    OK(zs_cunit_new(env->comm, &spec, &first));
    zs_peer_of(env->comm)->units = ZS_PEER_UNITS;
    FAILS(zs_cunit_new(env->comm, &spec, &second), ZS_ERR_STATE, "4096 units");
    zs_cunit_free(env->comm, first);
    end_gpu(env);
}
