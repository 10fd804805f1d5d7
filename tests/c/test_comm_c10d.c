/* test_comm_c10d.c - the c10d transport's own logic, and the self transport, by the tests of any_transport.h.
 *
 * The one idea: the process group is played by an shm transport, so that no torch is needed, every collective that is
 * issued can be counted, and failures can be made. What is real here is all of comm_c10d.c; torch_c10d.cpp is tested from
 * Python.
 */
#include "any_transport.h"

#include "tensor.h"

/* --- a process group over shm --------------------------------------------------------------------------------------- */

struct zs_group {
    double timeout;
};

struct zs_work {
    int looks; /* so often zs_work_done has said no */
};

static zs_comm *wire;          /* what the group runs over */
static int calls;              /* collectives so far */
static int under_way;          /* works that nobody has waited for yet */
static zs_status failure;      /* what the next collective fails with */
static zs_status late_failure; /* what the next wait for one fails with */
static const char *complaint;  /* and the words */

zs_status zs_group_new(const char *name, zs_group **out)
{
    static zs_group group;
    if (strcmp(name, "fake") != 0) return ZS_FAIL(ZS_ERR_TORCH, "no group is registered under %s", name);
    *out = &group;
    return ZS_OK;
}

void zs_group_free(zs_group *group)
{
    (void)group;
}

void zs_group_set_timeout(zs_group *group, double seconds)
{
    group->timeout = seconds;
}

static zs_status count_call(const zs_group *group)
{
    calls++;
    CHECK(group->timeout == wire->timeout);
    if (failure != ZS_OK) return ZS_FAIL(failure, "%s", complaint);
    return ZS_OK;
}

/* Gathers all ranks' `bytes`, in the wire's small messages. */
static void gather_all(const char *in, char *out, size_t bytes, size_t stride)
{
    char box[MAX_RANKS * 4096];
    for (size_t at = 0; at < bytes; at += 4096) {
        size_t part = bytes - at < 4096 ? bytes - at : 4096;
        OK(wire->ops->exchange(wire, in + at, part, box));
        for (int r = 0; r < wire->world; r++)
            memcpy(out + (size_t)r * stride + at, box + (size_t)r * part, part);
    }
}

zs_status zs_group_all_gather(zs_group *group, const void *in, void *out, size_t bytes, int world)
{
    CHECK(world == wire->world);
    ZS_TRY(count_call(group));
    gather_all(in, out, bytes, bytes);
    return ZS_OK;
}

zs_status zs_group_all_to_all(zs_group *group, const void *in, void *out, size_t piece_bytes, int world, zs_work **work)
{
    CHECK(world == wire->world);
    ZS_TRY(count_call(group));
    size_t whole = piece_bytes * (size_t)world;
    char *all = malloc(whole * (size_t)world);
    CHECK(all != NULL);
    gather_all(in, all, whole, whole);
    for (int r = 0; r < world; r++)
        memcpy((char *)out + (size_t)r * piece_bytes, all + (size_t)r * whole + (size_t)wire->rank * piece_bytes,
               piece_bytes);
    free(all);
    *work = calloc(1, sizeof **work);
    CHECK(*work != NULL);
    under_way++;
    return ZS_OK;
}

bool zs_work_done(const zs_work *work)
{
    return ((zs_work *)work)->looks++ >= 2;
}

zs_status zs_work_wait(zs_work *work)
{
    under_way--;
    free(work);
    if (late_failure != ZS_OK) return ZS_FAIL(late_failure, "%s", complaint);
    return ZS_OK;
}

zs_status zs_group_broadcast(zs_group *group, void *data, size_t bytes, int root)
{
    ZS_TRY(count_call(group));
    return wire->ops->broadcast(wire, data, bytes, root);
}

/* --- the common tests, here -------------------------------------------------------------------------------------------- */

/* Runs `body` with c10d over this rank's shm. */
static void run_over_c10d(rank_env *env, rank_body body)
{
    wire = env->comm;
    OK(zs_comm_c10d_new("fake", env->rank, env->world, wire->timeout, &env->comm));
    body(env);
    zs_comm_release(env->comm);
    env->comm = wire;
}

