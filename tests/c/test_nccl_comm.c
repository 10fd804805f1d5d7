/* test_nccl_comm.c - communicators (csrc/comm/nccl/) over the stand-in for NCCL, fake_nccl.c.
 *
 * The one idea: the stand-in runs work on a stream late and on another thread, and ends the process on what the real library
 * leaves undefined; so a test that passes has waited for what has to be waited for, kept the monitor out of calls, and has
 * touched nothing after an abort.
 */
#include "ranks.h"

#include <dlfcn.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>

#include "half.h"
#include "nccl_comm.h"
#include "nccl_lib.h"

typedef void (*enqueue)(void *stream, void (*run)(void *), void *arg);

static char stream_a, stream_b; /* their addresses are streams */

/* Something recorded on a stream. */
typedef struct event {
    _Atomic int happened;
} event;

static void happen(void *arg)
{
    atomic_store(&((event *)arg)->happened, 1);
}

static void record(event *e, void *stream)
{
    enqueue on = NULL;
    void *library = dlopen(getenv("ZSHARD_NCCL_LIB"), RTLD_NOW | RTLD_NOLOAD);
    CHECK(library != NULL);
    void *symbol = dlsym(library, "fake_nccl_enqueue");
    CHECK(symbol != NULL);
    memcpy(&on, &symbol, sizeof symbol);
    atomic_store(&e->happened, 0);
    on(stream, happen, e);
    dlclose(library);
}

static bool has_happened(void *e)
{
    return atomic_load(&((event *)e)->happened) != 0;
}

/* Waits until all that is on the stream is done. */
static void synchronize(void *stream)
{
    event *e = calloc(1, sizeof *e);
    record(e, stream);
    for (double start = now(); !has_happened(e); sleep_us(100))
        CHECK(now() < start + 30.0);
    free(e);
}

static zs_nccl_comm *make(rank_env *env, const char *name)
{
    zs_nccl_options options = {.name = name, .timeout = 30.0};
    zs_nccl_comm *comm = NULL;
    OK(zs_nccl_comm_new(env->comm, &options, &comm));
    return comm;
}

static unsigned char byte_of(int rank, size_t i, unsigned salt)
{
    return (unsigned char)((unsigned)rank * 37u + (unsigned)i * 11u + (unsigned)(i >> 8) + salt);
}

static void fill(char *at, size_t bytes, int rank, unsigned salt)
{
    for (size_t i = 0; i < bytes; i++)
        at[i] = (char)byte_of(rank, i, salt);
}

static void check_filled(const char *at, size_t bytes, int rank, unsigned salt)
{
    for (size_t i = 0; i < bytes; i++)
        CHECK((unsigned char)at[i] == byte_of(rank, i, salt));
}

/* --- what moves bytes ---------------------------------------------------------------------------------------------------- */

static const size_t sizes[] = {1, 7, 64, 4096, 3 * 16384 + 5};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void gather(rank_env *env, zs_nccl_comm *comm, size_t bytes, bool in_place)
{
    char *full = calloc((size_t)env->world, bytes), *shard = malloc(bytes);
    char *from = in_place ? full + (size_t)env->rank * bytes : shard;
    fill(from, bytes, env->rank, 1);
    OK(zs_nccl_all_gather(comm, from, full, bytes, &stream_a));
    synchronize(&stream_a);
    for (int r = 0; r < env->world; r++)
        check_filled(full + (size_t)r * bytes, bytes, r, 1);
    free(full);
    free(shard);
}

static void swap_all(rank_env *env, zs_nccl_comm *comm, size_t bytes)
{
    size_t whole = (size_t)env->world * bytes;
    char *send = malloc(whole), *receive = calloc(1, whole);
    for (int r = 0; r < env->world; r++)
        fill(send + (size_t)r * bytes, bytes, env->rank, (unsigned)r);
    OK(zs_nccl_all_to_all(comm, send, receive, bytes, &stream_a));
    synchronize(&stream_a);
    for (int r = 0; r < env->world; r++)
        check_filled(receive + (size_t)r * bytes, bytes, r, (unsigned)env->rank);
    free(send);
    free(receive);
}

static void bytes_get_where_they_belong(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "300", 1);
    zs_nccl_comm *comm = make(env, "all");
    for (int s = 0; s < SIZES; s++) {
        gather(env, comm, sizes[s], false);
        gather(env, comm, sizes[s], true);
        swap_all(env, comm, sizes[s]);
        for (int root = 0; root < env->world; root++) {
            char *data = calloc(1, sizes[s]);
            if (root == env->rank) fill(data, sizes[s], root, 2);
            OK(zs_nccl_broadcast(comm, data, sizes[s], root, &stream_a));
            synchronize(&stream_a);
            check_filled(data, sizes[s], root, 2);
            free(data);
        }
    }
    zs_nccl_comm_release(comm);
}

