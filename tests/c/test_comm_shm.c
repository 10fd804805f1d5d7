/* test_comm_shm.c - the shm transport with real processes: memory, rounds, small collectives, readers.
 *
 * Failures (dead peers, deadlines, aborts, divergence) are in test_comm_shm_faults.c. Run by tests/core/test_c_comm.py.
 */
#include "any_transport.h"

#include <pthread.h>
#include <sys/stat.h>

#include "comm/shm/shm.h"

/* --- flats and buckets -------------------------------------------------------------------------------------------- */

static void flats_of_all_ranks_are_contiguous(rank_env *env)
{
    const size_t sizes[] = {4096, 3 * 4096, 4 << 20, 4096, 2 << 20};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    zs_flat_mem flats[COUNT] = {{0}};
    for (unsigned i = 0; i < COUNT; i++) {
        OK(zs_comm_flat_new(env->comm, sizes[i], &flats[i]));
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
    for (unsigned i = 0; i < COUNT; i++)
        zs_comm_flat_free(env->comm, &flats[i]);
    CHECK(flats[0].mem == NULL);
    FAILS(zs_comm_flat_new(env->comm, 100, &flats[0]), ZS_ERR_VALUE, "100 bytes");
}

static long long pages_of(zs_file *file)
{
    struct stat info;
    CHECK(fstat(zs_file_fd(file), &info) == 0);
    return (long long)info.st_blocks * 512 / 4096;
}

static void freed_memory_is_reused(rank_env *env)
{
    zs_shm *shm = (zs_shm *)env->comm;
    zs_flat_mem flat;
    zs_bucket first, second;
    OK(zs_comm_flat_new(env->comm, 8 << 20, &flat));
    memset(flat.shard, 1, flat.shard_bytes);
    OK(zs_comm_bucket_new(env->comm, 5 << 20, &first));
    memset(first.ptr, 1, 5 << 20);
    meet(env);
    CHECK(pages_of(shm->flats) == 2048 * env->world && pages_of(shm->buckets) == 1280);
    meet(env);
    zs_mem *kept = zs_mem_retain(flat.mem);
    zs_comm_flat_free(env->comm, &flat);
    CHECK(pages_of(shm->flats) == 2048 * env->world); /* a view still uses it */
    meet(env);
    zs_mem_release(kept);
    uint64_t key = first.key;
    size_t bytes = first.bytes;
    zs_comm_bucket_free(env->comm, &first);
    CHECK(pages_of(shm->buckets) == 0);
    char byte = 0, all[MAX_RANKS];
    OK(zs_comm_exchange(env->comm, &byte, 1, all)); /* others may read a flat until all have freed it */
    CHECK(pages_of(shm->flats) == 0);
    for (int i = 0; i < 100; i++) { /* recycled: neither the file nor the peers' mappings grow */
        OK(zs_comm_bucket_new(env->comm, 5 << 20, &second));
        CHECK(second.key == key && second.bytes == bytes && second.ptr[0] == 0);
        second.ptr[0] = 1;
        zs_comm_bucket_free(env->comm, &second);
    }
    OK(zs_comm_bucket_new(env->comm, 4 << 20, &second)); /* of another size: it takes no more than it needs */
    CHECK(second.key != key && second.bytes == 4 << 20);
    zs_comm_bucket_free(env->comm, &second);
}

static void memory_outlives_the_transport(rank_env *env)
{
    zs_flat_mem flat;
    OK(zs_comm_flat_new(env->comm, 4096, &flat));
    memset(flat.shard, env->rank + 1, 4096);
    meet(env);
    zs_comm_release(env->comm);
    env->comm = NULL;
    for (int r = 0; r < env->world; r++)
        CHECK(flat.full[(size_t)r * 4096] == r + 1);
    atomic_fetch_add(&env->board->step, 1);
    while (atomic_load(&env->board->step) < env->world)
        sleep_us(200);
    zs_mem_release(flat.mem);
}

static void *release_regions(void *pointer)
{
    zs_mem **regions = pointer;
    for (int i = 0; i < 200; i++)
        zs_mem_release(regions[i]);
    return NULL;
}

/* Tensors die on autograd's threads too, while this one makes new memory. (Run it under ThreadSanitizer.) */
static void memory_is_freed_on_any_thread(rank_env *env)
{
    for (int round = 0; round < 5; round++) {
        zs_mem *regions[200];
        pthread_t thread;
        for (int i = 0; i < 200; i++) {
            zs_flat_mem flat;
            zs_bucket bucket;
            if (i % 2 == 0) OK(zs_comm_flat_new(env->comm, 4096, &flat));
            if (i % 2 == 1) OK(zs_comm_bucket_new(env->comm, 4096, &bucket));
            regions[i] = i % 2 == 0 ? flat.mem : bucket.mem;
            *(i % 2 == 0 ? flat.shard : bucket.ptr) = 1;
        }
        CHECK(pthread_create(&thread, NULL, release_regions, regions) == 0);
        for (int i = 0; i < 200; i++) {
            zs_bucket bucket;
            OK(zs_comm_bucket_new(env->comm, 4096, &bucket));
            CHECK(bucket.ptr[0] == 0);
            bucket.ptr[0] = 1;
            zs_comm_bucket_free(env->comm, &bucket);
        }
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(pages_of(((zs_shm *)env->comm)->buckets) == 0);
    }
}

/* --- rounds in ways that only shm allows -------------------------------------------------------------------------- */

/* Each rank posts in its own order, polls, and finishes in another order. */
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
            OK(zs_cunit_collect(env->comm, units[u].cunit, false, &ready, &from));
            if (!ready) continue;
            read_sources(env, &units[u], u, &from, false);
            OK(zs_cunit_release(env->comm, units[u].cunit));
            units[u].summed++;
        }
        for (int u = UNITS - 1; u >= 0; u--)
            if (units[u].summed < round) finish_unit(env, &units[u], u);
    }
    free_units(env, units);
}

