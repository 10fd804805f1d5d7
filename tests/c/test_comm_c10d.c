/* test_comm_c10d.c - the c10d transport's own logic, and the self transport, by the tests of any_transport.h.
 *
 * The process group is that of fake_group.h, over shm. All of comm_c10d.c is real; torch_c10d.cpp is tested from
 * Python.
 */
#include "any_transport.h"
#include "fake_group.h"

#include <pthread.h>

/* Runs `body` with c10d over this rank's shm; in a world of one, with the transport self. */
static void over_c10d(rank_env *env, rank_body body)
{
    zs_ranks_of_hosts ranks = {.rank = env->rank, .world = env->world};
    wire = env->comm;
    if (env->world == 1)
        OK(zs_comm_self_new(zs_device_cpu(), &env->comm));
    else
        OK(zs_comm_c10d_new("fake", &ranks, wire->timeout, &env->comm));
    body(env);
    zs_comm_release(env->comm);
    env->comm = wire;
}

/* --- what only c10d does ------------------------------------------------------------------------------------------ */

static void gather_fills_the_full_buffer(rank_env *env)
{
    enum { BYTES = 10 * 1024 };
    zs_mem *full = NULL;
    zs_flat_mem flat;
    OK(zs_mem_new_private((size_t)env->world * BYTES, &full));
    OK(zs_comm_flat_new(env->comm, BYTES, &flat));
    CHECK(flat.full == NULL && flat.shard[0] == 0 && flat.shard[BYTES - 1] == 0);
    fill_pattern(flat.shard, BYTES, (unsigned)env->rank);
    OK(zs_comm_gather(env->comm, &flat, "layer", (zs_target){.mem = full, .full = full->ptr}));
    for (int r = 0; r < env->world; r++)
        CHECK(has_pattern((char *)full->ptr + r * BYTES, BYTES, (unsigned)r));
    zs_comm_flat_free(env->comm, &flat);
    zs_mem_release(full);
}

/* The bitmap and the order's check cost no extra collective, nor does a unit with several flats. */
static void rounds_cost_one_collective(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    for (int round = 0; round < 20; round++)
        for (int u = 0; u < UNITS; u++) {
            int before = calls;
            post_unit(env, &units[u], u, false);
            finish_unit(env, &units[u], u);
            CHECK(calls == before + 2); /* one of a few bytes, to agree on it */
        }
    free_units(env, units);
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
            OK(zs_cunit_collect(env->comm, units[0].cunit, ZS_WAIT_NOT, &ready, &from));
            looks++;
        }
        CHECK(looks == (all ? 1 : 3));
        read_sources(env, &units[0], 0, &from, true);
        post_unit(env, &units[1], 1, true);
        CHECK(under_way == 1);
        free_units(env, units); /* waits for work under way */
        CHECK(under_way == 0);
    }
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

enum { MANY = 1024, LITTLE_STACK = 64 << 10 };

static void *gather_with_many(void *arg)
{
    rank_env *env = arg;
    zs_flat_mem flat;
    zs_mem *full = NULL;
    OK(zs_comm_flat_new(env->comm, 64, &flat));
    OK(zs_mem_new_private((size_t)64 * MANY, &full));
    zs_target to = {.mem = full, .full = full->ptr};
    OK(zs_comm_gather(env->comm, &flat, "head", to));
    ahead = true;
    FAILS(zs_comm_gather(env->comm, &flat, "head", to), ZS_ERR_DIVERGED, "but rank 1023 has made 1;");
    ahead = false;
    OK(zs_comm_gather(env->comm, &flat, "head", to));
    zs_comm_flat_free(env->comm, &flat);
    zs_mem_release(full);
    return NULL;
}

