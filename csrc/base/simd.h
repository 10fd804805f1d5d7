/* simd.h - one hot loop, several instruction sets, the choice made when the program runs.
 *
 * A wheel is built once and runs anywhere, so each hot loop is compiled from the same text for the
 * baseline, for AVX2 and for AVX-512, and the machine picks. (GCC's target_clones cannot do it: its AVX2 clone may not
 * use FMA, and the fused multiply-add is part of the arithmetic, see update.h.)
 */
#ifndef ZS_SIMD_H
#define ZS_SIMD_H

#include <stdbool.h>

/* An instruction set; each includes the ones before. */
typedef enum zs_isa { ZS_ISA_BASE, ZS_ISA_AVX2, ZS_ISA_AVX512, ZS_ISA_COUNT } zs_isa;

/* The best set of this machine; less if the environment variable ZSHARD_ISA names one of base, avx2, avx512 (tests run
 * all of them on one machine), or without it, if torch's ATEN_CPU_CAPABILITY names default or avx2. Read once. */
zs_isa zs_isa_best(void);

#if defined(__x86_64__)
#define ZS_TARGET_BASE
#define ZS_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define ZS_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#else /* one set, under all three names */
#define ZS_TARGET_BASE
#define ZS_TARGET_AVX2
#define ZS_TARGET_AVX512
#endif

/* Does the baseline multiply and add in one rounding? True of arm64, false of x86-64 unless built for a newer one. */
#if defined(__FMA__) || defined(__aarch64__)
#define ZS_BASE_FUSED true
#else
#define ZS_BASE_FUSED false
#endif

/* Defines one loop, given as a macro LOOP(name, target, fused), for each set, and a table `name[zs_isa]` of them. */
#define ZS_FOR_EACH_ISA(LOOP, name, ...)                          \
    LOOP(name##_base, ZS_TARGET_BASE, ZS_BASE_FUSED, __VA_ARGS__) \
    LOOP(name##_avx2, ZS_TARGET_AVX2, true, __VA_ARGS__)          \
    LOOP(name##_avx512, ZS_TARGET_AVX512, true, __VA_ARGS__)

#define ZS_ISA_TABLE(name) {name##_base, name##_avx2, name##_avx512}

#endif