/* Without buckets nothing makes the fast rank wait for reusable(): it posts the next round while the slow one reads. */
static void empty_rounds_run_ahead(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    for (int round = 1; round <= 400; round++) {
        bool ready = false;
        zs_sources from;
        posting mine = posting_of(env->rank, 0, round);
        zs_round_header *header = zs_cunit_header(units[0].cunit);
        header->flags = 0;
        memcpy(header->used, mine.used, sizeof mine.used);
        OK(zs_cunit_post(env->comm, units[0].cunit, NULL));
        OK(zs_cunit_collect(env->comm, units[0].cunit, true, &ready, &from));
        if (round % env->world == env->rank) sleep_us(100);
        for (int r = 0; r < env->world; r++) {
            posting theirs = posting_of(r, 0, round);
            CHECK(from.data[r] == NULL && memcmp(from.headers[r]->used, theirs.used, sizeof theirs.used) == 0);
        }
        OK(zs_cunit_release(env->comm, units[0].cunit));
    }
    free_units(env, units);
}

/* All ranks wait in two different units' rounds: those that may yield do so, soon, and then can post the other one. */
static void deadlocks_resolve_by_yielding(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    for (int round = 0; round < 40; round++) {
        int first = env->rank == 0, hard = round % 2;
        bool ready = false;
        zs_sources from;
        jitter(env);
        double start = now();
        post_unit(env, &units[first], first, false);
        zs_wait patience = hard == 1 && env->rank == 0 ? ZS_WAIT : ZS_WAIT_OR_YIELD;
        if (patience == ZS_WAIT_OR_YIELD) {
            OK(zs_cunit_collect(env->comm, units[first].cunit, patience, &ready, &from));
            if (ready) { /* the others have yielded before and have caught up */
                read_sources(env, &units[first], first, &from, false);
                OK(zs_cunit_release(env->comm, units[first].cunit));
            }
            post_unit(env, &units[!first], !first, false);
            if (!ready) finish_unit(env, &units[first], first);
        } else {
            finish_unit(env, &units[first], first);
            post_unit(env, &units[!first], !first, false);
        }
        finish_unit(env, &units[!first], !first);
        CHECK(now() - start < 2.0);
    }
    free_units(env, units);
}

/* --- readers ------------------------------------------------------------------------------------------------------ */

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

static void run_forward(rank_env *env, model *m, uint32_t version, zs_pass pass)
{
    OK(zs_comm_read_begin(env->comm, m->reader, &(zs_reading){.pass = pass}));
    read_version(env, m, version);
    OK(zs_comm_read_end(env->comm, m->reader, ZS_PHASE_FORWARD));
}

static void run_backward(rank_env *env, model *m, uint32_t version)
{
    OK(zs_comm_read_begin(env->comm, m->reader, &(zs_reading){.pass = ZS_PASS_BACKWARD}));
    for (int u = 0; u < 2; u++) {
        read_version(env, m, version);
        post_unit(env, &m->units[u], u, false);
    }
    for (int u = 0; u < 2; u++)
        finish_unit(env, &m->units[u], u);
    read_version(env, m, version); /* the others may be at the end already */
    OK(zs_comm_read_end(env->comm, m->reader, ZS_PHASE_BACKWARD));
}