/* A script may train on its own thread: the compared turns grow with ranks, and are not on its stack. */
static void many_ranks_on_a_little_stack(rank_env *env)
{
    if (env->rank != 0) return;
    zs_comm *comm = NULL;
    pthread_t thread;
    pthread_attr_t attributes;
    absent = MANY - env->world;
    OK(zs_comm_c10d_new("fake", &(zs_ranks_of_hosts){.world = MANY}, wire->timeout, &comm));
    rank_env many = {.world = MANY, .comm = comm};
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, LITTLE_STACK) == 0);
    CHECK(pthread_create(&thread, &attributes, gather_with_many, &many) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    pthread_attr_destroy(&attributes);
    zs_comm_release(comm);
}

enum { EXCHANGE, BROADCAST, POST, POST_OTHER, GATHER };

static zs_status begin_one(rank_env *env, int what, size_t bytes, zs_cunit *const *units)
{
    static char data[4096], all[MAX_RANKS * 4096];
    zs_flat_mem flat;
    zs_mem *full = NULL;
    if (what == EXCHANGE) return zs_comm_exchange(env->comm, data, bytes, all);
    if (what == BROADCAST) return zs_comm_broadcast(env->comm, data, bytes, 0);
    if (what != GATHER) return zs_cunit_post(env->comm, units[what == POST_OTHER], NULL);
    OK(zs_comm_flat_new(env->comm, bytes, &flat));
    OK(zs_mem_new_private(bytes * MAX_RANKS, &full));
    zs_status status = zs_comm_gather(env->comm, &flat, "head", (zs_target){.mem = full, .full = full->ptr});
    zs_comm_flat_free(env->comm, &flat);
    zs_mem_release(full);
    return status;
}

static void make_few_units(rank_env *env, int n, size_t shard_bytes, zs_cunit **units)
{
    for (int u = 0; u < n; u++) {
        zs_cunit_spec spec = {.name = u == 0 ? "left" : "right", .n_params = 1, .n_flats = 1};
        spec.shard_bytes[0] = shard_bytes;
        OK(zs_cunit_new(env->comm, &spec, &units[u]));
    }
}

#define GRADIENTS "reducing gradients of unit "
#define MESSAGE "all-gathering message 1 (1 bytes)"
#define FIRST "rank 0 was broadcasting 8 bytes from rank 0 (message 1) in load()"
#define SECOND "rank 1 was " MESSAGE " in load()"

/* Collectives of ranks that differ, and their messages; the last one is for all further ranks. */
static const struct part {
    int begins;
    size_t bytes;
    const char *call, *words;
} differences[][3] = {
    /* Of equal sizes in another order: the bytes would fit. */
    {{POST_OTHER, 0, NULL, "rank 0 was " GRADIENTS "'right' (round 1), but rank 1 was " GRADIENTS "'left'"},
     {POST, 0, NULL, GRADIENTS "'left' (round 1), but rank 0 was " GRADIENTS "'right' (round 1)"}},
    {{GATHER, 64, NULL, "rank 0 was all-gathering parameters of unit 'head' (64 bytes), but rank 1 was broad"},
     {BROADCAST, 256, NULL, "broadcasting 256 bytes from rank 0 (message 1), but rank 0 was all-gathering"}},
    /* Three calls, one without a name. */
    {{EXCHANGE, 1, NULL, "rank 0 was " MESSAGE ", but rank 1 was in save(); run"},
     {EXCHANGE, 1, "save()", "rank 1 was in save(), but rank 0 was " MESSAGE "; run"},
     {EXCHANGE, 1, "load()", " was in load(), but rank 0 was " MESSAGE "; run"}},
    /* One call, whose name does not show it. */
    {{BROADCAST, 8, "load()", FIRST}, {EXCHANGE, 1, "load()", FIRST}, {EXCHANGE, 2, "load()", ""}},
    {{BROADCAST, 8, "load()", SECOND}, {EXCHANGE, 1, "load()", SECOND}, {EXCHANGE, 2, "load()", ""}},
};

