/* optim_lanes.c - AdamW's step with 8-bit moments in vectors, see compact_lanes.h: what AVX2 and AVX-512 have other
 * instructions for, and the choice between them.
 */
#include "base/simd.h"
#include "optim/optim.h"
#include "update/compact.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* Elements that a step prefetches ahead: without it, a step over main memory takes a quarter longer. */
enum { ZS_AHEAD = 1024 };

/* Each instruction set defines these, as far as its instructions differ. from_...: loads a vector, widened to 32 bits.
 * upper, lower: the upper or lower 16 bits of each word of two vectors. store_8, store_16: write that many bits of each
 * short of a group. halves: a in the first half of the lanes, b in the second. largest: lane i is the largest word of
 * vector i. */

/* --- AVX-512 ------------------------------------------------------------------------------------------------------ */

#define LANES 16
#define LANED(name) name##_512
#define LANED_FN ZS_TARGET_AVX512 static inline __attribute__((always_inline))

typedef uint32_t words_512 __attribute__((vector_size(64)));
typedef uint16_t shorts_512 __attribute__((vector_size(64)));
typedef float floats_512 __attribute__((vector_size(64)));

LANED_FN words_512 counted_512(void)
{
    return (words_512){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}
LANED_FN floats_512 from_32_512(const float *from)
{
    return (floats_512)_mm512_loadu_ps(from);
}
LANED_FN void to_32_512(float *to, floats_512 values)
{
    _mm512_storeu_ps(to, (__m512)values);
}
LANED_FN words_512 from_i8_512(const int8_t *from)
{
    return (words_512)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
}
LANED_FN words_512 from_u8_512(const uint8_t *from)
{
    return (words_512)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}
LANED_FN words_512 from_16_512(const uint16_t *from)
{
    return (words_512)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}
/* The lower halves, or the upper: every second short of a and b. */
LANED_FN shorts_512 second_shorts_512(words_512 a, words_512 b, uint16_t from)
{
    const shorts_512 even = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                             32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    return (shorts_512)_mm512_permutex2var_epi16((__m512i)a, (__m512i)(even + from), (__m512i)b);
}
LANED_FN shorts_512 lower_512(words_512 a, words_512 b)
{
    return second_shorts_512(a, b, 0);
}
LANED_FN shorts_512 upper_512(words_512 a, words_512 b)
{
    return second_shorts_512(a, b, 1);
}
LANED_FN void store_8_512(void *to, const shorts_512 *packed)
{
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi16_epi8((__m512i)packed[0]));
}
LANED_FN void store_16_512(void *to, const shorts_512 *packed)
{
    _mm512_storeu_si512(to, (__m512i)packed[0]);
}
LANED_FN words_512 max_512(words_512 a, words_512 b)
{
    return (words_512)_mm512_max_epu32((__m512i)a, (__m512i)b);
}
LANED_FN shorts_512 max_short_512(shorts_512 a, shorts_512 b)
{
    return (shorts_512)_mm512_max_epu16((__m512i)a, (__m512i)b);
}
LANED_FN floats_512 sqrt_512(floats_512 values)
{
    return (floats_512)_mm512_sqrt_ps((__m512)values);
}
LANED_FN floats_512 halves_512(float a, float b)
{
    return (floats_512){a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
}
LANED_FN bool any_nan_512(const floats_512 *group)
{
    return _mm512_cmp_ps_mask((__m512)group[0], (__m512)group[1], _CMP_UNORD_Q) != 0;
}
LANED_FN words_512 largest_512(words_512 *vectors)
{
    const __m512i even = (__m512i)(counted_512() * 2), odd = (__m512i)(counted_512() * 2 + 1);
    for (int n = LANES / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; i++) {
            const __m512i a = (__m512i)vectors[2 * i], b = (__m512i)vectors[2 * i + 1];
            vectors[i] = max_512((words_512)_mm512_permutex2var_epi32(a, even, b),
                                 (words_512)_mm512_permutex2var_epi32(a, odd, b));
        }
    }
    return vectors[0];
}
#include "optim/compact_lanes.h"

/* --- AVX2 --------------------------------------------------------------------------------------------------------- */

#define LANES 8
#define LANED(name) name##_256
#define LANED_FN ZS_TARGET_AVX2 static inline __attribute__((always_inline))

typedef uint32_t words_256 __attribute__((vector_size(32)));
typedef uint16_t shorts_256 __attribute__((vector_size(32)));
typedef float floats_256 __attribute__((vector_size(32)));

