/* test_comm_shm.c - the shm transport with real processes: memory, rounds, small collectives, readers.
 *
 * Failures (dead peers, deadlines, aborts, divergence) are in test_comm_shm_faults.c. Run by tests/test_c_comm.py.
 */
#include "ranks.h"

#include <sys/stat.h>

#include "shm.h"

/* --- flats and buckets --------------------------------------------------------------------------------------------- */

static void fill_pattern(char *at, size_t bytes, unsigned seed)
{
    for (size_t i = 0; i < bytes / sizeof(unsigned); i++) ((unsigned *)(void *)at)[i] = seed + (unsigned)i * 2654435761u;
}

static bool has_pattern(const char *at, size_t bytes, unsigned seed)
{
    for (size_t i = 0; i < bytes / sizeof(unsigned); i++)
        if (((const unsigned *)(const void *)at)[i] != seed + (unsigned)i * 2654435761u) return false;
    return true;
}

static void meet(rank_env *env)
{
    char mine = (char)env->rank, all[MAX_RANKS];
    OK(env->comm->ops->exchange(env->comm, &mine, 1, all));
    for (int r = 0; r < env->world; r++) CHECK(all[r] == r);
}

static void flats_are_side_by_side(rank_env *env)
{
    const zs_comm_ops *ops = env->comm->ops;
    const size_t sizes[] = {4096, 3 * 4096, 4 << 20, 4096, 2 << 20};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    zs_flat_mem flats[COUNT] = {{0}};
    for (unsigned i = 0; i < COUNT; i++) {
        OK(ops->flat_new(env->comm, sizes[i], &flats[i]));
        CHECK(flats[i].shard == flats[i].full + (size_t)env->rank * sizes[i]);
        CHECK(flats[i].shard[0] == 0 && flats[i].shard[sizes[i] - 1] == 0);
        fill_pattern(flats[i].shard, sizes[i], 100 * i + (unsigned)env->rank);
    }
    meet(env);
    for (unsigned i = 0; i < COUNT; i++)
        for (int r = 0; r < env->world; r++)
            CHECK(has_pattern(flats[i].full + (size_t)r * sizes[i], sizes[i], 100 * i + (unsigned)r));
    meet(env);
    flats[1].full[0] = 7; /* a write into a peer's part reaches it: last writer wins, all write the same */
    meet(env);
    CHECK(flats[1].full[0] == 7);
    meet(env); /* freeing takes the content away from the peers too */
    for (unsigned i = 0; i < COUNT; i++) ops->flat_free(env->comm, &flats[i]);
    CHECK(flats[0].mem == NULL);
    FAILS(ops->flat_new(env->comm, 100, &flats[0]), ZS_ERR_VALUE, "100 bytes");
}

static long long pages_of(zs_shm_file *file)
{
    struct stat info;
    CHECK(fstat(zs_shm_file_fd(file), &info) == 0);
    return (long long)info.st_blocks * 512 / 4096;
}

static void freed_memory_goes_back(rank_env *env)
{
    const zs_comm_ops *ops = env->comm->ops;
    zs_shm *shm = (zs_shm *)env->comm;
    zs_flat_mem flat;
    zs_bucket first, second;
    OK(ops->flat_new(env->comm, 8 << 20, &flat));
    memset(flat.shard, 1, flat.shard_bytes);
    OK(ops->bucket_new(env->comm, 5 << 20, &first));
    memset(first.ptr, 1, 5 << 20);
    CHECK(pages_of(shm->flats) == 2048 && pages_of(shm->buckets) == 1280);
    zs_mem *kept = zs_mem_retain(flat.mem);
    ops->flat_free(env->comm, &flat);
    CHECK(pages_of(shm->flats) == 2048); /* a view still stands on it */
    zs_mem_release(kept);
    uint64_t key = first.key;
    ops->bucket_free(env->comm, &first);
    CHECK(pages_of(shm->flats) == 0 && pages_of(shm->buckets) == 0);
    for (int i = 0; i < 100; i++) { /* recycled: neither the file nor the peers' mappings grow */
        OK(ops->bucket_new(env->comm, 4 << 20, &second));
        CHECK(second.key == key && second.bytes >= 4 << 20 && second.ptr[0] == 0);
        second.ptr[0] = 1;
        ops->bucket_free(env->comm, &second);
    }
}