/* All learn of it, and can continue. */
static void ranks_that_differ(rank_env *env)
{
    zs_comm *comm = env->comm;
    zs_ranks_of_hosts ranks = {.rank = env->rank, .world = env->world};
    for (size_t i = 0; i < COUNT(differences); i++) {
        const struct part *part = &differences[i][env->rank < 2 ? env->rank : 2];
        zs_cunit *units[2];
        if (part->words == NULL) part--;
        OK(zs_comm_c10d_new("fake", &ranks, wire->timeout, &env->comm)); /* whose messages begin at 1 */
        make_few_units(env, 2, 64, units);
        if (part->call != NULL) CHECK(zs_call_begin(part->call));
        FAILS(begin_one(env, part->begins, part->bytes, units), ZS_ERR_DIVERGED, part->words);
        if (part->call != NULL) zs_call_end();
        meet(env);
        for (int u = 0; u < 2; u++)
            zs_cunit_free(env->comm, units[u]);
        zs_comm_release(env->comm);
    }
    env->comm = comm;
}

/* All ranks wait here, below the transport, so that no rank has exited before the others have looked. */
static void stay(rank_env *env)
{
    char none[1] = "";
    (void)env;
    OK(zs_comm_exchange(wire, none, 0, none));
}

static int left; /* allocations of the transport that still succeed */

static zs_status scarce_mem_new(const zs_device *device, size_t bytes, zs_mem **out)
{
    if (left-- <= 0) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating %zu bytes", bytes);
    return zs_device_cpu()->ops->mem_new(device, bytes, out);
}

/* A device on which no more than `left` allocations succeed. */
static zs_device poor_device(void)
{
    static zs_device_ops ops;
    ops = *zs_device_cpu()->ops;
    ops.mem_new = scarce_mem_new;
    return (zs_device){&ops, zs_device_cpu()->where};
}

/* A rank without memory does not begin the others' collective: its next one is not taken for its part of that. */
static void memory_that_runs_out(rank_env *env)
{
    static const int allocations[] = {[EXCHANGE] = 2, [BROADCAST] = 2, [POST] = 3};
    const zs_device poor = poor_device(), *device = env->comm->device;
    char byte = (char)env->rank, all[MAX_RANKS];
    for (int what = EXCHANGE; what <= POST; what++) {
        for (int had = 0; had < allocations[what]; had++) {
            zs_cunit *unit = NULL;
            left = 1000;
            make_few_units(env, 1, 64 << 10, &unit);
            zs_cunit_free(env->comm, unit); /* the last one: frees all areas as well */
            make_few_units(env, 1, 64 << 10, &unit);
            env->comm->device = &poor;
            if (env->rank == 1) {
                left = had;
                FAILS(begin_one(env, what, 4096, &unit), ZS_ERR_MEMORY, "out of memory");
                left = 1000;
                FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_DIVERGED, "");
            } else {
                FAILS(begin_one(env, what, 4096, &unit), ZS_ERR_DIVERGED, "");
            }
            meet(env);
            zs_cunit_free(env->comm, unit);
            env->comm->device = device;
        }
    }
}

/* A rank that cannot publish its history when turns differ has lost the transport: the others are in that exchange.
 * Here they find its reason in the store. */
static void no_memory_for_words(rank_env *env)
{
    const zs_device poor = poor_device(), *device = env->comm->device;
    char byte = (char)env->rank, all[2 * MAX_RANKS];
    zs_cunit *unit = NULL;
    make_few_units(env, 1, 64, &unit);
    zs_cunit_free(env->comm, unit); /* and all areas */
    left = 1000;
    env->comm->device = &poor;
    OK(zs_comm_exchange(env->comm, &byte, 1, all));
    if (env->rank == 1) {
        left = 0; /* it has memory for a byte */
    } else {
        last_forever_at = 2; /* the texts */
        speaker = 1;
        snprintf(last_words, sizeof last_words, "out of memory");
    }
    FAILS(zs_comm_exchange(env->comm, "no", env->rank == 1 ? 1 : 2, all), ZS_ERR_DIVERGED, "ranks diverged");
    CHECK(env->rank != 1 || (speaker == 1 && strstr(last_words, "out of memory") != NULL));
    stay(env);
    FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_PEER, "out of memory");
    env->comm->device = device;
}

