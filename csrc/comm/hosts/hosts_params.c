/* hosts_params.c - parameters that cross hosts in fewer bytes. See hosts.h.
 *
 * All ranks compute with the decoded values, the rank that encoded them too, so full parameters are the same
 * everywhere. The thread that receives a code decodes it into its place, while the script computes, and
 * only then does the shard count as arrived. */
#include "comm/hosts/hosts.h"
#include "comm/wire_sizes.h"

#include <stdatomic.h>
#include <stdlib.h>

size_t zs_hosts_code_room(const zs_comm *comm, zs_wire wire, zs_dtype dtype, size_t shard_bytes)
{
    return zs_wire_code_bytes(wire, dtype, shard_bytes) * (size_t)(comm->world / comm->per_host);
}

void zs_hosts_encode_shard(const float *shard, size_t bytes, zs_bf16 *out)
{
    ZS_NO_OVERLAP for (size_t i = 0; i < bytes / sizeof *out; i++) out[i] = zs_to_bf16(shard[i]);
}

void zs_hosts_round(float *params, size_t bytes)
{
    for (size_t i = 0; i < bytes / sizeof *params; i++)
        params[i] = zs_from_bf16(zs_to_bf16(params[i]));
}

/* --- arriving ----------------------------------------------------------------------------------------------------- */

typedef struct part {
    zs_hosts_decoding *all;
    const zs_bf16 *code;
    float *place;
} part;

struct zs_hosts_decoding {
    size_t code_bytes;
    zs_hosts_arrival *arrival;
    zs_mem *codes, *full; /* counted references */
    _Atomic int left;
    part parts[]; /* [hosts] */
};

zs_status zs_hosts_decoding_new(zs_hosts_comm *self, size_t code_bytes, zs_mem *codes, zs_target to,
                                zs_hosts_arrival *arrival, zs_hosts_decoding **out)
{
    size_t hosts = (size_t)self->hosts, numel = code_bytes / sizeof(zs_bf16);
    zs_hosts_decoding *made = malloc(sizeof *made + hosts * sizeof(part));
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory all-gathering parameters");
    made->code_bytes = code_bytes;
    made->arrival = arrival;
    made->codes = zs_mem_retain(codes);
    made->full = zs_mem_retain(to.mem);
    atomic_init(&made->left, self->hosts);
    for (int h = 0; h < self->hosts; h++)
        made->parts[h] = (part){made, (const zs_bf16 *)codes->ptr + (size_t)h * numel,
                                (float *)(void *)to.full + (size_t)zs_hosts_rank(self, h, self->lane) * numel};
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
    if (good) zs_hosts_decode(it->code, all->code_bytes, it->place);
    if (atomic_fetch_sub(&all->left, 1) == 1) { /* before the signal: after it, others use the memory */
        zs_mem_release(all->codes);
        zs_mem_release(all->full);
        free(all);
    }
    zs_hosts_arrived(arrival, good);
}