static void memory_outlives_the_transport(rank_env *env)
{
    zs_flat_mem flat;
    OK(env->comm->ops->flat_new(env->comm, 4096, &flat));
    memset(flat.shard, env->rank + 1, 4096);
    meet(env);
    zs_comm_release(env->comm);
    env->comm = NULL;
    for (int r = 0; r < env->world; r++) CHECK(flat.full[(size_t)r * 4096] == r + 1);
    atomic_fetch_add(&env->board->step, 1);
    while (atomic_load(&env->board->step) < env->world) sleep_us(200);
    zs_mem_release(flat.mem);
}

/* --- rounds ---------------------------------------------------------------------------------------------------------- */

enum { UNITS = 5, PARAMS = 70, SLICES = 2 };

/* What rank `rank` posts of unit `unit` in round `round`, as everybody can work out. */
typedef struct posting {
    bool present;
    float base;
    uint64_t used[2];
} posting;

static posting posting_of(int rank, int unit, int round)
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
    size_t slice[SLICES]; /* bytes */
    int posted, summed;   /* rounds */
} test_unit;

static size_t slice_start(const test_unit *unit, int f, int r, int world)
{
    return (size_t)world * (f == 0 ? 0 : unit->slice[0]) + (size_t)r * unit->slice[f];
}

static void make_units(rank_env *env, test_unit *units, zs_reduce_mode mode)
{
    for (int u = 0; u < UNITS; u++) {
        char name[16];
        snprintf(name, sizeof name, "blocks.%d", u);
        units[u] = (test_unit){.slice = {(size_t)(u + 1) * 512, 64}};
        zs_cunit_spec spec = {.name = name, .n_params = PARAMS, .n_slices = SLICES, .mode = mode};
        memcpy(spec.slice_bytes, units[u].slice, sizeof units[u].slice);
        OK(env->comm->ops->cunit_new(env->comm, &spec, &units[u].cunit));
        size_t bytes = (size_t)env->world * (units[u].slice[0] + units[u].slice[1]);
        OK(env->comm->ops->bucket_new(env->comm, bytes, &units[u].bucket));
    }
}

static void free_units(rank_env *env, test_unit *units)
{
    meet(env); /* the last round's readers are through */
    for (int u = 0; u < UNITS; u++) {
        env->comm->ops->cunit_free(env->comm, units[u].cunit);
        env->comm->ops->bucket_free(env->comm, &units[u].bucket);
    }
}

static void post_unit(rank_env *env, test_unit *unit, int u, bool always)
{
    bool ready = false;
    OK(env->comm->ops->reusable(env->comm, unit->cunit, true, &ready));
    CHECK(ready);
    posting p = posting_of(env->rank, u, ++unit->posted);
    bool present = p.present || always;
    for (int f = 0; f < SLICES && present; f++)
        for (int r = 0; r < env->world; r++) {
            float *to = (float *)(void *)(unit->bucket.ptr + slice_start(unit, f, r, env->world));
            for (size_t i = 0; i < unit->slice[f] / sizeof *to; i++) to[i] = p.base + (float)(f * 10 + r) + (float)i;
        }
    OK(env->comm->ops->post(env->comm, unit->cunit, present ? &unit->bucket : NULL, p.used));
}

/* Checks every byte of the own slices of all ranks, then sums them into the own bucket if `sum`. */
static void read_sources(rank_env *env, test_unit *unit, int u, const zs_sources *from, bool all)
{
    for (int r = 0; r < env->world; r++) {
        posting p = posting_of(r, u, unit->posted);
        CHECK((from->data[r] != NULL) == (p.present || all));
        CHECK(memcmp(from->used[r], p.used, sizeof p.used) == 0);
        for (int f = 0; f < SLICES && from->data[r] != NULL; f++) {
            const char *at = from->data[r] + slice_start(unit, f, env->rank, env->world);
            for (size_t i = 0; i < unit->slice[f] / sizeof(float); i++)
                CHECK(((const float *)(const void *)at)[i] == p.base + (float)(f * 10 + env->rank) + (float)i);
        }
    }
}

