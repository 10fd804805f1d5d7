/* hosts_params.c - parameters that cross hosts in fewer bytes. See hosts.h, wire_code.c.
 *
 * All ranks compute with the decoded values, the rank that encoded them too, so full parameters are the same
 * everywhere. The thread of torch that receives a code decodes it into its place, while the script computes, and
 * only then does the shard count as arrived. */
#include "base/half.h"
#include "comm/hosts/hosts.h"
#include "comm/wire_sizes.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { CHUNK = 16 * ZS_WIRE_BLOCK }; /* numbers at a time, whole blocks, in fp32 on the stack */

size_t zs_hosts_code_room(const zs_comm *comm, zs_wire wire, zs_dtype dtype, size_t shard_bytes)
{
    return zs_wire_shard_of(wire, dtype, shard_bytes).stride * (size_t)(comm->world / comm->per_host);
}

/* --- to codes and back -------------------------------------------------------------------------------------------- */

/* `n` numbers in fp32, at `scratch` unless they already are. */
static const float *widened(zs_dtype dtype, const char *from, int n, float *scratch)
{
    if (dtype == ZS_F32) return (const float *)(const void *)from;
    const uint16_t *halves = (const uint16_t *)(const void *)from;
    for (int i = 0; i < n && dtype == ZS_BF16; i++)
        scratch[i] = zs_from_bf16(halves[i]);
    for (int i = 0; i < n && dtype == ZS_F16; i++)
        scratch[i] = zs_from_f16(halves[i]);
    return scratch;
}

static void narrow(zs_dtype dtype, const float *values, int n, char *to)
{
    uint16_t *halves = (uint16_t *)(void *)to;
    for (int i = 0; i < n && dtype == ZS_BF16; i++)
        halves[i] = zs_to_bf16(values[i]);
    for (int i = 0; i < n && dtype == ZS_F16; i++)
        halves[i] = zs_to_f16(values[i]);
}

static int chunk_at(const zs_wire_shard *code, int64_t at)
{
    return (int)(code->numel - at < CHUNK ? code->numel - at : CHUNK);
}

static void encode_chunk(const zs_wire_shard *code, const char *from, int n, char *out)
{
    float scratch[CHUNK];
    zs_wire_encode(code->wire, widened(code->dtype, from, n, scratch), n, NULL, out);
}

static void decode_chunk(const zs_wire_shard *code, const char *from, int n, char *to)
{
    float scratch[CHUNK];
    if (code->dtype == ZS_F32) {
        zs_wire_decode(code->wire, from, n, (float *)(void *)to);
        return;
    }
    zs_wire_decode(code->wire, from, n, scratch);
    narrow(code->dtype, scratch, n, to);
}

void zs_hosts_encode_shard(const zs_wire_shard *code, const char *shard, char *out)
{
    size_t size = zs_dtype_size(code->dtype);
    for (int64_t at = 0; at < code->numel; at += CHUNK)
        encode_chunk(code, shard + (size_t)at * size, chunk_at(code, at), out + zs_wire_bytes(code->wire, at));
}

static void decode_shard(const zs_wire_shard *code, const char *from, char *shard)
{
    size_t size = zs_dtype_size(code->dtype);
    for (int64_t at = 0; at < code->numel; at += CHUNK)
        decode_chunk(code, from + zs_wire_bytes(code->wire, at), chunk_at(code, at), shard + (size_t)at * size);
}

void zs_hosts_round_shard(const zs_wire_shard *code, char *shard)
{
    char codes[CHUNK * sizeof(zs_bf16)];
    size_t size = zs_dtype_size(code->dtype);
    for (int64_t at = 0; at < code->numel; at += CHUNK) {
        encode_chunk(code, shard + (size_t)at * size, chunk_at(code, at), codes);
        decode_chunk(code, codes, chunk_at(code, at), shard + (size_t)at * size);
    }
}

/* --- arriving ----------------------------------------------------------------------------------------------------- */

typedef struct part {
    zs_hosts_decoding *all;
    const char *code;
    char *place;
} part;

struct zs_hosts_decoding {
    zs_wire_shard code;
    zs_hosts_arrival *arrival;
    zs_mem *codes, *full; /* counted references */
    _Atomic int left;
    part parts[]; /* [hosts] */
};

zs_status zs_hosts_decoding_new(zs_hosts_comm *self, const zs_wire_shard *code, zs_mem *codes, zs_target to,
                                zs_hosts_arrival *arrival, zs_hosts_decoding **out)
{
    size_t hosts = (size_t)self->hosts, shard_bytes = (size_t)code->numel * zs_dtype_size(code->dtype);
    zs_hosts_decoding *made = malloc(sizeof *made + hosts * sizeof(part));
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory all-gathering parameters");
    made->code = *code;
    made->arrival = arrival;
    made->codes = zs_mem_retain(codes);
    made->full = zs_mem_retain(to.mem);
    atomic_init(&made->left, self->hosts);
    for (int h = 0; h < self->hosts; h++)
        made->parts[h] = (part){made, (const char *)codes->ptr + (size_t)h * code->stride,
                                to.full + (size_t)zs_hosts_rank(self, h, self->lane) * shard_bytes};
    *out = made;
    return ZS_OK;
}

void *zs_hosts_decoding_part(zs_hosts_decoding *decoding, int host)
{
    return &decoding->parts[host];
}

void zs_hosts_code_arrived(void *arg, bool good)
{
    part *it = arg;
    zs_hosts_decoding *all = it->all;
    zs_hosts_arrival *arrival = all->arrival;
    if (good) decode_shard(&all->code, it->code, it->place);
    if (atomic_fetch_sub(&all->left, 1) == 1) { /* before the signal: after it, others use the memory */
        zs_mem_release(all->codes);
        zs_mem_release(all->full);
        free(all);
    }
    zs_hosts_arrived(arrival, good);
}
