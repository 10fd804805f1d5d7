/* crc32c.c - see crc32c.h.
 *
 * A CRC is a polynomial over bits modulo POLYNOMIAL; the lowest power stands in the highest bit.
 */
#include "crc32c.h"

#include <pthread.h>

enum { LANES = 8 }; /* bytes that the tables take at once */

static const uint32_t POLYNOMIAL = 0x82F63B78, ONE = 0x80000000;

/* tables[k][b]: what byte `b` with k bytes of zeros behind it comes to. */
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

uint32_t zs_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    return ~by_tables(~crc, data, bytes);
}

uint32_t zs_crc32c_join(uint32_t a, uint32_t b, uint64_t bytes_of_b)
{
    return shifted(a, bytes_of_b) ^ b;
}
