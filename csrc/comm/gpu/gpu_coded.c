/* gpu_coded.c - parameters and gradients that cross hosts in fewer bytes, on GPUs. See gpu.h.
 *
 * The numbers are those of the hosts transport (hosts_coded.c, hosts_params.c). A host first sums its own ranks'
 * gradients: each rank the shards of its counterparts, the ranks at its place on the hosts. A code's error is added to
 * the next round's sums, so a rank encodes only if its host has gradients: all ranks' headers must be there before
 * anything is queued. */
#include "comm/gpu/gpu.h"
#include "device/cuda_kernels.h"
#include "device/device_cuda.h"

#include <stdlib.h>

static int hosts_of(const zs_comm *comm)
{
    return comm->per_host > 0 ? comm->world / comm->per_host : 1;
}

/* --- parameters --------------------------------------------------------------------------------------------------- */

size_t zs_gpu_code_bytes(const zs_comm *comm, zs_wire wire, zs_dtype dtype, size_t shard_bytes)
{
    bool crosses = comm->per_host > 0 && comm->ops->code_room != NULL;
    return zs_wire_code_bytes(crosses ? wire : ZS_WIRE_EXACT, dtype, shard_bytes);
}

size_t zs_gpu_code_room(const zs_comm *comm, zs_wire wire, zs_dtype dtype, size_t shard_bytes)
{
    return zs_gpu_code_bytes(comm, wire, dtype, shard_bytes) * (size_t)comm->world;
}

zs_status zs_gpu_gather_codes(zs_gpu_comm *comm, size_t code_bytes, const char *shard, char *codes)
{
    char *own = codes + (size_t)comm->base.rank * code_bytes;
    zs_cast cast = {own, shard, (int64_t)(code_bytes / sizeof(zs_bf16)), ZS_BF16, ZS_F32};
    ZS_TRY(zs_device_cast(comm->base.device, ZS_STREAM_GATHER, &cast));
    zs_traffic_from_each(&comm->base, ZS_TRAFFIC_GATHER, code_bytes);
    return comm->backend->ops->gather(comm->backend, ZS_STREAM_GATHER, own, codes, code_bytes);
}

zs_status zs_gpu_decode(const zs_gpu_comm *comm, zs_stream stream, const char *codes, size_t bytes, char *out)
{
    zs_cast cast = {out, codes, (int64_t)(bytes / sizeof(zs_bf16)), ZS_F32, ZS_BF16};
    return zs_device_cast(comm->base.device, stream, &cast);
}

/* --- a round's memory --------------------------------------------------------------------------------------------- */

zs_wire_sums zs_gpu_sums_of(const zs_comm *comm, const zs_cunit_spec *spec)
{
    bool crosses = comm->per_host > 0 && comm->ops->code_room != NULL && spec->n_flats > 0;
    return crosses ? zs_wire_sums_of(comm, spec) : (zs_wire_sums){.code = ZS_WIRE_EXACT};
}

size_t zs_gpu_lost_bytes(const zs_comm *comm, const zs_wire_sums *sums)
{
    return zs_wire_lost_bytes(sums, hosts_of(comm));
}

/* The shards that the other ranks of the host send this one: for each of them, those of each counterpart. */
static size_t inbox_bytes(const zs_comm *comm, const zs_cunit_spec *spec)
{
    return comm->per_host > 1 ? zs_spec_shards_bytes(spec) * (size_t)comm->world : 0;
}

/* Codes that arrive, codes to send, sums (of this host, then of all hosts), inbox. */
size_t zs_gpu_coded_bytes(const zs_comm *comm, const zs_cunit_spec *spec, const zs_wire_sums *sums)
{
    return (2 * sums->travel + sums->bytes) * (size_t)hosts_of(comm) + inbox_bytes(comm, spec);
}

/* A round that is being sent. */
typedef struct coded_round {
    zs_gpu_comm *comm;
    zs_gpu_unit *unit;
    int hosts, host, lane;
    char *in, *out, *sums, *inbox;
    zs_message *messages; /* [world * n_flats] room; owned */
} coded_round;

static zs_status round_begin(zs_gpu_comm *comm, zs_gpu_unit *unit, coded_round *round)
{
    const zs_comm *base = &comm->base;
    const zs_wire_sums *sums = &unit->sums;
    *round = (coded_round){.comm = comm, .unit = unit, .hosts = hosts_of(base)};
    round->host = base->rank / base->per_host;
    round->lane = base->rank % base->per_host;
    ZS_TRY(zs_gpu_take_area(comm, zs_gpu_coded_bytes(base, &unit->base.spec, sums), &unit->received));
    round->in = unit->received->ptr;
    round->out = round->in + sums->travel * (size_t)round->hosts;
    round->sums = round->out + sums->travel * (size_t)round->hosts;
    round->inbox = round->sums + sums->bytes * (size_t)round->hosts;
    round->messages = malloc((size_t)base->world * (size_t)unit->base.spec.n_flats * sizeof *round->messages);
    if (round->messages != NULL) return ZS_OK;
    return ZS_FAIL(ZS_ERR_MEMORY, "out of memory reducing unit '%s'", unit->base.spec.name);
}