LANED_FN words_256 counted_256(void)
{
    return (words_256){0, 1, 2, 3, 4, 5, 6, 7};
}
LANED_FN floats_256 from_32_256(const float *from)
{
    return (floats_256)_mm256_loadu_ps(from);
}
LANED_FN void to_32_256(float *to, floats_256 values)
{
    _mm256_storeu_ps(to, (__m256)values);
}
LANED_FN words_256 from_i8_256(const int8_t *from)
{
    return (words_256)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
LANED_FN words_256 from_u8_256(const uint8_t *from)
{
    return (words_256)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
LANED_FN words_256 from_16_256(const uint16_t *from)
{
    return (words_256)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}
/* By halves of 128 bits: a's, b's, a's, b's four. The stores put them in order. */
LANED_FN shorts_256 lower_256(words_256 a, words_256 b)
{
    return (shorts_256)_mm256_packus_epi32((__m256i)(a & 0xffffu), (__m256i)(b & 0xffffu));
}
LANED_FN shorts_256 upper_256(words_256 a, words_256 b)
{
    return (shorts_256)_mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));
}
LANED_FN void store_8_256(void *to, const shorts_256 *packed)
{
    const __m256i bytes = _mm256_packus_epi16((__m256i)packed[0], (__m256i)packed[1]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(bytes, order));
}
LANED_FN void store_16_256(void *to, const shorts_256 *packed)
{
    for (int i = 0; i < 2; i++)
        _mm256_storeu_si256((__m256i *)to + i, _mm256_permute4x64_epi64((__m256i)packed[i], 0xd8));
}
LANED_FN words_256 max_256(words_256 a, words_256 b)
{
    return (words_256)_mm256_max_epu32((__m256i)a, (__m256i)b);
}
LANED_FN shorts_256 max_short_256(shorts_256 a, shorts_256 b)
{
    return (shorts_256)_mm256_max_epu16((__m256i)a, (__m256i)b);
}
LANED_FN floats_256 sqrt_256(floats_256 values)
{
    return (floats_256)_mm256_sqrt_ps((__m256)values);
}
LANED_FN floats_256 halves_256(float a, float b)
{
    return (floats_256){a, a, a, a, b, b, b, b};
}
LANED_FN bool any_nan_256(const floats_256 *group)
{
    const __m256 first = _mm256_cmp_ps((__m256)group[0], (__m256)group[1], _CMP_UNORD_Q);
    const __m256 second = _mm256_cmp_ps((__m256)group[2], (__m256)group[3], _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(first, second)) != 0;
}
LANED_FN words_256 largest_256(words_256 *vectors)
{
    for (int n = LANES / 2; n > 1; n /= 2) {
        for (int i = 0; i < n; i++) {
            const __m256 a = (__m256)vectors[2 * i], b = (__m256)vectors[2 * i + 1];
            vectors[i] = max_256((words_256)_mm256_shuffle_ps(a, b, 0x88), (words_256)_mm256_shuffle_ps(a, b, 0xdd));
        }
    }
    const __m256i a = (__m256i)vectors[0], b = (__m256i)vectors[1];
    return max_256((words_256)_mm256_permute2x128_si256(a, b, 0x20), (words_256)_mm256_permute2x128_si256(a, b, 0x31));
}
#include "optim/compact_lanes.h"

/* --- the choice --------------------------------------------------------------------------------------------------- */

#define STEP_BLOCKS(name, isa, target, kind)                                  \
    target static int64_t name(const zs_run *run, int64_t begin, int64_t end) \
    {                                                                         \
        return blocks_##isa(run, begin, end, kind);                           \
    }
STEP_BLOCKS(f32_avx512, 512, ZS_TARGET_AVX512, ZS_IN_F32)
STEP_BLOCKS(bf16_avx512, 512, ZS_TARGET_AVX512, ZS_IN_BF16)
STEP_BLOCKS(low_avx512, 512, ZS_TARGET_AVX512, ZS_IN_BF16_LOW)
STEP_BLOCKS(f32_avx2, 256, ZS_TARGET_AVX2, ZS_IN_F32)
STEP_BLOCKS(bf16_avx2, 256, ZS_TARGET_AVX2, ZS_IN_BF16)
STEP_BLOCKS(low_avx2, 256, ZS_TARGET_AVX2, ZS_IN_BF16_LOW)

int64_t zs_adam_blocks(const zs_run *run, int64_t begin, int64_t end)
{
    typedef int64_t step_blocks(const zs_run *run, int64_t begin, int64_t end);
    static step_blocks *const by_kind[][ZS_ISA_COUNT] = {
        {NULL, f32_avx2, f32_avx512}, {NULL, bf16_avx2, bf16_avx512}, {NULL, low_avx2, low_avx512}};
    step_blocks *const step = by_kind[zs_compact_kind(run)][zs_isa_best()];
    return step == NULL ? begin : step(run, begin, end);
}
#else
int64_t zs_adam_blocks(const zs_run *run, int64_t begin, int64_t end)
{
    (void)run, (void)end;
    return begin;
}
#endif
