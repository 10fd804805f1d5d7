/* hosts_coded.c - sums of gradients that cross hosts in fewer bytes. See hosts.h.
 *
 * All hosts decode the same bytes, also a host its own, so ranks that sum the same shard have the same sum. A code's
 * error in one round is added to the next round's sums for the same host, so over many rounds nothing is lost. */
#include "comm/hosts/hosts.h"
#include "comm/wire_sizes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

zs_status zs_hosts_lost_new(zs_hosts_comm *self, const zs_wire_sums *sums, float **lost)
{
    size_t bytes = zs_wire_lost_bytes(sums, self->hosts);
    *lost = NULL;
    if (bytes == 0) return ZS_OK;
    *lost = calloc(1, bytes);
    if (*lost == NULL)
        return ZS_FAIL(ZS_ERR_MEMORY,
                       "out of memory allocating %zu bytes for the error feedback of wire=; leave out wire=", bytes);
    self->lost_bytes += bytes;
    return ZS_OK;
}

void zs_hosts_lost_free(zs_hosts_comm *self, const zs_wire_sums *sums, float *lost)
{
    if (lost == NULL) return;
    self->lost_bytes -= zs_wire_lost_bytes(sums, self->hosts);
    free(lost);
}

void zs_hosts_lost_drop(const zs_hosts_comm *self, const zs_wire_sums *sums, float *lost)
{
    if (lost != NULL) memset(lost, 0, zs_wire_lost_bytes(sums, self->hosts));
}

void zs_hosts_lost_scale(const zs_hosts_comm *self, const zs_wire_sums *sums, float *lost, double factor)
{
    size_t n = lost != NULL ? zs_wire_lost_bytes(sums, self->hosts) / sizeof *lost : 0;
    for (size_t i = 0; i < n; i++) {
        float scaled = (float)(lost[i] * factor);
        lost[i] = isfinite(scaled) ? scaled : 0;
    }
}

void zs_hosts_encode(const zs_wire_sums *sums, float *lost, const float *values, zs_bf16 *out)
{
    size_t numel = sums->bytes / sizeof *values;
    ZS_NO_OVERLAP for (size_t i = 0; i < numel; i++) out[i] = zs_wire_encode(values[i], &lost[i]);
}

void zs_hosts_decode(const zs_bf16 *code, size_t bytes, float *out)
{
    ZS_NO_OVERLAP for (size_t i = 0; i < bytes / sizeof *code; i++) out[i] = zs_from_bf16(code[i]);
}
