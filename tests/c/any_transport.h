/* any_transport.h - tests of every transport: rounds, sums, exchanges, broadcasts, as bodies for run_ranks().
 *
 * A rank's posts follow from (rank, unit, round), so each rank can check every byte that it receives.
 */
#ifndef ZS_TEST_ANY_TRANSPORT_H
#define ZS_TEST_ANY_TRANSPORT_H

#include "ranks.h"

static inline void fill_pattern(char *at, size_t bytes, unsigned seed)
{
    for (size_t i = 0; i < bytes / sizeof(unsigned); i++)
        ((unsigned *)(void *)at)[i] = seed + (unsigned)i * 2654435761u;
}

static inline bool has_pattern(const char *at, size_t bytes, unsigned seed)
{
    for (size_t i = 0; i < bytes / sizeof(unsigned); i++)
        if (((const unsigned *)(const void *)at)[i] != seed + (unsigned)i * 2654435761u) return false;
    return true;
}

static inline void meet(rank_env *env)
{
    char mine = (char)env->rank, all[MAX_RANKS];
    OK(zs_comm_exchange(env->comm, &mine, 1, all));
    for (int r = 0; r < env->world; r++)
        CHECK(all[r] == r);
}

/* --- rounds ------------------------------------------------------------------------------------------------------- */

enum { UNITS = 5, PARAMS = 70, N_FLATS = 2 };

/* The post of rank `rank` for unit `unit` in round `round`, which every rank can compute. */
typedef struct posting {
    bool present;
    float base;
    uint64_t used[2];
} posting;

static inline posting posting_of(int rank, int unit, int round)
{
    unsigned seed = (unsigned)(rank * 7919 + unit * 104729 + round * 1299709 + 1);
    unsigned dice = (unsigned)rand_r(&seed);
    posting p = {.present = dice % 4 != 0, .base = (float)(dice % 1000)};
    p.used[0] = ((uint64_t)(unsigned)rand_r(&seed) << 31) ^ (unsigned)rand_r(&seed);
    p.used[1] = (unsigned)rand_r(&seed) & 63u;
    return p;
}

typedef struct test_unit {
    zs_cunit *cunit;
    zs_bucket bucket;
    size_t shard[N_FLATS]; /* bytes */
    int posted, summed;    /* rounds */
} test_unit;

static inline size_t shard_start(const test_unit *unit, int f, int r, int world)
{
    return (size_t)world * (f == 0 ? 0 : unit->shard[0]) + (size_t)r * unit->shard[f];
}

static inline void make_units(rank_env *env, test_unit *units, zs_reduce_mode mode)
{
    for (int u = 0; u < UNITS; u++) {
        char name[32];
        snprintf(name, sizeof name, "blocks.%d", u);
        units[u] = (test_unit){.shard = {(size_t)(u + 1) * 512, 64}};
        zs_cunit_spec spec = {.name = name, .n_params = PARAMS, .n_flats = N_FLATS, .mode = mode};
        memcpy(spec.shard_bytes, units[u].shard, sizeof units[u].shard);
        OK(zs_cunit_new(env->comm, &spec, &units[u].cunit));
        size_t bytes = (size_t)env->world * (units[u].shard[0] + units[u].shard[1]);
        OK(zs_comm_bucket_new(env->comm, bytes, &units[u].bucket));
    }
}

static inline void free_units(rank_env *env, test_unit *units)
{
    meet(env); /* the last round's readers are through */
    for (int u = 0; u < UNITS; u++) {
        zs_cunit_free(env->comm, units[u].cunit);
        zs_comm_bucket_free(env->comm, &units[u].bucket);
    }
}

static inline void post_unit(rank_env *env, test_unit *unit, int u, bool always)
{
    bool ready = false;
    OK(zs_cunit_reusable(env->comm, unit->cunit, true, &ready));
    CHECK(ready);
    posting p = posting_of(env->rank, u, ++unit->posted);
    bool present = p.present || always;
    for (int f = 0; f < N_FLATS && present; f++)
        for (int r = 0; r < env->world; r++) {
            float *to = (float *)(void *)(unit->bucket.ptr + shard_start(unit, f, r, env->world));
            for (size_t i = 0; i < unit->shard[f] / sizeof *to; i++)
                to[i] = p.base + (float)(f * 10 + r) + (float)i;
        }
    zs_round_header *header = zs_cunit_header(unit->cunit);
    header->flags = 0;
    memcpy(header->used, p.used, sizeof p.used);
    OK(zs_cunit_post(env->comm, unit->cunit, present ? &unit->bucket : NULL));
}

/* The GPU has reached the end of the transport's stream: this host may read collect()'s results. */
static inline void catch_up(rank_env *env)
{
    OK(zs_device_join(env->comm->device, env->comm->ops->stream));
    OK(zs_device_wait(env->comm->device));
}

/* Checks every byte of the own shards of all ranks; `all`: all ranks posted a bucket. */
static inline void read_sources(rank_env *env, test_unit *unit, int u, const zs_sources *from, bool all)
{
    for (int r = 0; r < env->world; r++) {
        posting p = posting_of(r, u, unit->posted);
        CHECK((from->data[r] != NULL) == (p.present || all));
        CHECK(memcmp(from->headers[r]->used, p.used, sizeof p.used) == 0);
        for (int f = 0; f < N_FLATS && from->data[r] != NULL; f++) {
            const char *at = from->data[r] + from->at[f];
            for (size_t i = 0; i < unit->shard[f] / sizeof(float); i++)
                CHECK(((const float *)(const void *)at)[i] == p.base + (float)(f * 10 + env->rank) + (float)i);
        }
    }
}

