/* shm_place.c - see shm_place.h. */
#include "comm/shm/shm_place.h"

#include <stdio.h>

enum { SHOWN = 4 }; /* ranks whose places fit in one message */

void zs_shm_publish_place(zs_shm *shm)
{
    if (!zs_shm_live(shm)) return;
    uint64_t wait_id = atomic_load(&shm->own->wait_id);
    zs_script_place(shm->own->place, sizeof shm->own->place);
    atomic_store(&shm->own->placed, wait_id + 1);
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