/* A message to each rank and one from it, of other lengths for each pair, in one launch; two to oneself. */
static void messages_go_in_one_launch(rank_env *env)
{
    enum { MOST = 40000 };
    zs_nccl_comm *comm = make(env, "all");
    zs_nccl_message list[MAX_RANKS + 1];
    char *send = malloc(MOST), *receive = calloc(MAX_RANKS + 1, MOST);
    fill(send, MOST, env->rank, 5);
    for (int i = 0; i <= env->world; i++) {
        int peer = i % env->world;
        size_t bytes = (size_t)(peer + 1) * (size_t)(env->rank + 1) * 1001; /* equal on both sides */
        list[i] = (zs_nccl_message){send + i, receive + i * MOST, bytes, peer};
    }
    list[env->world] = (zs_nccl_message){send, receive + env->world * MOST, 3, env->rank};
    OK(zs_nccl_messages(comm, list, (size_t)env->world + 1, &stream_a));
    synchronize(&stream_a);
    for (int i = 0; i < env->world; i++) { /* this rank's was the rank-th of the sender's list */
        const char *at = receive + i * MOST;
        for (size_t b = 0; b < list[i].bytes; b++)
            CHECK((unsigned char)at[b] == byte_of(i, b + (size_t)env->rank, 5));
    }
    check_filled(receive + env->world * MOST, 3, env->rank, 5);
    zs_nccl_message odd = {send, receive, 8, env->world}, none = {send, receive, 0, 0}, null = {NULL, receive, 8, 0};
    FAILS(zs_nccl_messages(comm, &odd, 1, NULL), ZS_ERR_VALUE, "there is no rank");
    FAILS(zs_nccl_messages(comm, &none, 1, NULL), ZS_ERR_VALUE, "0 bytes");
    FAILS(zs_nccl_messages(comm, &null, 1, NULL), ZS_ERR_VALUE, "no memory (NULL) to send");
    OK(zs_nccl_messages(comm, NULL, 0, NULL));
    zs_nccl_comm_release(comm);
    free(send);
    free(receive);
}

/* The last reference goes while an operation is under way: what it writes is there all the same. */
static void ending_waits_for_what_is_under_way(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "200000", 1);
    zs_nccl_comm *comm = make(env, "all");
    float x = 1.0f;
    OK(zs_nccl_all_reduce(comm, &(zs_nccl_reduction){&x, &x, 1, ZS_F32, ZS_NCCL_SUM}, &stream_a));
    zs_nccl_comm_release(comm);
    synchronize(&stream_a);
    CHECK(x == (float)env->world);
}

/* --- what sums ------------------------------------------------------------------------------------------------------------- */

static void put(zs_dtype dtype, void *at, size_t i, float x)
{
    if (dtype == ZS_F32) ((float *)at)[i] = x;
    if (dtype == ZS_F64) ((double *)at)[i] = (double)x;
    if (dtype == ZS_BF16) ((uint16_t *)at)[i] = zs_to_bf16(x);
    if (dtype == ZS_F16) ((uint16_t *)at)[i] = zs_to_f16(x);
}

static float get(zs_dtype dtype, const void *at, size_t i)
{
    if (dtype == ZS_F32) return ((const float *)at)[i];
    if (dtype == ZS_F64) return (float)((const double *)at)[i];
    if (dtype == ZS_BF16) return zs_from_bf16(((const uint16_t *)at)[i]);
    return zs_from_f16(((const uint16_t *)at)[i]);
}

/* Small whole numbers, exact in every dtype. */
static float number(int rank, size_t i)
{
    return (float)((int)((size_t)(rank + 1) * (i % 5)) - 3);
}

static float expected(int world, size_t i, zs_nccl_op op)
{
    float sum = 0.0f, most = -100.0f;
    for (int r = 0; r < world; r++) {
        sum += number(r, i);
        most = fmaxf(most, number(r, i));
    }
    return op == ZS_NCCL_MAX ? most : op == ZS_NCCL_AVG ? sum / (float)world : sum;
}

