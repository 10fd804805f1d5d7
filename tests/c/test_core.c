/* test_core.c - the parts of the core that need neither ranks nor torch: status, memory, arena, layout.
 *
 * One process runs one test, `test_core NAME`, so that a crash is the failure of that test alone;
 * tests/core/test_c_core.py reads the names from the list at the end and builds this file with and without sanitizers.
 */
#define _GNU_SOURCE 1
#include "base/layout.h"
#include "base/memory.h"
#include "base/status.h"
#include "device/arena.h"
#include "one_test.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* No allocation of this size succeeds, and none overflows when it is rounded up. */
static const size_t too_large = (size_t)1 << 60;

/* --- status ------------------------------------------------------------------------------------------------------- */

static void first_failure_wins(void)
{
    CHECK(ZS_FAIL(ZS_ERR_PEER, "the cause") == ZS_ERR_PEER);
    CHECK(ZS_FAIL(ZS_ERR_STATE, "what came of it") == ZS_ERR_STATE); /* each caller gets its own kind */
    errno = ENOENT;
    CHECK(ZS_FAIL_ERRNO("open") == ZS_ERR_SYSTEM);
    CHECK(zs_last_status() == ZS_ERR_PEER && zs_last_errno() == 0);
    CHECK(strcmp(zs_last_message(), "the cause") == 0);
}

static void long_messages_are_cut(void)
{
    char *name = malloc(100000);
    CHECK(name != NULL);
    memset(name, 'x', 99999);
    name[99999] = '\0';
    CHECK(zs_fail(ZS_ERR_VALUE, "parameter '%s'", name) == ZS_ERR_VALUE);
    size_t length = strlen(zs_last_message());
    CHECK(length > 500 && length < 5000 && strncmp(zs_last_message(), "parameter 'xxx", 14) == 0);
    free(name);
}

static void *fail_on_other_thread(void *unused)
{
    (void)unused;
    CHECK(zs_last_status() == ZS_OK && strcmp(zs_last_message(), "") == 0);
    CHECK(ZS_FAIL(ZS_ERR_TORCH, "of the other thread") == ZS_ERR_TORCH);
    return NULL;
}

static void records_are_per_thread(void)
{
    CHECK(ZS_FAIL(ZS_ERR_VALUE, "of the main thread") == ZS_ERR_VALUE);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fail_on_other_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(strcmp(zs_last_message(), "of the main thread") == 0);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static void private_memory_is_zero_and_aligned(void)
{
    const size_t sizes[] = {0, 1, 63, 4096, 4097, 5 << 20}; /* the last is over the size of a huge page */
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        zs_mem *mem = NULL;
        OK(zs_mem_new_private(sizes[i], &mem));
        CHECK(mem->bytes >= sizes[i] && mem->bytes > 0 && mem->refs == 1);
        CHECK((uintptr_t)mem->ptr % 64 == 0);
        CHECK(mem->role == ZS_MEM_PLAIN && mem->user == NULL);
        unsigned char *bytes = mem->ptr;
        for (size_t at = 0; at < mem->bytes; at++)
            CHECK(bytes[at] == 0);
        memset(bytes, 0xff, mem->bytes);
        zs_mem_release(mem);
    }
}

static void impossible_allocations_are_errors(void)
{
    zs_mem *mem = NULL;
    CHECK(zs_mem_new_private(too_large, &mem) == ZS_ERR_MEMORY);
    CHECK(mem == NULL && strstr(zs_last_message(), "cannot map") != NULL);
}

static int destroyed;

static void count_destroy(zs_mem *mem)
{
    CHECK(mem->owner == &destroyed && mem->refs == 0);
    destroyed++;
}

static void *retain_and_release(void *mem)
{
    for (int i = 0; i < 20000; i++)
        zs_mem_release(zs_mem_retain(mem));
    zs_mem_release(mem);
    return NULL;
}

static void references_count_on_many_threads(void)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    zs_mem *mem = NULL;
    OK(zs_mem_wrap(&destroyed, 0, count_destroy, &destroyed, &mem));
    for (int t = 0; t < THREADS; t++)
        CHECK(pthread_create(&threads[t], NULL, retain_and_release, zs_mem_retain(mem)) == 0);
    for (int t = 0; t < THREADS; t++)
        CHECK(pthread_join(threads[t], NULL) == 0);
    CHECK(destroyed == 0 && mem->refs == 1);
    zs_mem_release(mem);
    CHECK(destroyed == 1);
}

/* --- arena -------------------------------------------------------------------------------------------------------- */

