/* shm_place.c - see shm_place.h. */
#include "comm/shm/shm_place.h"

#include <stdio.h>

enum { SHOWN = 4 }; /* places of so many ranks in one message */

void zs_shm_tell_place(zs_comm *comm, const char *text)
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm) || atomic_exchange(&shm->placing, true)) return; /* its other thread is at it */
    uint64_t wait_id = atomic_load(&shm->own->wait_id);
    snprintf(shm->own->place, sizeof shm->own->place, "%s", text);
    atomic_store(&shm->own->placed, wait_id + 1);
    atomic_store(&shm->placing, false);
}

void zs_shm_tell_own_place(zs_shm *shm)
{
    char text[ZS_PLACE];
    zs_script_place(text, sizeof text);
    zs_shm_tell_place(&shm->base, text);
}

void zs_shm_ask_places(zs_shm *shm)
{
    atomic_fetch_add(&shm->own->asked, 1);
}

bool zs_shm_is_asked(zs_comm *comm)
{
    zs_shm *shm = (zs_shm *)comm;
    uint64_t questions = 0;
    if (!zs_shm_live(shm)) return false;
    for (int r = 0; r < comm->world; r++)
        questions += atomic_load(&shm->peers[r].control->asked);
    bool is_new = questions != shm->answered;
    shm->answered = questions;
    return is_new;
}

bool zs_shm_has_place(const zs_shm *shm, int r)
{
    const zs_shm_control *control = shm->peers[r].control;
    return atomic_load(&control->placed) == atomic_load(&control->wait_id) + 1;
}

void zs_shm_list_places(const zs_shm *shm, char *text, size_t size)
{
    size_t length = 0;
    text[0] = 0;
    for (int r = 0, shown = 0; r < shm->base.world && shown < SHOWN && length < size; r++) {
        char place[ZS_PLACE] = "";
        if (r == shm->base.rank)
            zs_script_place(place, sizeof place);
        else if (zs_shm_has_place(shm, r))
            snprintf(place, sizeof place, "%.*s", ZS_PLACE - 1, shm->peers[r].control->place);
        if (place[0] == 0) continue;
        length += (size_t)snprintf(text + length, size - length, "; rank %d is %s", r, place);
        shown++;
    }
}