static void reduce_both_ways(rank_env *env, zs_nccl_comm *comm, zs_dtype dtype, zs_nccl_op op)
{
    enum { N = 5000 };
    static const size_t item[] = {[ZS_F32] = 4, [ZS_F64] = 8, [ZS_BF16] = 2, [ZS_F16] = 2};
    size_t all = (size_t)env->world * N, own = (size_t)env->rank * N;
    char *in = calloc(all, 8), *out = calloc(all, 8);
    for (size_t i = 0; i < all; i++)
        put(dtype, in, i, number(env->rank, i));
    OK(zs_nccl_reduce_scatter(comm, &(zs_nccl_reduction){in, out, N, dtype, op}, &stream_a));
    synchronize(&stream_a);
    for (size_t i = 0; i < N; i++) {
        double rounded = 0.0; /* as the dtype is */
        put(dtype, &rounded, 0, expected(env->world, own + i, op));
        CHECK(get(dtype, out, i) == get(dtype, &rounded, 0));
    }
    /* in its own place of what it sends, and in place */
    char *part = in + own * item[dtype];
    OK(zs_nccl_reduce_scatter(comm, &(zs_nccl_reduction){in, part, N, dtype, ZS_NCCL_MAX}, &stream_a));
    synchronize(&stream_a);
    for (size_t i = 0; i < N; i++)
        CHECK(get(dtype, part, i) == expected(env->world, own + i, ZS_NCCL_MAX));
    for (size_t i = 0; i < all; i++)
        put(dtype, in, i, number(env->rank, i));
    OK(zs_nccl_all_reduce(comm, &(zs_nccl_reduction){in, in, all, dtype, ZS_NCCL_SUM}, &stream_a));
    synchronize(&stream_a);
    for (size_t i = 0; i < all; i++)
        CHECK(get(dtype, in, i) == expected(env->world, i, ZS_NCCL_SUM));
    free(in);
    free(out);
}

static void numbers_of_all_dtypes_are_reduced(rank_env *env)
{
    zs_nccl_comm *comm = make(env, "all");
    for (int dtype = ZS_F32; dtype <= ZS_F16; dtype++)
        for (int op = ZS_NCCL_SUM; op <= ZS_NCCL_MAX; op++)
            reduce_both_ways(env, comm, (zs_dtype)dtype, (zs_nccl_op)op);
    zs_nccl_comm_release(comm);
}

/* --- order ------------------------------------------------------------------------------------------------------------------ */

/* Each operation of one communicator works on what the one before has made; the other one's go on meanwhile. */
static void two_communicators_keep_their_orders(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "200", 1);
    zs_nccl_comm *a = make(env, "gathers"), *b = make(env, "sums");
    float x = 1.0f, y[MAX_RANKS] = {0};
    y[env->rank] = (float)env->rank;
    float power = 1.0f;
    for (int i = 0; i < 12; i++) {
        jitter(env);
        OK(zs_nccl_all_reduce(b, &(zs_nccl_reduction){&x, &x, 1, ZS_F32, ZS_NCCL_SUM}, &stream_b));
        OK(zs_nccl_all_gather(a, &y[env->rank], y, sizeof *y, &stream_a));
        OK(zs_nccl_all_reduce(a, &(zs_nccl_reduction){y, y, (size_t)env->world, ZS_F32, ZS_NCCL_AVG}, &stream_a));
        power *= (float)env->world;
    }
    synchronize(&stream_a);
    synchronize(&stream_b);
    CHECK(x == power);
    for (int r = 0; r < env->world; r++)
        CHECK(y[r] == (float)r);
    zs_nccl_comm_release(a);
    zs_nccl_comm_release(b);
}

/* What torch does on the NULL stream is done at once, here too. */
static void null_stream_is_at_once(rank_env *env)
{
    zs_nccl_comm *comm = make(env, "all");
    float x = 1.0f;
    OK(zs_nccl_all_reduce(comm, &(zs_nccl_reduction){&x, &x, 1, ZS_F32, ZS_NCCL_SUM}, NULL));
    CHECK(x == (float)env->world);
    zs_nccl_comm_release(comm);
}

/* --- options and versions -------------------------------------------------------------------------------------------------- */

static void all_options_are_taken(rank_env *env)
{
    for (int ctas = ZS_NCCL_CTAS_DEFAULT; ctas <= ZS_NCCL_CTAS_ZERO; ctas++)
        for (int least = 0; least <= 4; least += 4)
            for (int most = 0; most <= 8; most += 8) {
                zs_nccl_options options = {
                    .name = "all", .timeout = 30.0, .ctas = (zs_nccl_ctas)ctas, .min_ctas = least, .max_ctas = most};
                zs_nccl_comm *comm = NULL;
                OK(zs_nccl_comm_new(env->comm, &options, &comm));
                gather(env, comm, 100, true);
                zs_nccl_comm_release(comm);
            }
}

static void refuse(rank_env *env, zs_nccl_options options, zs_status kind, const char *part)
{
    zs_nccl_comm *comm = NULL;
    FAILS(zs_nccl_comm_new(env->comm, &options, &comm), kind, part);
    CHECK(comm == NULL);
}

/* A fault of the last rank is an error on all, and the next attempt is a new one. */
static void senseless_options_are_refused_on_all_ranks(rank_env *env)
{
    bool odd = env->rank == env->world - 1;
    zs_nccl_options good = {.name = "all", .timeout = 30.0}, bad = good;
    bad.timeout = -1.0;
    refuse(env, odd ? bad : good, ZS_ERR_VALUE, "a timeout of -1 s");
    bad = good;
    bad.min_ctas = 9;
    bad.max_ctas = 8;
    refuse(env, odd ? bad : good, ZS_ERR_VALUE, "9 to 8 CTAs");
    bad = good;
    bad.max_ctas = 8;
    refuse(env, odd ? bad : good, ZS_ERR_DIVERGED, "different options");
    zs_nccl_comm *comm = make(env, "all");
    gather(env, comm, 10, true);
    zs_nccl_comm_release(comm);
}

