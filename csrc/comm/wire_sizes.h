/* wire_sizes.h - what crosses hosts as wire codes (wire_code.c), and how many bytes that takes, on CPUs and GPUs.
 */
#ifndef ZS_WIRE_SIZES_H
#define ZS_WIRE_SIZES_H

#include "base/wire.h"
#include "base/wire_block.h"
#include "comm/comm.h"
#include <stddef.h>
#include <stdint.h>

/* A shard of parameters, as it crosses hosts. */
typedef struct zs_wire_shard {
    zs_wire wire;   /* exact: uncoded, and the other fields are 0 */
    zs_dtype dtype; /* of its numbers */
    int64_t numel;
    size_t bytes, stride; /* of its code; from one code to the next */
} zs_wire_shard;

/* The code of a shard of numbers of `dtype` for `wire`; exact if a code would save nothing. */
zs_wire_shard zs_wire_shard_of(zs_wire wire, zs_dtype dtype, size_t shard_bytes);

/* A unit's sums of gradients for one host, as they cross hosts. */
typedef struct zs_wire_sums {
    zs_wire code;
    size_t bytes;  /* of the sums themselves */
    size_t travel; /* that cross: `bytes`, or those of the code, rounded up */
    size_t room;   /* memory for a host's decoded sums; 0: they are read as they came */
} zs_wire_sums;

/* The memory of a unit's sums. */
zs_wire_sums zs_wire_sums_of(const zs_comm *comm, const zs_cunit_spec *spec);

/* Sets the offset of each flat's sum among them; returns the bytes of all. */
size_t zs_wire_lay_out(const zs_comm *comm, const zs_cunit_spec *spec, size_t at[ZS_MAX_FLATS]);

/* Bytes of what codes have lost of the sums for that many hosts; 0: they are exact. */
size_t zs_wire_lost_bytes(const zs_wire_sums *sums, int hosts);

/* --- wire_code.c -------------------------------------------------------------------------------------------------- */

/* Bytes of the code of `numel` numbers. */
size_t zs_wire_bytes(zs_wire wire, int64_t numel);

/* Encodes `numel` numbers to `out`, at any address. With `residual` [numel], which is 0 at first (NULL: none), it
 * encodes their sums with it, and sets it to what the code loses of these; to 0 for non-finite values, which would
 * stay forever. */
void zs_wire_encode(zs_wire wire, const float *values, int64_t numel, float *residual, void *out);

/* Decodes them. Within a block of int8, the error is at most half of the largest magnitude / 127, plus rounding. */
void zs_wire_decode(zs_wire wire, const void *code, int64_t numel, float *out);

#endif
