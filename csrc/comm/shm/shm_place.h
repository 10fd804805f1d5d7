/* shm_place.h - where the ranks' scripts are, as they tell each other.
 *
 * A place goes with a number, that of the wait in which its rank was then. So a place is known to be of the present,
 * and a rank that waits can be asked for it: each tells its own once a wait lasts, and a thread of Python's, of
 * whichever rank is asked while its script is elsewhere (ranks/script_position.py).
 */
#ifndef ZS_SHM_PLACE_H
#define ZS_SHM_PLACE_H

#include "comm/shm/shm.h"

/* Tells where this thread's script is. */
void zs_shm_tell_own_place(zs_shm *shm);

/* tell_place and is_asked, as comm_ops.h has them. */
void zs_shm_tell_place(zs_comm *comm, const char *text);
bool zs_shm_is_asked(zs_comm *comm);

/* Asks all ranks. */
void zs_shm_ask_places(zs_shm *shm);

/* Has rank `r` told its place in the wait that it is in, or since the last one? */
bool zs_shm_has_place(const zs_shm *shm, int r);

/* What is known, as "; rank 0 is in save() at train.py:40 (main); rank 1 is ...", with this thread's own; "" if
 * nothing is. */
void zs_shm_list_places(const zs_shm *shm, char *text, size_t size);

#endif
