/* hosts_coded.c - sums of gradients that cross hosts in fewer bytes. See hosts.h, wire_code.h.
 *
 * All hosts decode the same bytes, a host its own too, so ranks that sum the same shard have the same sum. What a
 * code loses of one round's sums is added to those of the next for the same host, so over many rounds nothing is
 * lost. */
#include "comm/hosts/hosts.h"
#include "comm/hosts/wire_code.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Double precision crosses uncoded: it was not chosen to save bytes. */
static zs_wire code_of(const zs_cunit_spec *spec)
{
    for (int f = 0; f < spec->n_flats; f++)
        if (zs_dtype_of_partial_sum(spec->wire[f]) != ZS_F32) return ZS_WIRE_EXACT;
    return spec->code;
}

zs_dtype zs_hosts_sum_dtype(const zs_comm *comm, const zs_cunit_spec *spec, zs_dtype wire)
{
    bool summed = comm->per_host > 1 || code_of(spec) != ZS_WIRE_EXACT;
    return summed ? zs_dtype_of_partial_sum(wire) : wire;
}

zs_hosts_sums zs_hosts_sums_of(const zs_comm *comm, const zs_cunit_spec *spec)
{
    zs_hosts_sums sums = {.code = code_of(spec)};
    for (int f = 0; f < spec->n_flats; f++) {
        size_t numel = spec->shard_bytes[f] / zs_dtype_size(spec->wire[f]);
        sums.bytes += numel * zs_dtype_size(zs_hosts_sum_dtype(comm, spec, spec->wire[f]));
    }
    sums.travel = sums.bytes;
    if (sums.code == ZS_WIRE_EXACT) return sums;
    sums.travel = zs_round_up(zs_wire_bytes(sums.code, (int64_t)(sums.bytes / sizeof(float))), 64);
    sums.room = sums.bytes;
    return sums;
}

size_t zs_hosts_residual_bytes(const zs_hosts_sums *sums, int hosts)
{
    return sums->room * (size_t)hosts;
}

zs_status zs_hosts_residual_new(zs_hosts_comm *self, zs_hosts_sums *sums)
{
    size_t bytes = zs_hosts_residual_bytes(sums, self->hosts);
    if (bytes == 0) return ZS_OK;
    sums->lost = calloc(1, bytes);
    if (sums->lost == NULL)
        return ZS_FAIL(ZS_ERR_MEMORY,
                       "out of memory allocating %zu bytes for the error feedback of wire=; leave out wire=", bytes);
    self->lost_bytes += bytes;
    return ZS_OK;
}

void zs_hosts_residual_free(zs_hosts_comm *self, zs_hosts_sums *sums)
{
    if (sums->lost == NULL) return;
    self->lost_bytes -= zs_hosts_residual_bytes(sums, self->hosts);
    free(sums->lost);
    sums->lost = NULL;
}

void zs_hosts_residual_drop(const zs_hosts_comm *self, const zs_hosts_sums *sums)
{
    if (sums->lost != NULL) memset(sums->lost, 0, zs_hosts_residual_bytes(sums, self->hosts));
}

void zs_hosts_residual_scale(const zs_hosts_comm *self, const zs_hosts_sums *sums, double factor)
{
    size_t n = sums->lost != NULL ? zs_hosts_residual_bytes(sums, self->hosts) / sizeof(float) : 0;
    for (size_t i = 0; i < n; i++) {
        float lost = (float)(sums->lost[i] * factor);
        sums->lost[i] = isfinite(lost) ? lost : 0;
    }
}

void zs_hosts_encode(const zs_hosts_sums *sums, int h, const float *values, void *out)
{
    int64_t numel = (int64_t)(sums->bytes / sizeof *values);
    char *end = (char *)out + sums->travel, *code_end = (char *)out + zs_wire_bytes(sums->code, numel);
    zs_wire_encode(sums->code, values, numel, sums->lost + h * numel, out);
    memset(code_end, 0, (size_t)(end - code_end));
}

void zs_hosts_decode(const zs_hosts_sums *sums, const void *piece, float *out)
{
    zs_wire_decode(sums->code, piece, (int64_t)(sums->bytes / sizeof *out), out);
}
