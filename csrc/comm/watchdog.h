/* watchdog.h - a thread that looks after things ten times a second, while nobody of the program does.
 *
 * The one idea: a GPU that waits for a peer can not look whether that peer lives, and the host that waits for the GPU is in
 * code that is not ours (loss.item()). So one thread of the process looks, and makes the GPU's wait end where it has to.
 */
#ifndef ZS_WATCHDOG_H
#define ZS_WATCHDOG_H

#include "base/status.h"

/* Something that is looked after: part of a struct that outlives its place in the list. */
typedef struct zs_watchdog {
    void (*look)(
        struct zs_watchdog *); /* by the thread, which takes signals for none of its own; no add or remove within */
    void (*end)(struct zs_watchdog *, const char *why); /* zs_watchdog_end has been called; NULL: nothing to do */
    struct zs_watchdog *next;
} zs_watchdog;

/* Has the thread look after `one`, and starts it for the first. ZS_ERR_STATE in a process that was forked from one where it
 * runs. */
zs_status zs_watchdog_add(zs_watchdog *one);

/* It looks no more when this returns; with the last one it ends. Unknown ones are allowed. Not with a lock held that `look`
 * takes. */
void zs_watchdog_remove(zs_watchdog *one);

/* Calls `end` of all. */
void zs_watchdog_end(const char *why);

/* Seconds on the monotonic clock. */
double zs_watchdog_now(void);

#endif