/* Runs `body` in a world of one. */
static void run_alone(rank_env *env, rank_body body)
{
    rank_env alone = *env;
    alone.rank = 0;
    alone.world = 1;
    OK(zs_comm_self_new(&alone.comm));
    body(&alone);
    zs_comm_release(alone.comm);
}

#define IN_BOTH(body)                             \
    static void c10d_##body(rank_env *env)        \
    {                                             \
        run_over_c10d(env, body);                 \
    }                                             \
    static void self_##body(rank_env *env)        \
    {                                             \
        if (env->rank == 0) run_alone(env, body); \
    }

IN_BOTH(rounds_in_a_row)
IN_BOTH(sums_are_shared)
IN_BOTH(rounds_have_an_order)
IN_BOTH(exchanges_storm)
IN_BOTH(broadcasts_from_all_roots)

/* --- what only c10d does --------------------------------------------------------------------------------------------------- */

static void gather_fills_the_full_buffer(rank_env *env)
{
    enum { BYTES = 10 * 1024 };
    char *full = malloc((size_t)env->world * BYTES);
    zs_flat_mem flat;
    CHECK(full != NULL);
    OK(env->comm->ops->flat_new(env->comm, BYTES, &flat));
    CHECK(flat.full == NULL && flat.shard[0] == 0 && flat.shard[BYTES - 1] == 0);
    fill_pattern(flat.shard, BYTES, (unsigned)env->rank);
    OK(env->comm->ops->gather(env->comm, &flat, full));
    for (int r = 0; r < env->world; r++)
        CHECK(has_pattern(full + r * BYTES, BYTES, (unsigned)r));
    env->comm->ops->flat_free(env->comm, &flat);
    free(full);
}

static void c10d_gather(rank_env *env)
{
    run_over_c10d(env, gather_fills_the_full_buffer);
}

/* The bitmap and the order's check cost no collective of their own, nor does a unit with several flats. */
static void one_collective_a_round(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    for (int round = 0; round < 20; round++)
        for (int u = 0; u < UNITS; u++) {
            int before = calls;
            post_unit(env, &units[u], u, false);
            finish_unit(env, &units[u], u);
            CHECK(calls == before + 1);
        }
    free_units(env, units);
}

static void c10d_one_collective_a_round(rank_env *env)
{
    run_over_c10d(env, one_collective_a_round);
}

/* Looking does not wait, unless a collective has to follow in the same place on all ranks. */
static void looking(rank_env *env)
{
    for (int all = 0; all < 2; all++) {
        test_unit units[UNITS];
        bool ready = false;
        zs_sources from;
        int looks = 0;
        make_units(env, units, all ? ZS_REDUCE_ALL : ZS_REDUCE_SCATTER);
        post_unit(env, &units[0], 0, true);
        while (!ready) {
            OK(env->comm->ops->collect(env->comm, units[0].cunit, ZS_WAIT_NOT, &ready, &from));
            looks++;
        }
        CHECK(looks == (all ? 1 : 3));
        read_sources(env, &units[0], 0, &from, true);
        post_unit(env, &units[1], 1, true);
        CHECK(under_way == 1);
        free_units(env, units); /* waits for what is under way */
        CHECK(under_way == 0);
    }
}

static void c10d_looking(rank_env *env)
{
    run_over_c10d(env, looking);
}

/* Two units' rounds out at a time, as a backward has them: each keeps its own receive buffer. */
static void rounds_overlap(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    for (int round = 0; round < 20; round++) {
        for (int u = 0; u < UNITS; u++)
            post_unit(env, &units[u], u, false);
        for (int u = 0; u < UNITS; u++)
            finish_unit(env, &units[(u + round) % UNITS], (u + round) % UNITS);
    }
    free_units(env, units);
}

static void c10d_rounds_overlap(rank_env *env)
{
    run_over_c10d(env, rounds_overlap);
}

