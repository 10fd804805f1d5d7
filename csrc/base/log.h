/* log.h - the core's records for Python's logger "zshard" (zshard/_logger.py).
 *
 * Any thread leaves records in a ring, without Python; a thread that holds the GIL anyway takes them. When the ring
 * is full, the oldest record makes room. At the first level, ZS_LOG_OFF, no record and no text is made.
 */
#ifndef ZS_LOG_H
#define ZS_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ZS_LOG_DEBUG = 10, ZS_LOG_INFO = 20, ZS_LOG_OFF = 100 }; /* levels; those of Python's logging */

enum { ZS_LOG_TEXT = 512, ZS_LOG_RECORDS = 4096 }; /* bytes of a text with its 0; records in the ring */

typedef struct zs_log_record {
    int64_t time; /* of day, in nanoseconds */
    int level;
    int32_t thread; /* zs_own_thread() */
    char text[ZS_LOG_TEXT];
} zs_log_record;

/* The number that the kernel gives this thread. */
int32_t zs_own_thread(void);

/* Records from this level on are kept. */
void zs_log_set_level(int level);

/* Is a record of this level kept? */
bool zs_log_keeps(int level);

/* Leaves a record, if its level is kept. printf-style; a long text is truncated. Does not allocate. */
void zs_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Is there a record to take? */
bool zs_log_waits(void);

/* Takes the oldest record; false: there is none. *lost: how many older ones had no room. */
bool zs_log_take(zs_log_record *record, size_t *lost);

/* In a forked child: records nothing from now on, and drops what the parent has left. Call it while no other thread
 * runs. */
void zs_log_forget(void);

#endif