static void another_version_is_told(rank_env *env)
{
    if (env->rank == env->world - 1) setenv("FAKE_NCCL_VERSION", "23007", 1);
    refuse(env, (zs_nccl_options){.name = "all", .timeout = 30.0}, ZS_ERR_DIVERGED,
           "NCCL is 2.28.9 on rank 0 and 2.30.7");
}

static void no_library_is_told_on_all_ranks(rank_env *env)
{
    if (env->rank == env->world - 1) setenv("ZSHARD_NCCL_LIB", "/nowhere/libnccl.so.2", 1);
    char part[96];
    snprintf(part, sizeof part, "rank %d: NCCL: ZSHARD_NCCL_LIB cannot be opened: /nowhere", env->world - 1);
    refuse(env, (zs_nccl_options){.name = "all", .timeout = 30.0}, ZS_ERR_UNSUPPORTED, part);
}

/* A library that is something else: libc has no ncclGetVersion. */
static void another_library_is_told(rank_env *env)
{
    setenv("ZSHARD_NCCL_LIB", "libc.so.6", 1);
    refuse(env, (zs_nccl_options){.name = "all", .timeout = 30.0}, ZS_ERR_UNSUPPORTED, "has no ncclGetVersion");
}

/* Runs with 2.21.5 (see test_nccl.py). */
static void an_old_library_does_without(rank_env *env)
{
    zs_nccl_options options = {.name = "all", .timeout = 30.0, .ctas = ZS_NCCL_CTAS_EFFICIENCY};
    refuse(env, options, ZS_ERR_UNSUPPORTED, "does not know the CTA policy 'efficiency'");
    zs_nccl_comm *comm = make(env, "all");
    for (int s = 0; s < SIZES; s++)
        swap_all(env, comm, sizes[s]);
    gather(env, comm, 100, true);
    zs_nccl_window window = {0};
    FAILS(zs_nccl_window_new(comm, 4096, &window), ZS_ERR_UNSUPPORTED, "2.21.5");
    CHECK(window.ptr == NULL);
    gather(env, comm, 100, true);
    zs_nccl_comm_release(comm);
}

static void windows_are_registered(rank_env *env)
{
    zs_nccl_comm *comm = make(env, "all");
    zs_nccl_window window = {0}, other = {0};
    jitter(env);
    FAILS(zs_nccl_window_new(comm, 0, &window), ZS_ERR_VALUE, "0 bytes");
    OK(zs_nccl_window_new(comm, (size_t)env->world * 1000, &window));
    OK(zs_nccl_window_new(comm, 5000, &other));
    CHECK(window.registered && (uintptr_t)window.ptr % 4096 == 0 && window.bytes == (size_t)env->world * 1000);
    char *part = (char *)window.ptr + env->rank * 1000;
    fill(part, 1000, env->rank, 3);
    OK(zs_nccl_all_gather(comm, part, window.ptr, 1000, &stream_a));
    synchronize(&stream_a);
    for (int r = 0; r < env->world; r++)
        check_filled((char *)window.ptr + r * 1000, 1000, r, 3);
    zs_nccl_window_free(&other);
    zs_nccl_window_free(&other);
    zs_nccl_comm_release(comm); /* the window keeps it */
    CHECK(zs_nccl_comm_check(window.comm) == ZS_OK);
    zs_nccl_window_free(&window);
}

static void bad_arguments_poison_nothing(rank_env *env)
{
    zs_nccl_comm *comm = make(env, "all");
    char full[MAX_RANKS * 64] = {0}, other[MAX_RANKS * 64] = {0};
    size_t huge = SIZE_MAX / 2;
    FAILS(zs_nccl_all_gather(comm, NULL, full, 64, NULL), ZS_ERR_VALUE, "no memory (NULL) to send");
    FAILS(zs_nccl_all_gather(comm, full, NULL, 64, NULL), ZS_ERR_VALUE, "no memory (NULL) to receive into");
    FAILS(zs_nccl_all_gather(comm, full + 32, full, 64, NULL), ZS_ERR_VALUE, "not in rank");
    FAILS(zs_nccl_all_gather(comm, other, full, huge, NULL), ZS_ERR_VALUE, "is no size");
    FAILS(zs_nccl_all_to_all(comm, full, full + 64, 64, NULL), ZS_ERR_VALUE, "cannot receive where it sends from");
    FAILS(zs_nccl_broadcast(comm, full, 64, env->world, NULL), ZS_ERR_VALUE, "there is no rank");
    FAILS(zs_nccl_broadcast(comm, full, 64, -1, NULL), ZS_ERR_VALUE, "there is no rank -1");
    zs_nccl_reduction bytes = {full, other, 4, ZS_BYTES, ZS_NCCL_SUM}, odd = {full, other, 4, ZS_F32, (zs_nccl_op)7};
    FAILS(zs_nccl_all_reduce(comm, &bytes, NULL), ZS_ERR_VALUE, "only floating-point numbers");
    FAILS(zs_nccl_reduce_scatter(comm, &odd, NULL), ZS_ERR_VALUE, "there is no reduction 7");
    OK(zs_nccl_all_gather(comm, NULL, NULL, 0, NULL));
    OK(zs_nccl_comm_check(comm));
    gather(env, comm, 64, true);
    zs_nccl_comm_release(comm);
}