/* --- who has gradients -------------------------------------------------------------------------------------------- */

static int rank_at(const coded_round *round, int host, int lane)
{
    return host * round->comm->base.per_host + lane;
}

static bool has_gradients(const coded_round *round, int rank)
{
    return (round->unit->hosts.headers[rank]->flags & ZS_ROUND_BUCKET) != 0;
}

static bool host_has_gradients(const coded_round *round, int host)
{
    for (int lane = 0; lane < round->comm->base.per_host; lane++)
        if (has_gradients(round, rank_at(round, host, lane))) return true;
    return false;
}

/* --- within the host ---------------------------------------------------------------------------------------------- */

/* The shard of flat `f` that this rank has of the rank at `host`, `lane`. */
static const char *own_shard(const coded_round *round, int f, int host, int lane)
{
    const zs_cunit *base = &round->unit->base;
    return base->bucket->ptr + zs_cunit_shard_at(base, f, base->spec.shard_of[rank_at(round, host, lane)]);
}

/* The place for flat `f` of the counterpart on `host`, from the rank at `lane` of this host. */
static char *place_of(const coded_round *round, int f, int host, int lane)
{
    const zs_cunit *base = &round->unit->base;
    size_t at = 0;
    for (int g = 0; g < f; g++)
        at += base->spec.shard_bytes[g];
    return round->inbox + (size_t)(lane * round->hosts + host) * base->shards_bytes + at;
}

/* Sends the ranks of this host the shards of their counterparts. If only one of two ranks has gradients, the other
 * sends bytes that are never read. */
static zs_status swap_in_host(const coded_round *round)
{
    const zs_cunit *base = &round->unit->base;
    zs_gpu_comm *comm = round->comm;
    size_t n = 0;
    for (int lane = 0; lane < comm->base.per_host; lane++) {
        const int peer = rank_at(round, round->host, lane);
        if (lane == round->lane || (base->bucket == NULL && !has_gradients(round, peer))) continue;
        for (int host = 0; host < round->hosts; host++)
            for (int f = 0; f < base->spec.n_flats; f++) {
                const char *send = base->bucket != NULL ? own_shard(round, f, host, lane) : round->inbox;
                round->messages[n++] =
                    (zs_message){send, place_of(round, f, host, lane), base->spec.shard_bytes[f], peer};
            }
    }
    for (size_t i = 0; i < n; i++)
        zs_traffic_count(ZS_TRAFFIC_REDUCE, round->messages[i].bytes, 0);
    return comm->backend->ops->exchange(comm->backend, base->spec.name, round->messages, n);
}

/* This host's sum of flat `f` for the counterpart on `host`. */
static zs_status sum_flat(const coded_round *round, int f, int host)
{
    const zs_cunit *base = &round->unit->base;
    const int per_host = round->comm->base.per_host;
    const void *src[per_host];
    for (int lane = 0; lane < per_host; lane++) {
        bool here = has_gradients(round, rank_at(round, round->host, lane));
        const char *from = lane != round->lane ? place_of(round, f, host, lane) : NULL;
        if (here && lane == round->lane) from = own_shard(round, f, host, lane);
        src[lane] = here ? from : NULL;
    }
    zs_sum sum = {.src = src, .world = per_host, .dtype = base->spec.wire[f], .scale = 1.0};
    sum.dst = round->sums + (size_t)host * round->unit->sums.bytes + base->at[f];
    sum.to = zs_dtype_of_partial_sum(base->spec.wire[f]);
    sum.numel = (int64_t)(base->spec.shard_bytes[f] / zs_dtype_size(base->spec.wire[f]));
    return zs_device_sum(round->comm->base.device, ZS_STREAM_REDUCE, &sum);
}

static zs_status sum_in_host(const coded_round *round)
{
    for (int host = 0; host < round->hosts; host++)
        for (int f = 0; f < round->unit->base.spec.n_flats; f++)
            ZS_TRY(sum_flat(round, f, host));
    return ZS_OK;
}

/* --- between hosts ------------------------------------------------------------------------------------------------ */

static zs_status encode(const coded_round *round)
{
    const int64_t numel = (int64_t)(round->unit->sums.bytes / sizeof(float)) * round->hosts;
    zs_cu_stream stream;
    ZS_TRY(zs_device_cuda_stream(round->comm->base.device, ZS_STREAM_REDUCE, &stream));
    return zs_cuda_encode((const float *)(const void *)round->sums, round->unit->lost->ptr, numel, round->out, stream);
}

