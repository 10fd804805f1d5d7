/* wire_code.h - numbers in fewer bytes, to cross hosts: bfloat16, or int8 in blocks that share a scale.
 *
 * A code depends on the numbers alone, and all machines agree on its bits (base/wire_block.h). Non-finite values stay
 * visible: with int8 their block decodes as NaN.
 *
 *   int8:  the scale of block 0 | of block 1 | ... | all numbers, a byte each; the last block may be shorter
 */
#ifndef ZS_WIRE_CODE_H
#define ZS_WIRE_CODE_H

#include "base/wire.h"
#include "base/wire_block.h"

#include <stddef.h>
#include <stdint.h>

/* Bytes of the code of `numel` numbers. */
size_t zs_wire_bytes(zs_wire wire, int64_t numel);

/* Encodes `numel` numbers to `out`, at any address. With `residual` [numel], which is 0 at first (NULL: none), it
 * encodes their sums with it, and sets it to what the code loses of these; to 0 for non-finite values, which would
 * stay forever. */
void zs_wire_encode(zs_wire wire, const float *values, int64_t numel, float *residual, void *out);

/* Decodes them. Within a block of int8, the error is at most half of the largest magnitude / 127, plus rounding. */
void zs_wire_decode(zs_wire wire, const void *code, int64_t numel, float *out);

#endif
