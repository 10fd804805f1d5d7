/* simd.c - see simd.h. */
#include "simd.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static zs_isa isa_of_machine(void)
{
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx2 && avx512) return ZS_ISA_AVX512;
    if (avx2) return ZS_ISA_AVX2;
#endif
    return ZS_ISA_BASE;
}

static zs_isa isa_allowed(void)
{
    static const char *const names[ZS_ISA_COUNT] = {"base", "avx2", "avx512"};
    const char *wanted = getenv("ZSHARD_ISA");
    zs_isa best = isa_of_machine();
    for (int i = 0; wanted != NULL && i < (int)best; i++) {
        if (strcmp(wanted, names[i]) == 0) return (zs_isa)i;
    }
    return best;
}

zs_isa zs_isa_best(void)
{
    static _Atomic int known = -1;
    int isa = atomic_load_explicit(&known, memory_order_relaxed);
    if (isa < 0) { /* two threads may both ask; they find the same */
        isa = (int)isa_allowed();
        atomic_store_explicit(&known, isa, memory_order_relaxed);
    }
    return (zs_isa)isa;
}