static void finish_unit(rank_env *env, test_unit *unit, int u)
{
    bool ready = false;
    zs_sources from;
    OK(env->comm->ops->collect(env->comm, unit->cunit, true, &ready, &from));
    CHECK(ready);
    read_sources(env, unit, u, &from, false);
    jitter(env);
    OK(env->comm->ops->release(env->comm, unit->cunit));
    unit->summed++;
}

/* Each rank posts in an order of its own, polls, and finishes in another order. */
static void rounds_in_any_order(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    for (int round = 1; round <= 150; round++) {
        int start = (int)draw(env, UNITS), step = 1 + (int)draw(env, UNITS - 1); /* UNITS is prime */
        for (int i = 0; i < UNITS; i++) {
            int u = (start + i * step) % UNITS;
            jitter(env);
            post_unit(env, &units[u], u, false);
            bool ready = false;
            zs_sources from;
            OK(env->comm->ops->collect(env->comm, units[u].cunit, false, &ready, &from));
            if (!ready) continue;
            read_sources(env, &units[u], u, &from, false);
            OK(env->comm->ops->release(env->comm, units[u].cunit));
            units[u].summed++;
        }
        for (int u = UNITS - 1; u >= 0; u--)
            if (units[u].summed < round) finish_unit(env, &units[u], u);
    }
    free_units(env, units);
}

/* Several rounds of one unit in a row: the fast rank is a round ahead, and must not overwrite what the slow one reads. */
static void rounds_in_a_row(rank_env *env)
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

/* In ZS_REDUCE_ALL each rank gets the other slices' sums too. */
static void sums_are_shared(rank_env *env)
{
    const zs_comm_ops *ops = env->comm->ops;
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_ALL);
    for (int round = 0; round < 100; round++)
        for (int u = 0; u < UNITS; u++) {
            test_unit *unit = &units[u];
            zs_sources from;
            bool ready = false;
            jitter(env);
            post_unit(env, unit, u, true);
            OK(ops->collect(env->comm, unit->cunit, true, &ready, &from));
            read_sources(env, unit, u, &from, true);
            for (int f = 0; f < SLICES; f++)
                fill_pattern(unit->bucket.ptr + slice_start(unit, f, env->rank, env->world), unit->slice[f],
                             (unsigned)(unit->posted * 100 + f * 10 + env->rank));
            OK(ops->share(env->comm, unit->cunit));
            OK(ops->collect_shared(env->comm, unit->cunit, true, &ready, &from));
            for (int r = 0; r < env->world; r++)
                for (int f = 0; f < SLICES; f++)
                    CHECK(has_pattern(from.data[r] + slice_start(unit, f, r, env->world), unit->slice[f],
                                      (unsigned)(unit->posted * 100 + f * 10 + r)));
            OK(ops->release(env->comm, unit->cunit));
        }
    free_units(env, units);
}

static void rounds_have_an_order(rank_env *env)
{
    const zs_comm_ops *ops = env->comm->ops;
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    bool ready = false;
    zs_sources from;
    uint64_t used[2] = {0};
    FAILS(ops->collect(env->comm, units[0].cunit, true, &ready, &from), ZS_ERR_STATE, "blocks.0");
    FAILS(ops->release(env->comm, units[0].cunit), ZS_ERR_STATE, "release");
    OK(ops->post(env->comm, units[0].cunit, NULL, used));
    FAILS(ops->post(env->comm, units[0].cunit, NULL, used), ZS_ERR_STATE, "before round 1 was released");
    OK(ops->collect(env->comm, units[0].cunit, true, &ready, &from));
    FAILS(ops->collect_shared(env->comm, units[0].cunit, true, &ready, &from), ZS_ERR_STATE, "collect_shared");
    OK(ops->release(env->comm, units[0].cunit));
    units[0].bucket.bytes = 64;
    FAILS(ops->post(env->comm, units[0].cunit, &units[0].bucket, used), ZS_ERR_VALUE, "too small");
    free_units(env, units);
}