static void smallest_fitting_slot_is_used(void)
{
    static const size_t sizes[] = {3 << 20, 1 << 20, 2 << 20, 4 << 20};
    zs_arena *arena = NULL;
    zs_mem *slots[4], *slot = NULL;
    OK(zs_arena_new(zs_device_cpu(), &arena));
    for (int i = 0; i < 4; i++)
        OK(zs_arena_take(arena, sizes[i], &slots[i]));
    for (int i = 0; i < 4; i++)
        zs_arena_give(arena, slots[i]);
    OK(zs_arena_take(arena, (1 << 20) + 1, &slot));
    CHECK(slot == slots[2]);
    zs_arena_give(arena, slot);
    OK(zs_arena_take(arena, (1 << 20) + 1, &slot));
    CHECK(slot == slots[2]);
    OK(zs_arena_take(arena, (1 << 20) + 1, &slot)); /* that one is lent: the next larger one */
    CHECK(slot == slots[0]);
    OK(zs_arena_take(arena, 1, &slot));
    CHECK(slot == slots[1]);
    OK(zs_arena_take(arena, 4 << 20, &slot));
    size_t before = zs_arena_bytes(arena);
    OK(zs_arena_take(arena, 5 << 20, &slot)); /* none is free */
    CHECK(zs_arena_bytes(arena) == before + slot->bytes);
    zs_arena_free(arena);
}

static void small_free_slot_is_replaced(void)
{
    zs_arena *arena = NULL;
    zs_mem *small = NULL, *middle = NULL, *large = NULL;
    OK(zs_arena_new(zs_device_cpu(), &arena));
    OK(zs_arena_take(arena, 1000, &small));
    OK(zs_arena_take(arena, 2000, &middle));
    zs_arena_give(arena, small);
    zs_arena_give(arena, middle);
    OK(zs_arena_take(arena, 3000, &large)); /* in place of the larger one */
    CHECK(zs_arena_bytes(arena) == 4000);
    CHECK(zs_arena_take(arena, too_large, &middle) == ZS_ERR_MEMORY);
    CHECK(zs_arena_bytes(arena) == 4000); /* what cannot be replaced stays */
    OK(zs_arena_take(arena, 1000, &middle));
    CHECK(middle == small);
    zs_arena_free(arena);
}

static void used_slot_outlives_the_arena(void)
{
    zs_arena *arena = NULL;
    zs_mem *slot = NULL;
    OK(zs_arena_new(zs_device_cpu(), &arena));
    OK(zs_arena_take(arena, 4096, &slot));
    zs_mem_retain(slot);
    zs_arena_free(arena);
    memset(slot->ptr, 1, slot->bytes);
    CHECK(slot->refs == 1);
    zs_mem_release(slot);
    zs_arena_free(NULL);
}

/* --- layout (tests/core/test_c_core.py has its properties) -------------------------------------------------------- */

static void refuse(const int64_t *numels, int64_t n, size_t itemsize, int world, const char *part)
{
    zs_layout layout;
    zs_clear_error();
    CHECK(zs_layout_new(numels, n, itemsize, world, 64, &layout) == ZS_ERR_VALUE);
    CHECK(strstr(zs_last_message(), part) != NULL);
    CHECK(layout.offsets == NULL && layout.numels == NULL); /* nothing is left to free */
}

static void invalid_layouts_are_refused(void)
{
    const int64_t huge[] = {INT64_MAX}, many[] = {INT64_MAX / 16 / 2, INT64_MAX / 16 / 2, INT64_MAX / 16 / 2};
    const int64_t negative[] = {4, -1}, one[] = {1};
    refuse(huge, 1, 1, 2, "too large");
    refuse(huge, 1, 4, 2, "9223372036854775807 elements");
    refuse(many, 3, 4, 2, "too large"); /* only together */
    refuse(negative, 2, 4, 2, "-1 elements");
    refuse(one, 1, 4, 0, "world size 0");
    refuse(one, 1, 0, 2, "0 bytes");
    refuse(one, 1, 3, 2, "3 bytes"); /* does not divide the alignment */
    refuse(one, 1, 128, 2, "128 bytes");
}

/* --- the list ----------------------------------------------------------------------------------------------------- */

static const one_test tests[] = {
    TEST(first_failure_wins),
    TEST(long_messages_are_cut),
    TEST(records_are_per_thread),
    TEST(private_memory_is_zero_and_aligned),
    TEST(impossible_allocations_are_errors),
    TEST(references_count_on_many_threads),
    TEST(smallest_fitting_slot_is_used),
    TEST(small_free_slot_is_replaced),
    TEST(used_slot_outlives_the_arena),
    TEST(invalid_layouts_are_refused),
};

int main(int argc, char **argv)
{
    return run_one_test(tests, COUNT(tests), argc, argv);
}