static void make_model(rank_env *env, model *m)
{
    OK(zs_comm_reader_new(env->comm, "model", &m->reader));
    OK(zs_comm_flat_new(env->comm, WORDS * 4, &m->flat));
    make_units(env, m->units, ZS_REDUCE_SCATTER);
}

static void free_model(rank_env *env, model *m)
{
    free_units(env, m->units);
    OK(zs_comm_write_begin(env->comm, m->reader));
    zs_comm_flat_free(env->comm, &m->flat);
    zs_comm_reader_free(env->comm, m->reader);
}

/* Training with everything that a rank may do alone or together; reads must always give this step's version. */
static void readers_never_see_a_wrong_version(rank_env *env)
{
    model m;
    make_model(env, &m);
    unsigned common = 99; /* the ranks' shared dice, for joint acts */
    for (uint32_t step = 1; step <= 150; step++) {
        uint32_t version = step * 10;
        OK(zs_comm_write_begin(env->comm, m.reader));
        write_version(env, &m, version); /* the optimizer */
        zs_comm_write_end(env->comm, m.reader, true);
        for (unsigned evals = (unsigned)rand_r(&common) % 3; evals > 0; evals--) {
            run_forward(env, &m, version, ZS_PASS_EVALUATE); /* all evaluate, and swap weights after */
            OK(zs_comm_write_begin(env->comm, m.reader));
            write_version(env, &m, ++version);
            zs_comm_write_end(env->comm, m.reader, false);
        }
        unsigned alone = (unsigned)rand_r(&common) % 8;
        bool lonely = alone < (unsigned)env->world && (unsigned)env->rank == alone;
        bool before = (unsigned)rand_r(&common) % 2 == 0;
        zs_pass kind = (unsigned)rand_r(&common) % 2 == 0 ? ZS_PASS_TRAIN : ZS_PASS_EVALUATE;
        for (unsigned i = draw(env, 3); lonely && before && i > 0; i--)
            run_forward(env, &m, version, kind);
        run_forward(env, &m, version, ZS_PASS_TRAIN);
        for (unsigned i = draw(env, 3); lonely && !before && i > 0; i--)
            run_forward(env, &m, version, kind);
        run_backward(env, &m, version);
    }
    free_model(env, &m);
}

/* --- forked children ---------------------------------------------------------------------------------------------- */

static void use_as_a_child(rank_env *env, zs_flat_mem *flat)
{
    char byte = 0, all[MAX_RANKS];
    FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_STATE, "forked");
    CHECK(flat->full[0] == 1); /* it may look */
    zs_comm_abort(env->comm, "the child says so");
    zs_comm_flat_free(env->comm, flat);
    zs_comm_release(env->comm); /* closes, as a worker's interpreter does at its end */
    _exit(0);
}

static void forked_children_are_harmless(rank_env *env)
{
    zs_flat_mem flat;
    OK(zs_comm_flat_new(env->comm, 4096, &flat));
    memset(flat.shard, env->rank + 1, 4096);
    meet(env);
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) use_as_a_child(env, &flat);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        meet(env);
        for (int r = 0; r < env->world; r++)
            CHECK(flat.full[(size_t)r * 4096] == r + 1);
    }
    meet(env);
    zs_comm_flat_free(env->comm, &flat);
}

/* --- the list ----------------------------------------------------------------------------------------------------- */

static const rank_test tests[] = {
    TEST(flats_of_all_ranks_are_contiguous, .least = 2),
    TEST(freed_memory_is_reused, .least = 2),
    TEST(memory_outlives_the_transport, .least = 2),
    TEST(memory_is_freed_on_any_thread, .least = 2),
    TEST(rounds_in_any_order, .least = 2),
    TEST(rounds_in_a_row, .least = 2),
    TEST(empty_rounds_run_ahead, .least = 2),
    TEST(sums_are_shared, .least = 2),
    TEST(deadlocks_resolve_by_yielding, .least = 2),
    TEST(rounds_have_an_order, .least = 2),
    TEST(exchanges_storm, .least = 2),
    TEST(broadcasts_from_all_roots, .least = 2),
    TEST(readers_never_see_a_wrong_version, .least = 2),
    TEST(forked_children_are_harmless, .least = 2),
};

int main(int argc, char **argv)
{
    return run_tests(tests, COUNT(tests), argc, argv);
}
