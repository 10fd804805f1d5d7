/* coverage_to_libfuzzer.c - preloaded before AddressSanitizer's runtime, for fuzzing under it (tests/lib/sanitized.py).
 *
 * Two libraries have the same names. atheris reports coverage to its libFuzzer by calling functions that gcc's
 * libasan.so has as well, where they do nothing; libasan is loaded first and gets the calls. So this library comes
 * before both and hands them on: without it the fuzzer would be blind, and libFuzzer itself cannot be preloaded, as it
 * needs Python's symbols.
 */
#define _GNU_SOURCE /* dl_iterate_phdr */
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <string.h>

/* libFuzzer's own, from its first call about counters on; NULL before. */
static void (*counters_init)(uint8_t *begin, uint8_t *end);
static void (*pcs_init)(const uintptr_t *begin, const uintptr_t *end);
static void (*trace_cmp8)(uint64_t a, uint64_t b);
static void (*trace_const_cmp8)(uint64_t a, uint64_t b);
static void (*hook_memcmp)(void *caller, const void *a, const void *b, size_t bytes, int result);

/* Is this the library in which atheris has libFuzzer? Then *path is where it lies, and the search ends. */
static int is_libfuzzer(struct dl_phdr_info *info, size_t size, void *path)
{
    (void)size;
    if (strstr(info->dlpi_name, "/core_with_libfuzzer") == NULL) return 0;
    *(const char **)path = info->dlpi_name;
    return 1;
}

/* C has no cast from an object's address to a function's: POSIX says that their bytes are the same. */
static void look_up(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
}

static void find(void)
{
    const char *path = NULL;
    if (counters_init != NULL || dl_iterate_phdr(is_libfuzzer, &path) == 0) return;
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD); /* never closed: nor does Python unload it */
    if (library == NULL) return;
    look_up(library, "__sanitizer_cov_pcs_init", &pcs_init);
    look_up(library, "__sanitizer_cov_trace_cmp8", &trace_cmp8);
    look_up(library, "__sanitizer_cov_trace_const_cmp8", &trace_const_cmp8);
    look_up(library, "__sanitizer_weak_hook_memcmp", &hook_memcmp);
    look_up(library, "__sanitizer_cov_8bit_counters_init", &counters_init);
}

/* --- the names that both have ------------------------------------------------------------------------------------- */

#define HAND_ON(name, parameters, function, arguments) \
    void name parameters;                              \
    void name parameters                               \
    {                                                  \
        if (function != NULL) function arguments;      \
    }

HAND_ON(__sanitizer_cov_pcs_init, (const uintptr_t *begin, const uintptr_t *end), pcs_init, (begin, end))
HAND_ON(__sanitizer_cov_trace_cmp8, (uint64_t a, uint64_t b), trace_cmp8, (a, b))
HAND_ON(__sanitizer_cov_trace_const_cmp8, (uint64_t a, uint64_t b), trace_const_cmp8, (a, b))
HAND_ON(__sanitizer_weak_hook_memcmp, (void *caller, const void *a, const void *b, size_t bytes, int result),
        hook_memcmp, (caller, a, b, bytes, result))

void __sanitizer_cov_8bit_counters_init(uint8_t *begin, uint8_t *end);
void __sanitizer_cov_8bit_counters_init(uint8_t *begin, uint8_t *end)
{
    find();
    if (counters_init != NULL) counters_init(begin, end);
}