/* --- failures --------------------------------------------------------------------------------------------------------------- */

static void count_lost(void *arg, zs_status failure, const char *why)
{
    CHECK(failure != ZS_OK && strlen(why) > 0);
    atomic_fetch_add((_Atomic int *)arg, 1);
}

/* All that a communicator can be asked to do, until something fails. */
static zs_status do_everything(rank_env *env, zs_nccl_comm *comm, zs_nccl_window *window)
{
    static char full[MAX_RANKS * 64], other[MAX_RANKS * 64];
    char *mine = full + env->rank * 64;
    zs_nccl_reduction sum = {full, other, 4, ZS_F32, ZS_NCCL_SUM};
    if (getenv("ZS_TEST_OLD") == NULL) ZS_TRY(zs_nccl_window_new(comm, 4096, window));
    for (int i = 0; i < 3; i++) {
        ZS_TRY(zs_nccl_all_gather(comm, mine, full, 64, &stream_a));
        ZS_TRY(zs_nccl_all_to_all(comm, full, other, 64, &stream_a));
        ZS_TRY(zs_nccl_broadcast(comm, full, 64, 0, &stream_a));
        ZS_TRY(zs_nccl_reduce_scatter(comm, &sum, &stream_a));
        ZS_TRY(zs_nccl_all_reduce(comm, &sum, &stream_a));
        ZS_TRY(zs_nccl_comm_check(comm));
    }
    return ZS_OK;
}

/* FAKE_NCCL_FAIL or FAKE_NCCL_FAIL_LATE or FAKE_NCCL_ASYNC is set by test_nccl.py, and ZS_TEST_WORDS says what the failure
 * has to name; without ZS_TEST_WORDS the failure comes at the end, when nobody is told. ZS_TEST_OLD: the old library. */
static void a_failing_call_is_an_error_and_no_more(rank_env *env)
{
    const char *words = getenv("ZS_TEST_WORDS");
    _Atomic int lost = 0;
    zs_nccl_options options = {.name = "all", .timeout = 30.0, .lost = count_lost, .arg = &lost};
    zs_nccl_comm *comm = NULL;
    zs_nccl_window window = {0};
    zs_clear_error();
    zs_status status = zs_nccl_comm_new(env->comm, &options, &comm);
    bool made = status == ZS_OK;
    if (made) status = do_everything(env, comm, &window);
    for (double start = now(); made && words != NULL && status == ZS_OK && now() < start + 5.0; sleep_us(1000))
        status = zs_nccl_comm_check(comm); /* the monitor finds it */
    CHECK(status == (words != NULL ? ZS_ERR_NCCL : ZS_OK));
    if (words != NULL && strstr(zs_last_message(), words) == NULL) fprintf(stderr, "expected: %s\n", words);
    CHECK(words == NULL || strstr(zs_last_message(), words) != NULL);
    char first[1024];
    snprintf(first, sizeof first, "%s", zs_last_message());
    if (made && words != NULL) {
        FAILS(do_everything(env, comm, &window), ZS_ERR_NCCL, first);
        FAILS(zs_nccl_comm_check(comm), ZS_ERR_NCCL, first);
        CHECK(atomic_load(&lost) == 1);
    }
    if (made) synchronize(&stream_a);
    zs_nccl_window_free(&window);
    zs_nccl_comm_release(comm);
}

/* What NCCL itself refuses without another word in its state poisons nothing. */
static void what_only_nccl_refuses_poisons_nothing(rank_env *env)
{
    setenv("FAKE_NCCL_FAIL", "CommWindowRegister:1:4", 1);
    zs_nccl_comm *comm = make(env, "all");
    zs_nccl_window window = {0};
    FAILS(zs_nccl_window_new(comm, 4096, &window), ZS_ERR_NCCL, "ncclCommWindowRegister failed: invalid argument");
    CHECK(window.ptr == NULL && window.comm == NULL);
    gather(env, comm, 100, true);
    OK(zs_nccl_window_new(comm, 4096, &window));
    zs_nccl_window_free(&window);
    zs_nccl_comm_release(comm);
}

/* --- peers that are gone ------------------------------------------------------------------------------------------------- */

