/* crc32c.c - see crc32c.h.
 *
 * A CRC is a polynomial over bits modulo POLYNOMIAL; the lowest power stands in the highest bit. An instruction that
 * takes eight bytes has its result three cycles later, and can be begun in each: so three sums run side by side over
 * neighbouring stretches, and are joined behind them.
 */
#include "checkpoint/crc32c.h"

#include "base/simd.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CRC_OF_8 _mm_crc32_u64
#define CRC_OF_1 _mm_crc32_u8
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define CRC_OF_8 __crc32cd
#define CRC_OF_1 __crc32cb
#endif

enum { LANES = 8 }; /* bytes that the tables take at once */

static const uint32_t POLYNOMIAL = 0x82F63B78, ONE = 0x80000000;

/* tables[k][b]: the remainder of byte `b` followed by k zero bytes. */
static uint32_t tables[LANES][256];

static uint32_t times_x(uint32_t a)
{
    return (a >> 1) ^ (a & 1 ? POLYNOMIAL : 0);
}

static uint32_t times(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = ONE; bit != 0; bit >>= 1, b = times_x(b))
        if (a & bit) product ^= b;
    return product;
}

/* `crc`, with `bytes` of zeros behind it. */
static uint32_t shifted(uint32_t crc, uint64_t bytes)
{
    uint32_t power = ONE >> 8; /* x^8, its square, the square of that... */
    for (; bytes != 0; bytes >>= 1, power = times(power, power))
        if (bytes & 1) crc = times(power, crc);
    return crc;
}

static void make_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        tables[0][byte] = byte;
        for (int bit = 0; bit < 8; bit++)
            tables[0][byte] = times_x(tables[0][byte]);
    }
    for (int k = 1; k < LANES; k++)
        for (int byte = 0; byte < 256; byte++)
            tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
}

static uint32_t by_tables(uint32_t crc, const unsigned char *at, size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_tables);
    for (; bytes >= LANES; at += LANES, bytes -= LANES) {
        uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
        crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^ tables[4][low >> 24];
        crc ^= tables[3][at[4]] ^ tables[2][at[5]] ^ tables[1][at[6]] ^ tables[0][at[7]];
    }
    for (; bytes > 0; at++, bytes--)
        crc = (crc >> 8) ^ tables[0][(crc ^ *at) & 255];
    return crc;
}

#ifdef CRC_OF_8

/* The length of a stretch, and tables that advance a CRC over that many zero bytes: one for each byte of the CRC,
 * XORed. */
typedef struct stretch {
    size_t bytes;
    uint32_t skipped[4][256];
} stretch;

static stretch stretches[] = {{.bytes = 8192}, {.bytes = 512}}; /* the second for the first one's remainder */

static void make_stretches(void)
{
    for (size_t i = 0; i < sizeof stretches / sizeof *stretches; i++) {
        uint32_t power = shifted(ONE, stretches[i].bytes);
        for (int k = 0; k < 4; k++)
            for (uint32_t byte = 0; byte < 256; byte++)
                stretches[i].skipped[k][byte] = times(power, byte << 8 * k);
    }
}

static uint32_t skip(const stretch *over, uint32_t crc)
{
    return over->skipped[0][crc & 255] ^ over->skipped[1][crc >> 8 & 255] ^ over->skipped[2][crc >> 16 & 255] ^
           over->skipped[3][crc >> 24];
}

static inline uint64_t word_at(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* The next three stretches. (The instruction's type is the wider one on x86.) */
ZS_TARGET_AVX2 static uint32_t three(uint32_t crc, const unsigned char *at, const stretch *each)
{
    uint64_t first = crc, second = 0, third = 0;
    size_t bytes = each->bytes;
    for (const unsigned char *end = at + bytes; at < end; at += 8) {
        first = CRC_OF_8((uint32_t)first, word_at(at));
        second = CRC_OF_8((uint32_t)second, word_at(at + bytes));
        third = CRC_OF_8((uint32_t)third, word_at(at + 2 * bytes));
    }
    return skip(each, skip(each, (uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
}

ZS_TARGET_AVX2 static uint32_t by_instruction(uint32_t crc, const unsigned char *at, size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_stretches);
    for (size_t i = 0; i < sizeof stretches / sizeof *stretches; i++) {
        size_t all = 3 * stretches[i].bytes;
        for (; bytes >= all; at += all, bytes -= all)
            crc = three(crc, at, &stretches[i]);
    }
    for (; bytes >= 8; at += 8, bytes -= 8)
        crc = (uint32_t)CRC_OF_8(crc, word_at(at));
    for (; bytes > 0; at++, bytes--)
        crc = CRC_OF_1(crc, *at);
    return crc;
}

/* Every x86 with AVX2 has the instruction; on ARM it is there if the compiler may use it. */
static bool has_instruction(void)
{
#if defined(__x86_64__)
    return zs_isa_best() >= ZS_ISA_AVX2;
#else
    return true;
#endif
}

uint32_t zs_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    return ~(has_instruction() ? by_instruction(~crc, data, bytes) : by_tables(~crc, data, bytes));
}

#else

uint32_t zs_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    return ~by_tables(~crc, data, bytes);
}

#endif

uint32_t zs_crc32c_join(uint32_t a, uint32_t b, uint64_t bytes_of_b)
{
    return shifted(a, bytes_of_b) ^ b;
}
