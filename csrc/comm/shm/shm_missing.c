/* shm_missing.c - see shm.h: reads ranks' published places, and their needs of each other.
 *
 * The answer is a function of shared memory, for any rank: a rank that waits evaluates it for itself; one that has
 * changed something, for sleeping ranks; one that suspects a circle, for all. */
#include "comm/shm/shm.h"
#include "comm/shm/shm_word.h"

zs_shm_moment zs_shm_state_of(const zs_shm *shm, int r)
{
    const zs_shm_control *control = shm->peers[r].control;
    zs_shm_moment moment = {.wait_id = atomic_load(&control->wait_id), .missing = -1};
    uint64_t what = atomic_load(&control->act_what);
    moment.act = (zs_shm_act){.what = (zs_shm_what)(what >> 32 & 0x7fffffff),
                              .record = (uint32_t)what,
                              .number = atomic_load(&control->act_number),
                              .yields = what >> 63 != 0};
    return moment;
}

static uint64_t word_of(const zs_shm *shm, int r, uint32_t record)
{
    return atomic_load(&zs_shm_reader_at(shm, r, record)->word);
}

/* Does rank `r` lag behind rank `who`? Its word is read before its looks, so these are of that version or of a later
 * one. A rank that has reached one more of the script's collectives waits there for `who`: it makes no looks before. */
static bool lags(const zs_shm *shm, int who, int r, uint32_t record)
{
    uint64_t word = word_of(shm, r, record), looks = atomic_load(&zs_shm_reader_at(shm, r, record)->looks);
    uint64_t ours = atomic_load(&zs_shm_reader_at(shm, who, record)->looks);
    bool gone = atomic_load(&shm->peers[r].control->left) != 0;
    if (gone || (uint32_t)ours == 0 || zs_shm_meetings(looks) > zs_shm_meetings(ours)) return false;
    return zs_word_lags(word, word_of(shm, who, record), (uint32_t)looks < (uint32_t)ours);
}

/* Has rank `r` done its part of rank `who`'s `act`? */
static bool done(const zs_shm *shm, int who, int r, zs_shm_act act)
{
    const zs_shm_control *peer = shm->peers[r].control;
    switch (act.what) {
    case ZS_SHM_JOINED: return true;
    case ZS_SHM_POSTED: return atomic_load(&zs_shm_unit_at(shm, r, act.record)->posted) >= act.number;
    case ZS_SHM_SHARED: return atomic_load(&zs_shm_unit_at(shm, r, act.record)->shared) >= act.number;
    case ZS_SHM_RELEASED: return atomic_load(&zs_shm_unit_at(shm, r, act.record)->released) >= act.number;
    case ZS_SHM_EXCHANGED: return atomic_load(&peer->exchanged) >= act.number;
    case ZS_SHM_SENT: return r != (int)act.record || atomic_load(&peer->sent) >= act.number;
    case ZS_SHM_TAKEN: return atomic_load(&peer->taken) >= act.number;
    case ZS_SHM_FORWARD:
    case ZS_SHM_EVALUATION:
    case ZS_SHM_BACKWARD: return zs_word_admits(word_of(shm, r, act.record), word_of(shm, who, act.record));
    case ZS_SHM_LEFT_ALONE: return !zs_word_holds_up(word_of(shm, r, act.record), word_of(shm, who, act.record));
    case ZS_SHM_CAUGHT_UP: return !lags(shm, who, r, act.record);
    case ZS_SHM_UNREAD: return !zs_word_delays_write(word_of(shm, r, act.record), word_of(shm, who, act.record));
    }
    return true;
}

int zs_shm_missing_from(const zs_shm *shm, int who, zs_shm_act act, int from)
{
    int world = shm->base.world;
    for (int i = 0; i < world; i++) {
        int r = from + i < world ? from + i : from + i - world;
        if (r != who && !done(shm, who, r, act)) return r;
    }
    return -1;
}

int zs_shm_missing(const zs_shm *shm, int who, zs_shm_act act)
{
    return zs_shm_missing_from(shm, who, act, 0);
}

bool zs_shm_is_missing(const zs_shm *shm, int r, zs_shm_act act)
{
    return !done(shm, shm->base.rank, r, act);
}