/* Word of a failure travels over the board, as it does over a transport. */
static void tell_board(void *arg, zs_status failure, const char *why)
{
    (void)failure;
    (void)why;
    atomic_store(&((board *)arg)->step, 1);
}

static bool ask_board(void *arg, char *sentence, size_t size)
{
    if (atomic_load(&((board *)arg)->step) != 1) return false;
    snprintf(sentence, size, "another rank gave up");
    return true;
}

static zs_nccl_options over_board(rank_env *env, double timeout)
{
    return (zs_nccl_options){
        .name = "all", .timeout = timeout, .gone = ask_board, .lost = tell_board, .arg = env->board};
}

/* Only the last rank fails; the others, whose kernels would wait for ever, hear of it. */
static void one_rank_fails_and_the_others_hear(rank_env *env)
{
    bool last = env->rank == env->world - 1;
    if (last) setenv("FAKE_NCCL_FAIL", "AllGather:2:2", 1);
    zs_nccl_options options = over_board(env, 60.0);
    zs_nccl_comm *comm = NULL;
    OK(zs_nccl_comm_new(env->comm, &options, &comm));
    gather(env, comm, 100, true);
    char full[MAX_RANKS] = {0}, mine = 0;
    OK(env->comm->ops->exchange(env->comm, &mine, 1, full)); /* a slow rank's gather would be broken off as well */
    double start = now();
    zs_clear_error();
    zs_status status = zs_nccl_all_gather(comm, full + env->rank, full, 1, &stream_a);
    CHECK(last ? status == ZS_ERR_NCCL && strstr(zs_last_message(), "unhandled system error") != NULL
               : status == ZS_OK);
    zs_clear_error();
    if (!last) synchronize(&stream_a); /* the user's loss.item() */
    CHECK(now() < start + 10.0);
    if (!last) FAILS(zs_nccl_comm_check(comm), ZS_ERR_PEER, "another rank gave up");
    zs_nccl_comm_release(comm);
}

/* Making it fails on the last rank: all say so, in the words of that rank. */
static void a_rank_that_cannot_make_it_is_told_on_all(rank_env *env)
{
    if (env->rank == env->world - 1) setenv("FAKE_NCCL_FAIL", "CommInitRankConfig:1:1", 1);
    char part[64];
    snprintf(part, sizeof part, "rank %d: NCCL, communicator 'all'", env->world - 1);
    double start = now();
    refuse(env, over_board(env, 60.0), ZS_ERR_NCCL, part);
    CHECK(now() < start + 10.0);
}

static bool has_ended(void *arg, char *sentence, size_t size)
{
    struct pollfd look = {.fd = *(int *)arg, .events = POLLIN};
    if (poll(&look, 1, 0) <= 0) return false;
    snprintf(sentence, size, "rank 1 has ended");
    return true;
}

/* A rank that has done its part and left: what is still under way here may end well. */
static void a_peer_that_has_left_breaks_nothing_off(rank_env *env)
{
    pid_t pid = getpid(), pids[MAX_RANKS];
    OK(env->comm->ops->exchange(env->comm, &pid, sizeof pid, pids));
    int pidfd = (int)syscall(SYS_pidfd_open, pids[1], 0);
    if (env->rank != 1) setenv("FAKE_NCCL_DELAY_US", "500000", 1);
    zs_nccl_options options = {.name = "all", .timeout = 60.0, .gone = has_ended, .arg = &pidfd};
    if (env->rank == 1) options.gone = NULL;
    zs_nccl_comm *comm = NULL;
    OK(zs_nccl_comm_new(env->comm, &options, &comm));
    char data[8] = {0};
    if (env->rank == 1) fill(data, 8, 1, 7);
    event done = {0};
    OK(zs_nccl_broadcast(comm, data, 8, 1, &stream_a));
    record(&done, &stream_a);
    OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &done, "the last"}));
    synchronize(&stream_a);
    if (env->rank == 1) raise(SIGKILL);
    check_filled(data, 8, 1, 7);
    for (double start = now(); zs_nccl_comm_check(comm) == ZS_OK; sleep_us(1000))
        CHECK(now() < start + 10.0);
    FAILS(zs_nccl_comm_check(comm), ZS_ERR_PEER, "rank 1 has ended");
    zs_nccl_comm_release(comm);
    close(pidfd);
}

