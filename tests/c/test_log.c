/* test_log.c - the log's records (base/log.h). */
#include "base/log.h"
#include "one_test.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static void nothing_is_recorded_when_off(void)
{
    zs_log_record record;
    size_t lost;
    zs_log(ZS_LOG_INFO, "a");
    CHECK(!zs_log_waits() && !zs_log_take(&record, &lost));
    zs_log_set_level(ZS_LOG_INFO);
    zs_log(ZS_LOG_DEBUG, "b");
    CHECK(!zs_log_waits() && zs_log_keeps(ZS_LOG_INFO) && !zs_log_keeps(ZS_LOG_DEBUG));
    zs_log(ZS_LOG_INFO, "c %d", 7);
    CHECK(zs_log_take(&record, &lost) && lost == 0);
    CHECK(strcmp(record.text, "c 7") == 0 && record.level == ZS_LOG_INFO && record.time > 0 && record.thread > 0);
    CHECK(!zs_log_take(&record, &lost));
}

static void oldest_make_room_and_are_counted(void)
{
    zs_log_record record;
    size_t lost;
    zs_log_set_level(ZS_LOG_DEBUG);
    for (int i = 0; i < ZS_LOG_RECORDS + 10; i++)
        zs_log(ZS_LOG_DEBUG, "%d", i);
    for (int i = 10; i < ZS_LOG_RECORDS + 10; i++) {
        CHECK(zs_log_take(&record, &lost) && lost == (i == 10 ? 10 : 0));
        CHECK(atoi(record.text) == i);
    }
    CHECK(!zs_log_waits());
}

static void long_texts_are_cut(void)
{
    zs_log_record record;
    size_t lost;
    zs_log_set_level(ZS_LOG_INFO);
    zs_log(ZS_LOG_INFO, "%*d", 2 * ZS_LOG_TEXT, 1);
    CHECK(zs_log_take(&record, &lost) && strlen(record.text) == ZS_LOG_TEXT - 1);
}

enum { WRITERS = 2, EACH = 50000 };

static void *write_many(void *writer)
{
    for (int i = 1; i <= EACH; i++)
        zs_log(ZS_LOG_INFO, "%d %d %d", *(int *)writer, i, -i);
    return NULL;
}

static size_t take(int *last)
{
    zs_log_record record;
    size_t lost, n = 0;
    while (zs_log_take(&record, &lost)) {
        int writer, i, same;
        CHECK(sscanf(record.text, "%d %d %d", &writer, &i, &same) == 3 && i == -same && i > last[writer]);
        last[writer] = i;
        n += 1 + lost;
    }
    return n;
}

/* While they are taken, records of a thread stay whole and in order, and each is taken or counted. */
static void threads_write_at_once(void)
{
    pthread_t threads[WRITERS];
    int numbers[WRITERS] = {0, 1}, last[WRITERS] = {0};
    size_t n = 0;
    zs_log_set_level(ZS_LOG_INFO);
    for (int i = 0; i < WRITERS; i++)
        CHECK(pthread_create(&threads[i], NULL, write_many, &numbers[i]) == 0);
    for (int i = 0; i < 1000; i++)
        n += take(last);
    for (int i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
    n += take(last);
    CHECK(n == WRITERS * EACH);
}

static void child_has_none_of_its_parents(void)
{
    zs_log_set_level(ZS_LOG_INFO);
    zs_log(ZS_LOG_INFO, "a");
    zs_log_forget();
    CHECK(!zs_log_waits() && !zs_log_keeps(ZS_LOG_INFO));
}

static const one_test tests[] = {
    TEST(nothing_is_recorded_when_off), TEST(oldest_make_room_and_are_counted), TEST(long_texts_are_cut),
    TEST(threads_write_at_once),        TEST(child_has_none_of_its_parents),
};

int main(int argc, char **argv)
{
    return run_one_test(tests, COUNT(tests), argc, argv);
}