/* --- small collectives --------------------------------------------------------------------------------------------------- */

static void exchanges_storm(rank_env *env)
{
    enum { MOST = 4096 };
    static char mine[MOST], all[MOST * MAX_RANKS];
    unsigned common = 5;
    double start = now();
    for (int i = 0; i < 3000; i++) {
        size_t bytes = (size_t)rand_r(&common) % (i % 50 == 0 ? MOST + 1 : 64);
        memset(mine, env->rank * 50 + i % 50, bytes);
        OK(env->comm->ops->exchange(env->comm, mine, bytes, all));
        for (int r = 0; r < env->world; r++)
            for (size_t j = 0; j < bytes; j++) CHECK(all[(size_t)r * bytes + j] == (char)(r * 50 + i % 50));
        if (i % 64 == 0) jitter(env);
    }
    CHECK(now() - start < 30.0); /* a lost wake-up costs 0.1 s each time: it would be minutes */
    FAILS(env->comm->ops->exchange(env->comm, mine, MOST + 1, all), ZS_ERR_VALUE, "4097");
}

static void broadcasts_from_all_roots(rank_env *env)
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
        OK(env->comm->ops->broadcast(env->comm, data, bytes, root));
        CHECK(has_pattern(data, bytes, (unsigned)round) && data[bytes] == (char)0xee);
        if (round % 5 == 0) meet(env);
    }
    FAILS(env->comm->ops->broadcast(env->comm, data, 4, env->world), ZS_ERR_VALUE, "no rank");
    free(data);
}

/* --- readers --------------------------------------------------------------------------------------------------------------- */

enum { WORDS = 1024 };

typedef struct model {
    zs_reader *reader;
    zs_flat_mem flat;
    test_unit units[UNITS];
} model;

/* User code writes the own shard, slowly, so that a reader who comes too early sees both versions. */
static void write_version(rank_env *env, model *m, uint32_t version)
{
    _Atomic uint32_t *words = (_Atomic uint32_t *)(void *)m->flat.shard;
    for (int i = 0; i < WORDS; i++) {
        atomic_store_explicit(&words[i], version, memory_order_relaxed);
        if (i % 256 == 128) jitter(env);
    }
}

static void read_version(rank_env *env, model *m, uint32_t version)
{
    for (int r = 0; r < env->world; r++) {
        const _Atomic uint32_t *words = (const _Atomic uint32_t *)(const void *)(m->flat.full + r * WORDS * 4);
        for (int i = 0; i < WORDS; i++) {
            uint32_t got = atomic_load_explicit(&words[i], memory_order_relaxed);
            if (got != version)
                fprintf(stderr, "rank %d sees word %d of rank %d at %u, not %u\n", env->rank, i, r, got, version);
            CHECK(got == version);
            if (i % 512 == 256) jitter(env);
        }
    }
}

static void run_forward(rank_env *env, model *m, uint32_t version)
{
    OK(env->comm->ops->read_begin(env->comm, m->reader, ZS_PHASE_FORWARD));
    read_version(env, m, version);
    OK(env->comm->ops->read_end(env->comm, m->reader, ZS_PHASE_FORWARD));
}

static void run_backward(rank_env *env, model *m, uint32_t version)
{
    OK(env->comm->ops->read_begin(env->comm, m->reader, ZS_PHASE_BACKWARD));
    for (int u = 0; u < 2; u++) {
        read_version(env, m, version);
        post_unit(env, &m->units[u], u, false);
    }
    for (int u = 0; u < 2; u++) finish_unit(env, &m->units[u], u);
    OK(env->comm->ops->read_end(env->comm, m->reader, ZS_PHASE_BACKWARD));
}

static void make_model(rank_env *env, model *m)
{
    OK(env->comm->ops->reader_new(env->comm, "model", &m->reader));
    OK(env->comm->ops->flat_new(env->comm, WORDS * 4, &m->flat));
    make_units(env, m->units, ZS_REDUCE_SCATTER);
}

static void free_model(rank_env *env, model *m)
{
    free_units(env, m->units);
    env->comm->ops->flat_free(env->comm, &m->flat);
    env->comm->ops->reader_free(env->comm, m->reader);
}