static zs_comm *last_comm;
static zs_cunit *last_unit;

static bool free_the_last_unit(void)
{
    zs_cunit_free(last_comm, last_unit);
    last_unit = NULL;
    return false;
}

/* A model may be collected while this thread or another one waits in a collective that is not its own. */
static void last_unit_is_freed_within_a_wait(rank_env *env)
{
    zs_cunit_spec spec = {.name = "block", .n_params = 1, .n_flats = 1, .shard_bytes = {64 << 10}};
    char byte = (char)env->rank, all[MAX_RANKS];
    for (int nth = 1; nth <= 2; nth++) {
        OK(zs_cunit_new(env->comm, &spec, &last_unit));
        last_comm = env->comm;
        slow_at = nth;
        zs_comm_on_wait(free_the_last_unit);
        OK(zs_comm_exchange(env->comm, &byte, 1, all));
        zs_comm_on_wait(NULL);
        CHECK(last_unit == NULL && zs_comm_bytes(env->comm) == 0);
        CHECK(all[0] == 0 && all[env->world - 1] == env->world - 1);
    }
}

enum { FLATS = 3, SHARD = 64 };

/* A forward of a model: from then on its shards may be brought to gathers of others. */
static zs_reader *begin_forward(rank_env *env, zs_flat_mem *flats)
{
    zs_reader *reader = NULL;
    for (int f = 0; f < FLATS; f++) {
        OK(zs_comm_flat_new(env->comm, SHARD, &flats[f]));
        fill_pattern(flats[f].shard, SHARD, (unsigned)(10 * f + env->rank));
    }
    OK(zs_comm_reader_new(env->comm, "Net", &reader));
    OK(zs_comm_read_begin(env->comm, reader, &(zs_reading){.pass = ZS_PASS_TRAIN}));
    env->comm->model = (zs_model){env->comm->models, "Net"};
    return reader;
}

static void end_forward(rank_env *env, zs_reader *reader, zs_flat_mem *flats)
{
    OK(zs_comm_read_end(env->comm, reader, ZS_PHASE_FORWARD));
    for (int f = 0; f < FLATS; f++)
        zs_comm_flat_free(env->comm, &flats[f]);
    zs_comm_reader_free(env->comm, reader);
}

static zs_status gather_one(rank_env *env, const zs_flat_mem *flat, unsigned number)
{
    zs_mem *full = NULL;
    OK(zs_mem_new_private((size_t)env->world * SHARD, &full));
    zs_status status = zs_comm_gather(env->comm, flat, "layer", (zs_target){.mem = full, .full = full->ptr});
    for (int r = 0; r < env->world && status == ZS_OK; r++)
        CHECK(has_pattern((char *)full->ptr + r * SHARD, SHARD, 10 * number + (unsigned)r));
    zs_mem_release(full);
    return status;
}

