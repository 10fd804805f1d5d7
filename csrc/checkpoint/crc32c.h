/* crc32c.h - the checksum of a checkpoint's blocks: CRC-32C (Castagnoli), as in RFC 3720, ext4 and SSE4.2.
 *
 * A CRC is linear. The sum of two pieces follows from theirs and the second one's length, so ranks that write parts
 * of a block need not see each other's bytes, and one core can run several sums at a time over one piece and join them.
 */
#ifndef ZS_CRC32C_H
#define ZS_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The CRC of a piece whose CRC is `crc` (0: of nothing), followed by `bytes` of `data`. */
uint32_t zs_crc32c(uint32_t crc, const void *data, size_t bytes);

/* The CRC of A and B, one after the other, from those of A and of B, which has `bytes_of_b`. */
uint32_t zs_crc32c_join(uint32_t a, uint32_t b, uint64_t bytes_of_b);

#endif