/* Training with everything that a rank may do alone or together; what is read must always be this step's version. */
static void readers_never_see_a_wrong_version(rank_env *env)
{
    model m;
    make_model(env, &m);
    unsigned common = 99; /* the ranks' shared dice: what all do together */
    for (uint32_t step = 1; step <= 150; step++) {
        uint32_t version = step * 10;
        write_version(env, &m, version); /* the optimizer */
        for (unsigned evals = (unsigned)rand_r(&common) % 3; evals > 0; evals--) {
            run_forward(env, &m, version); /* all evaluate, and swap weights after */
            write_version(env, &m, ++version);
        }
        unsigned alone = (unsigned)rand_r(&common) % 8;
        bool lonely = alone < (unsigned)env->world && (unsigned)env->rank == alone;
        bool before = (unsigned)rand_r(&common) % 2 == 0;
        for (unsigned i = draw(env, 3); lonely && before && i > 0; i--) run_forward(env, &m, version);
        run_forward(env, &m, version);
        for (unsigned i = draw(env, 3); lonely && !before && i > 0; i--) run_forward(env, &m, version);
        run_backward(env, &m, version);
    }
    free_model(env, &m);
}

/* One rank's forward fails halfway (no read_end), or it skips a forward that the others run. */
static void readers_survive_failures(rank_env *env)
{
    model m;
    make_model(env, &m);
    for (uint32_t step = 1; step <= 60; step++) {
        write_version(env, &m, step);
        bool failing = (int)(step % (uint32_t)(2 * env->world)) == env->rank;
        if (failing) {
            OK(env->comm->ops->read_begin(env->comm, m.reader, ZS_PHASE_FORWARD));
            jitter(env);
        }
        run_forward(env, &m, step);
        run_backward(env, &m, step);
    }
    FAILS(env->comm->ops->read_end(env->comm, m.reader, ZS_PHASE_BACKWARD), ZS_ERR_STATE, "not begun");
    free_model(env, &m);
}

/* --- forked children ------------------------------------------------------------------------------------------------------- */

static void use_as_a_child(rank_env *env, zs_flat_mem *flat)
{
    char byte = 0, all[MAX_RANKS];
    FAILS(env->comm->ops->exchange(env->comm, &byte, 1, all), ZS_ERR_STATE, "forked");
    CHECK(flat->full[0] == 1); /* it may look */
    env->comm->ops->abort(env->comm, "the child says so");
    env->comm->ops->flat_free(env->comm, flat);
    zs_comm_release(env->comm); /* closes, as a worker's interpreter does at its end */
    _exit(0);
}

static void forked_children_are_harmless(rank_env *env)
{
    zs_flat_mem flat;
    OK(env->comm->ops->flat_new(env->comm, 4096, &flat));
    memset(flat.shard, env->rank + 1, 4096);
    meet(env);
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) use_as_a_child(env, &flat);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        meet(env);
        for (int r = 0; r < env->world; r++) CHECK(flat.full[(size_t)r * 4096] == r + 1);
    }
    meet(env);
    env->comm->ops->flat_free(env->comm, &flat);
}

/* --- the list ---------------------------------------------------------------------------------------------------------------- */

static const rank_test tests[] = {
    TEST(flats_are_side_by_side, .least = 2),
    TEST(freed_memory_goes_back, .least = 2),
    TEST(memory_outlives_the_transport, .least = 2),
    TEST(rounds_in_any_order, .least = 2),
    TEST(rounds_in_a_row, .least = 2),
    TEST(sums_are_shared, .least = 2),
    TEST(rounds_have_an_order, .least = 2),
    TEST(exchanges_storm, .least = 2),
    TEST(broadcasts_from_all_roots, .least = 2),
    TEST(readers_never_see_a_wrong_version, .least = 2),
    TEST(readers_survive_failures, .least = 2),
    TEST(forked_children_are_harmless, .least = 2),
};

int main(int argc, char **argv)
{
    return run_tests(tests, sizeof tests / sizeof tests[0], argc, argv);
}