static inline void finish_unit(rank_env *env, test_unit *unit, int u)
{
    bool ready = false;
    zs_sources from;
    OK(zs_cunit_collect(env->comm, unit->cunit, true, &ready, &from));
    CHECK(ready);
    catch_up(env);
    jitter(env); /* the others may be a round further by now */
    read_sources(env, unit, u, &from, false);
    OK(zs_cunit_release(env->comm, unit->cunit));
    unit->summed++;
}

/* Several rounds of one unit in a row; the last rank is the slow one. */
static inline void rounds_in_a_row(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    for (int round = 0; round < 400; round++) {
        if (env->rank == env->world - 1) jitter(env);
        post_unit(env, &units[0], 0, false);
        finish_unit(env, &units[0], 0);
    }
    free_units(env, units);
}

/* In ZS_REDUCE_ALL each rank gets the other shards' sums too. */
static inline void sums_are_shared(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_ALL);
    for (int round = 0; round < 100; round++)
        for (int u = 0; u < UNITS; u++) {
            test_unit *unit = &units[u];
            zs_sources from;
            bool ready = false;
            jitter(env);
            post_unit(env, unit, u, true);
            OK(zs_cunit_collect(env->comm, unit->cunit, true, &ready, &from));
            catch_up(env);
            read_sources(env, unit, u, &from, true);
            for (int f = 0; f < N_FLATS; f++)
                fill_pattern(unit->bucket.ptr + shard_start(unit, f, env->rank, env->world), unit->shard[f],
                             (unsigned)(unit->posted * 100 + f * 10 + env->rank));
            OK(zs_cunit_share(env->comm, unit->cunit));
            OK(zs_cunit_collect_shared(env->comm, unit->cunit, true, &ready, &from));
            catch_up(env);
            for (int r = 0; r < env->world; r++)
                for (int f = 0; f < N_FLATS; f++)
                    CHECK(has_pattern(from.data[r] + shard_start(unit, f, r, env->world), unit->shard[f],
                                      (unsigned)(unit->posted * 100 + f * 10 + r)));
            OK(zs_cunit_release(env->comm, unit->cunit));
        }
    free_units(env, units);
}

static inline void rounds_have_an_order(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    bool ready = false;
    zs_sources from;
    FAILS(zs_cunit_collect(env->comm, units[0].cunit, true, &ready, &from), ZS_ERR_STATE, "blocks.0");
    FAILS(zs_cunit_release(env->comm, units[0].cunit), ZS_ERR_STATE, "release");
    OK(zs_cunit_post(env->comm, units[0].cunit, NULL));
    FAILS(zs_cunit_post(env->comm, units[0].cunit, NULL), ZS_ERR_STATE, "before round 1 was released");
    OK(zs_cunit_collect(env->comm, units[0].cunit, true, &ready, &from));
    FAILS(zs_cunit_collect_shared(env->comm, units[0].cunit, true, &ready, &from), ZS_ERR_STATE, "collect_shared");
    OK(zs_cunit_release(env->comm, units[0].cunit));
    units[0].bucket.bytes = 64;
    FAILS(zs_cunit_post(env->comm, units[0].cunit, &units[0].bucket), ZS_ERR_VALUE, "too small");
    free_units(env, units);
}

/* --- small collectives -------------------------------------------------------------------------------------------- */

static inline void exchanges_storm(rank_env *env)
{
    enum { MOST = 4096 };
    static char mine[MOST], all[MOST * MAX_RANKS];
    unsigned common = 5;
    double start = now();
    for (int i = 0; i < 3000; i++) {
        size_t bytes = (size_t)rand_r(&common) % (i % 50 == 0 ? MOST + 1 : 64);
        memset(mine, env->rank * 50 + i % 50, bytes);
        OK(zs_comm_exchange(env->comm, mine, bytes, all));
        for (int r = 0; r < env->world; r++)
            for (size_t j = 0; j < bytes; j++)
                CHECK(all[(size_t)r * bytes + j] == (char)(r * 50 + i % 50));
        if (i % 64 == 0) jitter(env);
    }
    CHECK(now() - start < 30.0); /* a lost wake-up costs 0.1 s each time: it would be minutes */
    FAILS(zs_comm_exchange(env->comm, mine, MOST + 1, all), ZS_ERR_VALUE, "4097");
}

static inline void broadcasts_from_all_roots(rank_env *env)
{
    const size_t sizes[] = {0, 1, 4096, 1 << 20, (5 << 20) + 12, 12};
    char *data = malloc(6 << 20);
    CHECK(data != NULL);
    for (int round = 0; round < 24; round++) {
        int root = round % env->world;
        size_t bytes = sizes[round % 6];
        memset(data, 0xee, 6 << 20);
        if (env->rank == root) fill_pattern(data, bytes, (unsigned)round);
        if (env->rank != root) jitter(env);
        OK(zs_comm_broadcast(env->comm, data, bytes, root));
        CHECK(has_pattern(data, bytes, (unsigned)round) && data[bytes] == (char)0xee);
        if (round % 5 == 0) meet(env);
    }
    FAILS(zs_comm_broadcast(env->comm, data, 4, env->world), ZS_ERR_VALUE, "out of range");
    meet(env); /* the others would report a rank that has ended */
    free(data);
}

#endif