/* Equal sizes, another order: the bytes would fit. */
static void orders_that_differ(rank_env *env)
{
    zs_cunit *units[2];
    uint64_t used[1] = {0};
    for (int u = 0; u < 2; u++) {
        zs_cunit_spec spec = {.name = u == 0 ? "left" : "right", .n_params = 1, .n_slices = 1, .slice_bytes = {64}};
        OK(env->comm->ops->cunit_new(env->comm, &spec, &units[u]));
    }
    int mine = env->rank == 0;
    bool ready = true;
    zs_sources from;
    OK(env->comm->ops->post(env->comm, units[mine], NULL, used));
    FAILS(env->comm->ops->collect(env->comm, units[mine], ZS_WAIT, &ready, &from), ZS_ERR_DIVERGED,
          mine ? "rank 0 reduced unit 'right' (round 1) while rank 1 reduced unit 'left' (round 1)"
               : "reduced unit 'left' (round 1) while rank 0 reduced unit 'right' (round 1)");
    CHECK(!ready);
    for (int u = 0; u < 2; u++)
        env->comm->ops->cunit_free(env->comm, units[u]);
}

static void c10d_orders_that_differ(rank_env *env)
{
    run_over_c10d(env, orders_that_differ);
}

static void errors_name_the_unit(rank_env *env)
{
    test_unit units[UNITS];
    uint64_t used[2] = {0};
    zs_flat_mem flat;
    char byte = 0, all[MAX_RANKS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    OK(env->comm->ops->flat_new(env->comm, 64, &flat));
    failure = ZS_ERR_PEER;
    complaint = "Connection closed by peer [10.0.0.1]:4711";
    FAILS(env->comm->ops->post(env->comm, units[3].cunit, NULL, used), ZS_ERR_PEER,
          "reducing gradients of unit 'blocks.3': Connection closed by peer [10.0.0.1]:4711");
    FAILS(env->comm->ops->gather(env->comm, &flat, all), ZS_ERR_PEER, "gathering parameters: Connection closed");
    failure = ZS_OK;
    late_failure = ZS_ERR_PEER;
    bool ready = true;
    zs_sources from;
    OK(env->comm->ops->post(env->comm, units[2].cunit, NULL, used));
    FAILS(env->comm->ops->collect(env->comm, units[2].cunit, ZS_WAIT, &ready, &from), ZS_ERR_PEER, "unit 'blocks.2'");
    CHECK(!ready);
    FAILS(env->comm->ops->collect(env->comm, units[2].cunit, ZS_WAIT, &ready, &from), ZS_ERR_STATE, "nothing posted");
    late_failure = ZS_OK;
    failure = ZS_ERR_TIMEOUT;
    FAILS(env->comm->ops->exchange(env->comm, &byte, 1, all), ZS_ERR_TIMEOUT, "exchanging a message");
    FAILS(env->comm->ops->broadcast(env->comm, &byte, 1, 0), ZS_ERR_TIMEOUT, "broadcasting");
    failure = ZS_OK;
    env->comm->ops->flat_free(env->comm, &flat);
    free_units(env, units);
    zs_comm *none = NULL;
    FAILS(zs_comm_c10d_new("nobody", 0, 2, 1.0, &none), ZS_ERR_TORCH, "nobody");
}

static void c10d_errors_name_the_unit(rank_env *env)
{
    run_over_c10d(env, errors_name_the_unit);
}

static const rank_test tests[] = {
    TEST(c10d_rounds_in_a_row, .least = 2),
    TEST(c10d_sums_are_shared, .least = 2),
    TEST(c10d_rounds_have_an_order, .least = 2),
    TEST(c10d_exchanges_storm, .least = 2),
    TEST(c10d_broadcasts_from_all_roots, .least = 2),
    TEST(c10d_gather, .least = 2),
    TEST(c10d_one_collective_a_round, .least = 2),
    TEST(c10d_looking, .least = 2),
    TEST(c10d_rounds_overlap, .least = 2),
    TEST(c10d_orders_that_differ, .least = 2),
    TEST(c10d_errors_name_the_unit, .least = 2),
    TEST(self_rounds_in_a_row, .least = MAX_RANKS),
    TEST(self_sums_are_shared, .least = MAX_RANKS),
    TEST(self_rounds_have_an_order, .least = MAX_RANKS),
    TEST(self_exchanges_storm, .least = MAX_RANKS),
    TEST(self_broadcasts_from_all_roots, .least = MAX_RANKS),
};

int main(int argc, char **argv)
{
    return run_tests(tests, sizeof tests / sizeof tests[0], argc, argv);
}
