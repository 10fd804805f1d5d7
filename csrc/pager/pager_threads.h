/* pager_threads.h - the pager's one state, and the two threads that move ranges from state to state.
 *
 * One lock over everything, held only to read and to move ranges; and one condition for every change, as there are few
 * who wait. Callers hold the lock.
 */
#ifndef ZS_PAGER_THREADS_H
#define ZS_PAGER_THREADS_H

#include "pager/pager_ranges.h"

#include <pthread.h>

typedef struct zs_pager_state {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* any state */
    zs_pager_tables tables;
    zs_pager_list queue; /* QUEUED, in the order in which they are fetched */
    zs_pager_list idle;  /* IDLE, those first that may go first */
    size_t limit, resident;
    size_t mapped;         /* bytes of all mappings */
    int windows;           /* in which ranges are lent */
    int n_lent, n_at_work; /* lent ranges that are not COLD; of these, ranges in use */
    int n_unsent;          /* and ranges with writes queued or under way */
    int write_errno;       /* of a write that has failed; the data are lost */
    unsigned lifetime;
    bool running;
} zs_pager_state;

extern zs_pager_state zs_pager;

/* Queues the fetch of a COLD range, before all others if `urgent`. */
void zs_pager_enqueue(zs_pager_range *r, bool urgent);

/* Forgets a range's contents and frees its buffer. The range is in no list, and no thread works on it. */
void zs_pager_make_cold(zs_pager_range *r);

/* Starts the threads if they are not running; ZS_ERR_SYSTEM. */
zs_status zs_pager_start_threads(void);

#endif