/* Each rank gathers what its number says, in its own order, and some of it twice; then all post. */
static void gathers_that_some_leave_out(rank_env *env)
{
    test_unit units[UNITS];
    zs_flat_mem flats[FLATS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    zs_reader *reader = begin_forward(env, flats);
    for (unsigned round = 0; round < 12; round++) {
        for (unsigned i = 0; i < round % 4; i++) {
            unsigned f = (i * (unsigned)(env->rank + 1) + round) % FLATS;
            if ((f + (unsigned)env->rank + round) % 3 != 0) OK(gather_one(env, &flats[f], f));
        }
        post_unit(env, &units[0], 0, true);
        bool ready = false;
        zs_sources from;
        OK(zs_cunit_collect(env->comm, units[0].cunit, ZS_WAIT, &ready, &from));
        read_sources(env, &units[0], 0, &from, true);
        OK(zs_cunit_release(env->comm, units[0].cunit));
    }
    end_forward(env, reader, flats);
    free_units(env, units);
}

/* A rank contributes to no gather of others if it has written since the forward began, or if the model lacks the
 * unit. */
static void gathers_of_what_was_written_since(rank_env *env)
{
    zs_flat_mem flats[FLATS];
    zs_reader *reader = begin_forward(env, flats);
    OK(gather_one(env, &flats[0], 0));
    if (env->rank == 1) {
        OK(zs_comm_write_begin(env->comm, reader));
        zs_comm_write_end(env->comm, reader, true);
    }
    FAILS(gather_one(env, &flats[env->rank == 0], env->rank == 0), ZS_ERR_DIVERGED, "ranks diverged");
    OK(gather_one(env, &flats[2], 2));
    end_forward(env, reader, flats);
}

/* The act of a second thread while the first one is in a collective. */
static void *exchange_beside(void *arg)
{
    rank_env *env = arg;
    char byte = 0, all[MAX_RANKS];
    FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_STATE, "two threads of rank");
    return NULL;
}

static void two_threads_at_a_time(rank_env *env)
{
    pthread_t thread;
    char byte = (char)env->rank, all[MAX_RANKS];
    OK(zs_comm_enter(env->comm));
    CHECK(pthread_create(&thread, NULL, exchange_beside, env) == 0 && pthread_join(thread, NULL) == 0);
    OK(zs_comm_exchange(env->comm, &byte, 1, all)); /* this thread's own, within it */
    zs_comm_leave(env->comm);
    OK(zs_comm_exchange(env->comm, &byte, 1, all));
}

/* A failure of the process group is put into words, and ends the transport. */
static void failures_are_explained(rank_env *env)
{
    test_unit units[UNITS];
    make_units(env, units, ZS_REDUCE_SCATTER);
    failure = ZS_ERR_TIMEOUT;
    complaint = "Timed out waiting";
    fail_late_at = 2; /* the first one agrees on it */
    bool ready = true;
    zs_sources from;
    OK(zs_cunit_post(env->comm, units[2].cunit, NULL));
    FAILS(zs_cunit_collect(env->comm, units[2].cunit, ZS_WAIT, &ready, &from), ZS_ERR_TIMEOUT,
          "while reducing gradients of unit 'blocks.2' (round 1); raise timeout if it is only slow: Timed out waiting");
    CHECK(!ready && under_way == 0);
    stay(env);
    FAILS(zs_cunit_collect(env->comm, units[2].cunit, ZS_WAIT, &ready, &from), ZS_ERR_STATE, "not posted");
    FAILS(zs_comm_broadcast(env->comm, &ready, 1, 0), ZS_ERR_PEER, "cannot run a collective");
    FAILS(zs_comm_broadcast(env->comm, &ready, 1, 0), ZS_ERR_PEER, "blocks.2");
    for (int u = 0; u < UNITS; u++) {
        zs_cunit_free(env->comm, units[u].cunit);
        zs_comm_bucket_free(env->comm, &units[u].bucket);
    }
    zs_comm *none = NULL;
    FAILS(zs_comm_c10d_new("nobody", &(zs_ranks_of_hosts){.world = 2}, 1.0, &none), ZS_ERR_TORCH, "nobody");
}

/* A collective that fails at its start, and a peer without a report. */
static void unknown_peers_are_listed(rank_env *env)
{
    failure = ZS_ERR_PEER;
    complaint = "Connection closed by peer [10.0.0.1]:4711";
    fail_at = 1;
    const char *who = env->world == 2 ? env->rank == 0 ? "rank 1 exited or" : "rank 0 exited or" : "one of ranks";
    FAILS(begin_one(env, GATHER, 64, NULL), ZS_ERR_PEER, who);
    FAILS(begin_one(env, GATHER, 64, NULL), ZS_ERR_PEER, "4711"); /* asked again: the same */
    stay(env);
}

