/* shm_place.c - see shm_place.h. */
#include "comm/shm/shm_place.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { SHOWN = 4 }; /* ranks whose places fit in one message */

/* Maximum age of a line, in nanoseconds; and time to wait for the others, in seconds. */
static const int64_t fresh = 3000000000;
static const double patience = 1.0;

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

/* --- lines -------------------------------------------------------------------------------------------------------- */

static bool is_fresh(const zs_shm_control *control)
{
    int64_t at = atomic_load(&control->where_at);
    return at != 0 && zs_clock_ns() - at < fresh;
}

static void publish(zs_shm_control *own, const char *text)
{
    if (atomic_exchange(&own->answering, true)) return; /* another thread answers */
    atomic_store(&own->where_at, 0);
    snprintf(own->where, sizeof own->where, "%s", text);
    atomic_store(&own->where_at, zs_clock_ns());
    atomic_store(&own->answering, false);
}

bool zs_shm_asked(const zs_comm *comm)
{
    const zs_shm *shm = (const zs_shm *)comm;
    return zs_shm_live(shm) && atomic_load(&shm->own->asked) != 0;
}

void zs_shm_answer_with(zs_comm *comm, const char *text)
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm)) return;
    if (!is_fresh(shm->own)) publish(shm->own, text);
    atomic_store(&shm->own->asked, 0);
}

void zs_shm_answer(zs_shm *shm)
{
    char text[ZS_WHERE] = "";
    if (atomic_load(&shm->own->asked) == 0) return;
    if (!is_fresh(shm->own)) zs_script_look(text, sizeof text);
    zs_shm_answer_with(&shm->base, text);
}

void zs_shm_ask(zs_shm *shm)
{
    for (int r = 0; r < shm->base.world; r++)
        if (r != shm->base.rank && !is_fresh(shm->peers[r].control)) atomic_store(&shm->peers[r].control->asked, 1);
    zs_shm_wake_all(shm); /* waiting ranks answer themselves */
}

/* False: none that is current. */
static bool read_line(const zs_shm_control *control, char *text)
{
    int64_t at = atomic_load(&control->where_at);
    if (!is_fresh(control)) return false;
    memcpy(text, control->where, ZS_WHERE);
    text[ZS_WHERE - 1] = 0;
    return atomic_load(&control->where_at) == at;
}

bool zs_shm_read_lines(zs_shm *shm, char (*texts)[ZS_WHERE])
{
    bool all = true;
    zs_shm_look_at_lives(shm);
    for (int r = 0; r < shm->base.world; r++) {
        if (read_line(shm->peers[r].control, texts[r])) continue;
        bool gone = shm->peers[r].dead || atomic_load(&shm->peers[r].control->left) != 0;
        snprintf(texts[r], ZS_WHERE, "%s", gone ? "exited" : "");
        all = all && gone;
    }
    return all;
}

bool zs_shm_locate(zs_comm *comm, char (*texts)[ZS_WHERE])
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm)) return false;
    zs_script_look(texts[comm->rank], ZS_WHERE);
    if (texts[comm->rank][0] == 0) return false;
    publish(shm->own, texts[comm->rank]);
    zs_shm_ask(shm);
    for (double end = zs_clock() + patience; !zs_shm_read_lines(shm, texts) && zs_clock() < end;) {
        zs_shm_answer(shm);
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    return true;
}
