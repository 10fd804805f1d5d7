/* wire_sizes.h - the flats that cross hosts as bfloat16 (base/wire.h), and their bytes, on CPUs and GPUs.
 */
#ifndef ZS_WIRE_SIZES_H
#define ZS_WIRE_SIZES_H

#include "base/wire.h"
#include "comm/comm.h"
#include <stddef.h>
#include <stdint.h>

/* Bytes of the code of a shard of parameters of `dtype`; 0: it crosses as it is, as a code would save nothing. */
size_t zs_wire_code_bytes(zs_wire wire, zs_dtype dtype, size_t shard_bytes);

/* A unit's sums of gradients for one host, as they cross hosts. */
typedef struct zs_wire_sums {
    zs_wire code;
    size_t bytes;  /* of the sums themselves */
    size_t travel; /* that cross */
    size_t room;   /* memory for a host's decoded sums; 0: they are read as they came */
} zs_wire_sums;

/* The memory of a unit's sums. */
zs_wire_sums zs_wire_sums_of(const zs_comm *comm, const zs_cunit_spec *spec);

/* Sets the offset of each flat's sum among them; returns the bytes of all. */
size_t zs_wire_lay_out(const zs_comm *comm, const zs_cunit_spec *spec, size_t at[ZS_MAX_FLATS]);

/* Bytes of the codes' errors in the sums for that many hosts; 0: they are exact. */
size_t zs_wire_lost_bytes(const zs_wire_sums *sums, int hosts);

#endif