static zs_status decode(const coded_round *round)
{
    size_t bytes = round->unit->sums.travel * (size_t)round->hosts;
    return zs_gpu_decode(round->comm, ZS_STREAM_REDUCE, round->in, bytes, round->sums);
}

/* Sends the counterparts their codes; also itself. Returns how many hosts have gradients in `n_hosts`. */
static zs_status swap_codes(const coded_round *round, int *n_hosts)
{
    const zs_gpu_unit *unit = round->unit;
    zs_gpu_comm *comm = round->comm;
    const size_t travel = unit->sums.travel;
    const bool here = host_has_gradients(round, round->host);
    size_t n = 0;
    for (int host = 0; host < round->hosts; host++) {
        bool there = host_has_gradients(round, host);
        *n_hosts += there;
        if (!here && !there) continue;
        round->messages[n++] = (zs_message){round->out + (size_t)host * travel, round->in + (size_t)host * travel,
                                            travel, rank_at(round, host, round->lane)};
    }
    zs_traffic_count(ZS_TRAFFIC_REDUCE, 0, (n - (here ? 1 : 0)) * travel);
    return comm->backend->ops->exchange(comm->backend, unit->base.spec.name, round->messages, n);
}

static zs_status queue(const coded_round *round)
{
    const zs_device *device = round->comm->base.device;
    int n_hosts = 0;
    ZS_TRY(zs_device_fork(device, ZS_STREAM_REDUCE)); /* after the packing */
    ZS_TRY(swap_in_host(round));
    bool here = host_has_gradients(round, round->host);
    if (here) ZS_TRY(sum_in_host(round));
    ZS_TRY(zs_device_cuda_record(device, ZS_STREAM_REDUCE, round->unit->read));
    if (here) ZS_TRY(encode(round));
    ZS_TRY(swap_codes(round, &n_hosts));
    return n_hosts > 0 ? decode(round) : ZS_OK;
}

zs_status zs_gpu_send_coded(zs_gpu_comm *comm, zs_gpu_unit *unit)
{
    bool ready = false;
    coded_round round = {0};
    ZS_TRY(zs_gpu_after_wait(comm, zs_cunit_collect(comm->control, unit->control, ZS_WAIT, &ready, &unit->hosts)));
    zs_gpu_order_add(comm, "gradients", unit->base.spec.name, unit->base.shards_bytes);
    zs_status status = round_begin(comm, unit, &round);
    ZS_THEN(status, queue(&round));
    unit->session = comm->base.sessions;
    free(round.messages);
    return status == ZS_OK ? ZS_OK : zs_gpu_fail(comm, status);
}

void zs_gpu_arrive_coded(zs_gpu_comm *comm, zs_gpu_unit *unit)
{
    coded_round round = {.comm = comm, .unit = unit, .hosts = hosts_of(&comm->base)};
    const char *sums = (const char *)unit->received->ptr + 2 * unit->sums.travel * (size_t)round.hosts;
    for (int r = 0; r < comm->base.world; r++) {
        unit->base.headers[r] = unit->hosts.headers[r];
        unit->base.data[r] = NULL;
    }
    for (int host = 0; host < round.hosts; host++)
        if (host_has_gradients(&round, host))
            unit->base.data[rank_at(&round, host, 0)] = sums + (size_t)host * unit->sums.bytes;
}

/* --- what codes have lost ----------------------------------------------------------------------------------------- */

zs_status zs_gpu_coded_init(zs_gpu_comm *comm, zs_gpu_unit *unit)
{
    zs_cunit *base = &unit->base;
    unit->sums = zs_gpu_sums_of(&comm->base, &base->spec);
    if (unit->sums.code == ZS_WIRE_EXACT) return ZS_OK;
    (void)zs_wire_lay_out(&comm->base, &base->spec, base->at);
    base->partial = true;
    const size_t bytes = zs_gpu_lost_bytes(&comm->base, &unit->sums);
    ZS_TRY(zs_device_mem_new(comm->base.device, bytes, &unit->lost));
    comm->lost_bytes += bytes;
    return ZS_OK;
}

void zs_gpu_coded_clear(zs_gpu_comm *comm, zs_gpu_unit *unit)
{
    if (unit->lost == NULL) return;
    comm->lost_bytes -= zs_gpu_lost_bytes(&comm->base, &unit->sums);
    zs_mem_release(unit->lost);
    unit->lost = NULL;
}

void zs_gpu_rescale(zs_comm *comm, zs_cunit *cunit, double factor)
{
    const zs_gpu_unit *unit = (const zs_gpu_unit *)cunit;
    if (unit->lost == NULL) return;
    const zs_numbers lost = {unit->lost->ptr, (int64_t)(unit->lost->bytes / sizeof(float)), ZS_F32};
    bool failed = zs_last_status() != ZS_OK;
    (void)zs_device_scale(comm->device, ZS_STREAM_COMPUTE, &lost, factor);
    if (!failed) zs_clear_error();
}
