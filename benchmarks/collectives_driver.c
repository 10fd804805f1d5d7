/* collectives_driver.c - the shm transport for collectives.py, by ctypes: one call runs one operation many times.
 *
 * The timed part is that of a training step, without the work before it: the memory that the peers read has just been
 * written by its owner (so it is in that core's cache, or in none), and all ranks start together.
 */
#define _GNU_SOURCE 1
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/comm.h"
#include "device/device.h"

typedef struct bench {
    zs_comm *comm;
    zs_flat_mem flat; /* `bytes` as a full buffer */
    zs_bucket bucket; /* `bytes` of gradients */
    zs_cunit *cunit;
    zs_reader *reader;
    zs_mem *private_full, *other_full; /* `bytes` each */
    size_t bytes;
    zs_dtype dtype;
} bench;

typedef zs_status (*operation)(bench *b);

/* device.h sums on torch's threads; here there is one. */
void zs_parallel_for(int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end), void *ctx)
{
    (void)grain;
    fn(ctx, 0, n);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- operations --------------------------------------------------------------------------------------------------- */

/* An unshard in full: may the peers' shards be read, and may they again be written? */
static zs_status unshard(bench *b)
{
    const zs_reading reading = {.pass = ZS_PASS_EVALUATE};
    ZS_TRY(zs_comm_read_begin(b->comm, b->reader, &reading));
    return zs_comm_read_end(b->comm, b->reader, ZS_PHASE_FORWARD);
}

/* The work of a transport that copies: the full buffer, out of all ranks' memory. */
static zs_status copy_mapped(bench *b)
{
    memcpy(b->private_full->ptr, b->flat.full, b->bytes);
    return ZS_OK;
}

/* The same number of bytes within one process. */
static zs_status copy_private(bench *b)
{
    memcpy(b->private_full->ptr, b->other_full->ptr, b->bytes);
    return ZS_OK;
}

/* Post, wait for all, sum the own slice in rank order, release, wait until the bucket is free again. */
static zs_status reduce(bench *b)
{
    const void *from[64];
    bool ready = false;
    zs_sources sources;
    zs_cunit_header(b->cunit)->used[0] = 1;
    ZS_TRY(zs_cunit_post(b->comm, b->cunit, &b->bucket));
    ZS_TRY(zs_cunit_collect(b->comm, b->cunit, ZS_WAIT, &ready, &sources));
    size_t slice = b->flat.shard_bytes;
    for (int r = 0; r < b->comm->world; r++)
        from[r] = sources.data[r] + (size_t)b->comm->rank * slice;
    zs_sum sum = {.src = from, .world = b->comm->world, .dst = b->private_full->ptr, .dtype = b->dtype, .scale = 1.0};
    sum.numel = (int64_t)(slice / zs_dtype_size(b->dtype));
    zs_cpu_sum(&sum);
    ZS_TRY(zs_cunit_release(b->comm, b->cunit));
    return zs_cunit_reusable(b->comm, b->cunit, ZS_WAIT, &ready);
}

/* The least reads and writes of `reduce`, as copies: the own shard of each rank's memory. */
static zs_status copy_slices(bench *b)
{
    size_t slice = b->flat.shard_bytes;
    for (int r = 0; r < b->comm->world; r++)
        memcpy((char *)b->private_full->ptr + (size_t)r * slice, b->flat.full + (size_t)r * slice, slice);
    return ZS_OK;
}

/* The owner's work before: an optimizer's step, a backward. */
static void write_shard(bench *b)
{
    memset(b->flat.shard, 0, b->flat.shard_bytes);
}

static void write_bucket(bench *b)
{
    memset(b->bucket.ptr, 0, b->bytes);
}

static void write_private(bench *b)
{
    memset(b->other_full->ptr, 0, b->bytes);
}

static const struct {
    const char *name;
    operation run;
    void (*prepare)(bench *);
} operations[] = {
    {"unshard", unshard, write_shard},
    {"copy_mapped", copy_mapped, write_shard},
    {"copy_private", copy_private, write_private},
    {"reduce", reduce, write_bucket},
    {"copy_slices", copy_slices, write_shard},
};

/* --- calls from Python -------------------------------------------------------------------------------------------- */

/* The last failure's words. */
const char *zsb_error(void)
{
    return zs_last_message();
}

/* Opens this rank's end; `address` has room for 128 bytes. NULL on failure. */
zs_comm *zsb_open(int rank, int world, char *address)
{
    zs_comm *comm = NULL;
    return zs_comm_shm_new(rank, world, 60.0, address, 128, &comm) == ZS_OK ? comm : NULL;
}

/* Connects all ranks; a zs_status. */
int zsb_connect(zs_comm *comm, const char *const *addresses)
{
    static const unsigned char token[16] = "zshard benchmark";
    return (int)zs_comm_shm_connect(comm, addresses, token);
}

/* A barrier; a zs_status. */
int zsb_barrier(zs_comm *comm)
{
    char box[1] = {0};
    return (int)zs_comm_exchange(comm, box, 0, box);
}

/* Memory for full buffers of `bytes`, in float32 or bfloat16; NULL on failure. */
bench *zsb_new(zs_comm *comm, size_t bytes, int bfloat16)
{
    bench *b = calloc(1, sizeof *b);
    if (b == NULL) return NULL;
    size_t shard = bytes / (size_t)comm->world;
    zs_cunit_spec spec = {.name = "unit", .n_params = 1, .n_flats = 1, .shard_bytes = {shard}};
    spec.wire[0] = bfloat16 ? ZS_BF16 : ZS_F32;
    *b = (bench){.comm = comm, .bytes = bytes, .dtype = bfloat16 ? ZS_BF16 : ZS_F32};
    bool made =
        zs_comm_flat_new(comm, shard, &b->flat) == ZS_OK && zs_comm_bucket_new(comm, bytes, &b->bucket) == ZS_OK &&
        zs_cunit_new(comm, &spec, &b->cunit) == ZS_OK && zs_comm_reader_new(comm, "model", &b->reader) == ZS_OK &&
        zs_mem_new_private(bytes, &b->private_full) == ZS_OK && zs_mem_new_private(bytes, &b->other_full) == ZS_OK;
    return made ? b : NULL;
}

/* Frees it, after a barrier. */
void zsb_free(bench *b)
{
    zs_comm *comm = b->comm;
    zsb_barrier(comm);
    zs_comm_reader_free(comm, b->reader);
    zs_cunit_free(comm, b->cunit);
    zs_comm_bucket_free(comm, &b->bucket);
    zs_comm_flat_free(comm, &b->flat);
    zs_mem_release(b->private_full);
    zs_mem_release(b->other_full);
    free(b);
}

/* Mean seconds of one operation `name` over `count`; negative on failure. */
double zsb_run(bench *b, const char *name, int count)
{
    double total = 0;
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        if (strcmp(operations[i].name, name) != 0) continue;
        for (int n = 0; n < count; n++) {
            operations[i].prepare(b);
            if (zsb_barrier(b->comm) != ZS_OK) return -1;
            double start = now();
            if (operations[i].run(b) != ZS_OK) return -1;
            total += now() - start;
        }
        return total / count;
    }
    return -1;
}
