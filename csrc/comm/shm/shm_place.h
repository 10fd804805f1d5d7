/* shm_place.h - the calls that the ranks' scripts are in, for messages.
 *
 * A rank publishes its call once a wait takes long, with the number of that wait: so others know that it is current. */
#ifndef ZS_SHM_PLACE_H
#define ZS_SHM_PLACE_H

#include "comm/shm/shm.h"

/* Publishes the call that this thread is in. */
void zs_shm_publish_place(zs_shm *shm);

/* Has rank `r` published its place in its current wait, or since the last one? */
bool zs_shm_has_place(const zs_shm *shm, int r);

/* The known places, as "; rank 0 is in save(); rank 1 is ...", with this thread's own; "" if none. */
void zs_shm_list_places(const zs_shm *shm, char *text, size_t size);

#endif