/* The others repeat a rank's last message before it gave up. */
static void last_words_are_told(rank_env *env)
{
    char byte = 0, all[MAX_RANKS];
    zs_comm_abort(env->comm, "of this rank, which does not hear itself");
    CHECK(speaker == env->rank);
    speaker = (env->rank + 1) % env->world;
    snprintf(last_words, sizeof last_words, "ValueError: no data");
    zs_comm_abort(env->comm, "a second time is not said");
    failure = ZS_ERR_PEER;
    complaint = "Connection closed";
    fail_at = 2;
    FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_PEER, "failed: ValueError: no data; rank");
    FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_PEER, MESSAGE ": Connection closed");
    stay(env);
}

/* Rank 1 dies in a collective that then never ends: the others notice, and name it. */
static void dead_rank_is_found(rank_env *env)
{
    char byte = 0, all[MAX_RANKS];
    if (env->rank == 1) raise(SIGKILL);
    double start = now();
    last_forever_at = 1;
    FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_PEER, "rank 1 (pid ");
    FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_PEER, "exited");
    CHECK(now() - start < 4.0);
    exit(0); /* the wire has also lost a rank */
}

static bool always(void)
{
    return true;
}

/* Ctrl-C ends a wait; work under way cannot be undone. */
static void interrupted_wait_ends_the_transport(rank_env *env)
{
    char byte = 0, all[MAX_RANKS];
    zs_comm_on_wait(always);
    last_forever_at = 1;
    FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_TORCH, "interrupted");
    FAILS(zs_comm_exchange(env->comm, &byte, 1, all), ZS_ERR_PEER, "interrupted (Ctrl-C)");
    stay(env);
    zs_comm_on_wait(NULL);
}

/* Shards that abandoned gathers read are kept as well: rank 0's, and those that the others contribute. */
static void interrupted_gathers_keep_shards(rank_env *env)
{
    zs_flat_mem flats[FLATS];
    zs_reader *reader = begin_forward(env, flats);
    unsigned first = env->rank == 0 ? 0 : 1;
    zs_comm_on_wait(always);
    last_forever_at = 2; /* the first one agrees on it */
    FAILS(gather_one(env, &flats[first], first), ZS_ERR_TORCH, "");
    stay(env);
    zs_comm_on_wait(NULL);
    CHECK(reading == flats[0].shard);
    end_forward(env, reader, flats);
    CHECK(has_pattern(reading, SHARD, (unsigned)env->rank));
}

static const rank_test tests[] = {
    TEST(rounds_in_a_row, .least = 1),
    TEST(sums_are_shared, .least = 1),
    TEST(rounds_have_an_order, .least = 1),
    TEST(exchanges_storm, .least = 1),
    TEST(broadcasts_from_all_roots, .least = 1),
    TEST(gather_fills_the_full_buffer, .least = 2),
    TEST(rounds_cost_one_collective, .least = 2),
    TEST(looking, .least = 2),
    TEST(rounds_overlap, .least = 2),
    TEST(gathers_that_some_leave_out, .least = 2),
    TEST(gathers_of_what_was_written_since, .least = 2),
    TEST(ranks_that_differ, .least = 2),
    TEST(memory_that_runs_out, .least = 2),
    TEST(no_memory_for_words, .least = 2),
    TEST(last_unit_is_freed_within_a_wait, .least = 2),
    TEST(two_threads_at_a_time, .least = 2),
    TEST(many_ranks_on_a_little_stack, .least = MAX_RANKS),
    TEST(failures_are_explained, .least = 2),
    TEST(unknown_peers_are_listed, .least = 2),
    TEST(last_words_are_told, .least = 2),
    TEST(dead_rank_is_found, .least = 2, .killed = 1),
    TEST(interrupted_wait_ends_the_transport, .least = 2),
    TEST(interrupted_gathers_keep_shards, .least = 2),
};

int main(int argc, char **argv)
{
    around_each = over_c10d;
    return run_tests(tests, COUNT(tests), argc, argv);
}
