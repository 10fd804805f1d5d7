/* shm_place.h - places of the ranks' scripts, for messages: the calls that they are in, and their lines.
 *
 * A rank publishes its call once a wait takes long, with the number of that wait: so others know that it is current.
 * Its line it publishes only when a peer asks, or before it fails: from within a wait at once, and from elsewhere by a
 * thread of Python's (ranks/stalls.py). A line that is a few seconds old still counts: of ranks that have diverged, the
 * first to notice may be elsewhere when the last one asks. */
#ifndef ZS_SHM_PLACE_H
#define ZS_SHM_PLACE_H

#include "comm/shm/shm.h"

/* Publishes the call that this thread is in. */
void zs_shm_publish_place(zs_shm *shm);

/* Has rank `r` published its place in its current wait, or since the last one? */
bool zs_shm_has_place(const zs_shm *shm, int r);

/* The known places, as "; rank 0 is in save(); rank 1 is ...", with this thread's own; "" if none. */
void zs_shm_list_places(const zs_shm *shm, char *text, size_t size);

/* --- lines -------------------------------------------------------------------------------------------------------- */

/* Asks all peers, and does not wait. */
void zs_shm_ask(zs_shm *shm);

/* Answers with this thread's line, if a peer has asked. */
void zs_shm_answer(zs_shm *shm);

/* The lines that are known now, texts [world]; true: those of all that live. */
bool zs_shm_read_lines(zs_shm *shm, char (*texts)[ZS_WHERE]);

/* locate, asked and answer. */
bool zs_shm_locate(zs_comm *comm, char (*texts)[ZS_WHERE]);
bool zs_shm_asked(const zs_comm *comm);
void zs_shm_answer_with(zs_comm *comm, const char *text);

#endif
