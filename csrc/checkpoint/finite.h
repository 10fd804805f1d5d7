/* finite.h - are all numbers in memory finite?
 *
 * Of a number that is NaN or infinite all bits of the exponent are set, whatever the format, so nothing is computed:
 * bits are compared, which no sum can overflow and no mode of the processor changes.
 */
#ifndef ZS_FINITE_H
#define ZS_FINITE_H

#include <stdbool.h>
#include <stddef.h>

/* A format of numbers. ZS_NO_FLOATS: nothing is asked of the bytes. */
typedef enum zs_floats { ZS_NO_FLOATS, ZS_BFLOAT16S, ZS_FLOAT16S, ZS_FLOAT32S, ZS_FLOAT64S } zs_floats;

/* The format that safetensors calls `code`, such as "F32"; ZS_NO_FLOATS for any other. */
zs_floats zs_floats_of(const char *code);

/* Bytes of one number; 1 for ZS_NO_FLOATS. */
size_t zs_floats_size(zs_floats kind);

/* Is none of the numbers in `bytes` of `data` NaN or infinite? `bytes` is a multiple of a number's size; `data` may
 * lie anywhere. */
bool zs_all_finite(zs_floats kind, const void *data, size_t bytes);

#endif
