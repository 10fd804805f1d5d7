/* wire_sizes.c - see wire_sizes.h. */
#include "comm/wire_sizes.h"

size_t zs_wire_code_bytes(zs_wire wire, zs_dtype dtype, size_t shard_bytes)
{
    return wire == ZS_WIRE_BF16 && dtype == ZS_F32 ? shard_bytes / 2 : 0;
}

/* Double precision crosses uncoded: it was not chosen to save bytes. */
static zs_wire code_of(const zs_cunit_spec *spec)
{
    for (int f = 0; f < spec->n_flats; f++)
        if (zs_dtype_of_partial_sum(spec->wire[f]) != ZS_F32) return ZS_WIRE_EXACT;
    return spec->code;
}

size_t zs_wire_lay_out(const zs_comm *comm, const zs_cunit_spec *spec, size_t at[ZS_MAX_FLATS])
{
    const bool summed = comm->per_host > 1 || code_of(spec) != ZS_WIRE_EXACT;
    size_t end = 0;
    for (int f = 0; f < spec->n_flats; f++) {
        const zs_dtype dtype = summed ? zs_dtype_of_partial_sum(spec->wire[f]) : spec->wire[f];
        at[f] = end;
        end += spec->shard_bytes[f] / zs_dtype_size(spec->wire[f]) * zs_dtype_size(dtype);
    }
    return end;
}

zs_wire_sums zs_wire_sums_of(const zs_comm *comm, const zs_cunit_spec *spec)
{
    size_t at[ZS_MAX_FLATS];
    zs_wire_sums sums = {.code = code_of(spec), .bytes = zs_wire_lay_out(comm, spec, at)};
    sums.travel = sums.bytes;
    if (sums.code == ZS_WIRE_EXACT) return sums;
    sums.travel = sums.bytes / 2;
    sums.room = sums.bytes;
    return sums;
}

size_t zs_wire_lost_bytes(const zs_wire_sums *sums, int hosts)
{
    return sums->room * (size_t)hosts;
}