static void a_killed_rank_is_reported_within_seconds(rank_env *env)
{
    pid_t pid = getpid(), pids[MAX_RANKS];
    OK(env->comm->ops->exchange(env->comm, &pid, sizeof pid, pids));
    int pidfd = (int)syscall(SYS_pidfd_open, pids[1], 0);
    zs_nccl_options options = {.name = "all", .timeout = 60.0, .gone = has_ended, .arg = &pidfd};
    if (env->rank == 1) options.gone = NULL;
    zs_nccl_comm *comm = NULL;
    OK(zs_nccl_comm_new(env->comm, &options, &comm));
    gather(env, comm, 100, true);
    if (env->rank == 1) raise(SIGKILL);
    char full[MAX_RANKS] = {0};
    double start = now();
    zs_nccl_all_gather(comm, full + env->rank, full, 1, &stream_a);
    synchronize(&stream_a);
    CHECK(now() < start + 10.0);
    FAILS(zs_nccl_all_gather(comm, full + env->rank, full, 1, &stream_a), ZS_ERR_PEER, "rank 1 has ended");
    zs_nccl_comm_release(comm);
    close(pidfd);
}

/* --- what does not end -------------------------------------------------------------------------------------------------- */

static void work_that_does_not_end_is_broken_off(rank_env *env)
{
    setenv("FAKE_NCCL_HANG", "AllGather:2", 1);
    zs_nccl_options options = {.name = "all", .timeout = 1.0};
    zs_nccl_comm *comm = NULL;
    OK(zs_nccl_comm_new(env->comm, &options, &comm));
    gather(env, comm, 100, true);
    event done[3] = {{0}};
    char full[MAX_RANKS] = {0};
    for (int i = 0; i < 3; i++) { /* the second one hangs, the third waits behind it */
        if (i > 0) OK(zs_nccl_all_gather(comm, full + env->rank, full, 1, &stream_a));
        record(&done[i], &stream_a);
        OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &done[i], i == 1 ? "the second" : "another"}));
    }
    double start = now();
    synchronize(&stream_a);
    CHECK(now() < start + 10.0);
    FAILS(zs_nccl_comm_check(comm), ZS_ERR_TIMEOUT, "the second has not ended within 1 s");
    FAILS(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &done[0], "more"}), ZS_ERR_TIMEOUT, "the second");
    zs_nccl_comm_release(comm);
}

/* Work that goes on, however long in all, and work that was forgotten, is nobody's fault. */
static void progress_is_no_timeout(rank_env *env)
{
    setenv("FAKE_NCCL_DELAY_US", "30000", 1);
    zs_nccl_options options = {.name = "all", .timeout = 0.8};
    zs_nccl_comm *comm = NULL;
    OK(zs_nccl_comm_new(env->comm, &options, &comm));
    enum { N = 80 };
    event done[N] = {{0}}, never = {0}, nor_this = {0};
    char full[MAX_RANKS] = {0};
    OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &never, "never"}));
    for (int i = 0; i < N; i++) {
        OK(zs_nccl_all_gather(comm, full + env->rank, full, 1, &stream_a));
        record(&done[i], &stream_a);
        OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &done[i], "a gather"}));
        if (i == N / 2) OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &nor_this, "nor this"}));
    }
    zs_nccl_comm_forget(comm, &never);
    zs_nccl_comm_forget(comm, &nor_this);
    zs_nccl_comm_forget(comm, &nor_this);
    synchronize(&stream_a);
    OK(zs_nccl_comm_check(comm));
    zs_nccl_comm_release(comm);
}

/* A launch that waits for a peer has the same limit. */
static void a_rank_that_never_comes_is_a_timeout(rank_env *env)
{
    zs_nccl_options options = {.name = "all", .timeout = 1.0};
    zs_nccl_comm *comm = NULL;
    OK(zs_nccl_comm_new(env->comm, &options, &comm));
    zs_nccl_window window = {0};
    double start = now();
    if (env->rank == 0)
        FAILS(zs_nccl_window_new(comm, 4096, &window), ZS_ERR_TIMEOUT,
              "ncclCommWindowRegister is at work for more than 1 s");
    CHECK(now() < start + 5.0);
    zs_nccl_comm_release(comm);
}

/* --- processes ------------------------------------------------------------------------------------------------------------ */

