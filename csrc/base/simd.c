/* simd.c - see simd.h. */
#include "base/simd.h"

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

/* `best`, limited to the instruction set that a variable names, if that is a smaller one. */
static zs_isa limited(const char *variable, const char *const names[ZS_ISA_COUNT], zs_isa best)
{
    const char *wanted = getenv(variable);
    for (int i = 0; wanted != NULL && i < (int)best; i++) {
        if (strcmp(wanted, names[i]) == 0) return (zs_isa)i;
    }
    return best;
}

/* torch's own variable counts too: a script that compares with torch.optim then compares the same arithmetic. */
static zs_isa isa_allowed(void)
{
    static const char *const ours[ZS_ISA_COUNT] = {"base", "avx2", "avx512"};
    static const char *const torchs[ZS_ISA_COUNT] = {"default", "avx2", "avx512"};
    if (getenv("ZSHARD_ISA") != NULL) return limited("ZSHARD_ISA", ours, isa_of_machine());
    return limited("ATEN_CPU_CAPABILITY", torchs, isa_of_machine());
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
