/* one_test.h - checks, and test programs that run one test per process, `program NAME`.
 *
 * A check that fails ends the process, and a crash is the failure of that test alone.
 */
#ifndef ZS_ONE_TEST_H
#define ZS_ONE_TEST_H

#include "base/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                                           \
    do {                                                                                                           \
        if (!(condition)) {                                                                                        \
            fprintf(stderr, "%s:%d: %s\n    last error: %s\n", __FILE__, __LINE__, #condition, zs_last_message()); \
            _exit(1);                                                                                              \
        }                                                                                                          \
    } while (0)

#define OK(call) CHECK((call) == ZS_OK)

/* The call fails with `kind`, and the message has `part`. */
#define FAILS(call, kind, part)                                                                   \
    do {                                                                                          \
        zs_clear_error();                                                                         \
        CHECK((call) == (kind));                                                                  \
        if (strstr(zs_last_message(), (part)) == NULL) fprintf(stderr, "expected: %s\n", (part)); \
        CHECK(strstr(zs_last_message(), (part)) != NULL);                                         \
        zs_clear_error();                                                                         \
    } while (0)

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* One line of a list of tests: TEST(function), TEST(function, .least = 2). */
#define TEST(function, ...) {.name = #function, .body = (function), __VA_ARGS__}

typedef struct one_test {
    const char *name;
    void (*body)(void);
} one_test;

/* Runs the test that the command line names; the program's exit status. */
static inline int run_one_test(const one_test *tests, size_t n, int argc, char **argv)
{
    for (size_t i = 0; argc == 2 && i < n; i++) {
        if (strcmp(tests[i].name, argv[1]) != 0) continue;
        tests[i].body();
        printf("%s: ok\n", argv[1]);
        return 0;
    }
    fprintf(stderr, "usage: %s NAME, with a test's name\n", argv[0]);
    return 2;
}

#endif