static void a_forked_child_touches_nothing(rank_env *env)
{
    zs_nccl_comm *comm = make(env, "all");
    zs_nccl_window window = {0};
    OK(zs_nccl_window_new(comm, 4096, &window));
    event done = {0};
    OK(zs_nccl_comm_watch(comm, (zs_nccl_work){has_happened, &done, "something"}));
    pid_t child = fork();
    if (child == 0) {
        zs_nccl_options options = {.name = "all", .timeout = 1.0};
        zs_comm *alone = NULL;
        zs_nccl_comm *another = NULL;
        FAILS(zs_nccl_broadcast(comm, window.ptr, 1, 0, NULL), ZS_ERR_STATE, "forked");
        FAILS(zs_nccl_comm_check(comm), ZS_ERR_STATE, "forked");
        OK(zs_comm_self_new(zs_device_cpu(), &alone));
        FAILS(zs_nccl_comm_new(alone, &options, &another), ZS_ERR_STATE, "forked");
        zs_comm_release(alone);
        zs_nccl_comm_forget(comm, &done);
        zs_nccl_abort_all("the end");
        zs_nccl_window_free(&window);
        zs_nccl_comm_release(comm);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    gather(env, comm, 100, true);
    zs_nccl_comm_forget(comm, &done);
    zs_nccl_window_free(&window);
    zs_nccl_comm_release(comm);
}

static void abort_at_exit(void)
{
    zs_nccl_abort_all("the interpreter ends");
}

/* The process ends in the middle of things: no hang, no crash. (The harness waits for status 0.) */
static void exit_without_close_is_no_hang(rank_env *env)
{
    if (env->rank % 2 == 0) atexit(abort_at_exit);
    setenv("FAKE_NCCL_HANG", "AllGather:2", 1);
    zs_nccl_comm *comm = make(env, "all");
    gather(env, comm, 100, true);
    static char full[MAX_RANKS];
    OK(zs_nccl_all_gather(comm, full + env->rank, full, 1, &stream_a));
    double start = now();
    if (env->rank == 0) {
        zs_nccl_abort_all("the interpreter ends");
        synchronize(&stream_a);
        FAILS(zs_nccl_comm_check(comm), ZS_ERR_STATE, "the interpreter ends");
    }
    CHECK(now() < start + 5.0);
    exit(0);
}

/* The monitor comes and goes with the communicators. */
static void communicators_come_and_go(rank_env *env)
{
    for (int i = 0; i < 20; i++) {
        zs_nccl_comm *comm = make(env, "first"), *other = i % 3 == 0 ? make(env, "second") : NULL;
        gather(env, comm, 10, true);
        zs_nccl_comm_release(comm);
        if (other != NULL) gather(env, other, 10, false);
        zs_nccl_comm_release(other);
    }
}

/* For ThreadSanitizer: calls from two threads in turn, and the monitor in between. */
typedef struct caller {
    rank_env *env;
    zs_nccl_comm *comm;
} caller;

static void *call_for_a_while(void *arg)
{
    caller *c = arg;
    double start = now();
    float over = 0.0f;
    while (over == 0.0f) {
        float mine = now() > start + 1.0 ? 1.0f : 0.0f;
        OK(zs_nccl_all_reduce(c->comm, &(zs_nccl_reduction){&mine, &mine, 1, ZS_F32, ZS_NCCL_MAX}, &stream_a));
        event *done = calloc(1, sizeof *done);
        record(done, &stream_a);
        OK(zs_nccl_comm_watch(c->comm, (zs_nccl_work){has_happened, done, "a sum"}));
        synchronize(&stream_a);
        zs_nccl_comm_forget(c->comm, done);
        free(done);
        over = mine;
    }
    return NULL;
}

static void calls_and_the_monitors_thread(rank_env *env)
{
    caller c = {env, make(env, "all")};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, call_for_a_while, &c) == 0);
        pthread_join(thread, NULL);
    }
    zs_nccl_comm_release(c.comm);
}

static const rank_test tests[] = {
    TEST(bytes_get_where_they_belong, .least = 1),
    TEST(messages_go_in_one_launch, .least = 1),
    TEST(ending_waits_for_what_is_under_way, .least = 1),
    TEST(numbers_of_all_dtypes_are_reduced, .least = 1),
    TEST(two_communicators_keep_their_orders, .least = 2),
    TEST(null_stream_is_at_once, .least = 1),
    TEST(all_options_are_taken, .least = 2),
    TEST(senseless_options_are_refused_on_all_ranks, .least = 2),
    TEST(another_version_is_told, .least = 2),
    TEST(no_library_is_told_on_all_ranks, .least = 1),
    TEST(another_library_is_told, .least = 1),
    TEST(an_old_library_does_without, .least = 2),
    TEST(windows_are_registered, .least = 1),
    TEST(bad_arguments_poison_nothing, .least = 2),
    TEST(a_failing_call_is_an_error_and_no_more, .least = 2),
    TEST(what_only_nccl_refuses_poisons_nothing, .least = 2),
    TEST(one_rank_fails_and_the_others_hear, .least = 2),
    TEST(a_rank_that_cannot_make_it_is_told_on_all, .least = 2),
    TEST(a_killed_rank_is_reported_within_seconds, .least = 2, .killed = 1),
    TEST(a_peer_that_has_left_breaks_nothing_off, .least = 2, .killed = 1),
    TEST(work_that_does_not_end_is_broken_off, .least = 2),
    TEST(progress_is_no_timeout, .least = 2),
    TEST(a_rank_that_never_comes_is_a_timeout, .least = 2),
    TEST(a_forked_child_touches_nothing, .least = 2),
    TEST(exit_without_close_is_no_hang, .least = 2),
    TEST(communicators_come_and_go, .least = 2),
    TEST(calls_and_the_monitors_thread, .least = 2),
};

int main(int argc, char **argv)
{
    return run_tests(tests, sizeof tests / sizeof *tests, argc, argv);
}
