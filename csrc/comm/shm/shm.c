/* shm.c - see shm.h: telling the peers, looking at what they tell, and what is still missing of them.
 *
 * Nothing here waits. Sleeping and waking are described in shm_wait.c.
 */
#define _GNU_SOURCE 1 /* syscall */
#include "comm/shm/shm.h"

#include "comm/shm/shm_word.h"

#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

bool zs_shm_live(const zs_shm *shm)
{
    return shm->connected && !shm->closed && shm->lifetime == zs_lifetime();
}

zs_status zs_shm_usable(const zs_shm *shm)
{
    if (zs_shm_live(shm)) return atomic_load(&shm->own->stopped) == 0 ? ZS_OK : zs_shm_check_stop(shm);
    if (shm->lifetime != zs_lifetime())
        return ZS_FAIL(ZS_ERR_STATE, "a process forked from rank %d cannot use its process group", shm->base.rank);
    return ZS_FAIL(ZS_ERR_STATE, "rank %d: the shm transport is %s", shm->base.rank,
                   shm->closed ? "closed" : "not connected");
}

zs_status zs_shm_record(zs_shm *shm, size_t bytes, const char *name, uint32_t *record)
{
    ZS_TRY(zs_shm_usable(shm));
    size_t need = zs_round_up(bytes, ZS_SHM_LINE);
    if (need > ZS_SHM_HEAP - shm->heap_used)
        return ZS_FAIL(
            ZS_ERR_MEMORY,
            "no space for '%s': the models made so far in this process group use all %d MiB for unit records; "
            "create a new process group, or pass transport='c10d'",
            name, (int)(ZS_SHM_HEAP >> 20));
    *record = (uint32_t)shm->heap_used;
    shm->heap_used += need;
    snprintf(shm->own->heap + *record, ZS_SHM_NAME, "%s", name);
    return ZS_OK;
}

/* --- telling --------------------------------------------------------------------------------------------------------------- */

void zs_shm_wake(zs_shm *shm)
{
    for (int r = 0; r < shm->base.world; r++) {
        zs_shm_control *peer = shm->peers[r].control;
        if (r == shm->base.rank || atomic_load(&peer->asleep) == 0) continue;
        atomic_fetch_add(&peer->wake, 1);
        syscall(SYS_futex, &peer->wake, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

void zs_shm_set(zs_shm *shm, _Atomic uint64_t *word, uint64_t value)
{
    atomic_store(word, value);
    zs_shm_wake(shm);
}

void zs_shm_note(zs_shm *shm, zs_shm_act act)
{
    zs_shm_control *own = shm->own;
    atomic_store_explicit(&own->act_what, (uint64_t)act.yields << 63 | (uint64_t)act.what << 32 | act.record,
                          memory_order_relaxed);
    atomic_store_explicit(&own->act_number, act.number, memory_order_relaxed);
}

void zs_shm_tell(zs_comm *comm, zs_topic topic, const char *text)
{
    zs_shm *shm = (zs_shm *)comm;
    if (zs_shm_live(shm)) zs_words_set(&shm->own->words, topic, text);
}

const char *zs_shm_said(const zs_comm *comm, int rank, zs_topic topic)
{
    return zs_words_on(&((const zs_shm *)comm)->peers[rank].control->words, topic);
}

zs_status zs_shm_check_stop(const zs_shm *shm)
{
    for (int r = 0; r < shm->base.world; r++) {
        const zs_shm_control *peer = shm->peers[r].control;
        uint32_t status = atomic_load(&peer->stopped);
        if (status == 0) continue;
        return ZS_FAIL(status <= ZS_ERR_TORCH ? (zs_status)status : ZS_ERR_PEER, "rank %d (pid %d) failed: %.*s", r,
                       (int)shm->peers[r].pid, ZS_SHM_TEXT, peer->stop_text);
    }
    return ZS_OK;
}

void zs_shm_stop(zs_shm *shm, zs_status status, const char *reason)
{
    zs_shm_control *own = shm->own;
    if (atomic_load(&own->stopped) != 0) return;
    snprintf(own->stop_text, sizeof own->stop_text, "%s", reason);
    atomic_store(&own->stopped, (uint32_t)status);
    zs_shm_wake(shm);
}

/* --- looking ------------------------------------------------------------------------------------------------------------- */

zs_shm_moment zs_shm_look_at(const zs_shm *shm, int r)
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

/* --- what is missing ---------------------------------------------------------------------------------------------------- */

/* Has rank `r` done what rank `who` needs for `act`? */
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
    case ZS_SHM_BACKWARD:
        return zs_word_admits(atomic_load(&zs_shm_reader_at(shm, r, act.record)->word),
                              atomic_load(&zs_shm_reader_at(shm, who, act.record)->word));
    case ZS_SHM_LEFT_ALONE:
        return !zs_word_holds_up(atomic_load(&zs_shm_reader_at(shm, r, act.record)->word),
                                 atomic_load(&zs_shm_reader_at(shm, who, act.record)->word));
    case ZS_SHM_UNREAD:
        return !zs_word_delays_write(atomic_load(&zs_shm_reader_at(shm, r, act.record)->word),
                                     atomic_load(&zs_shm_reader_at(shm, who, act.record)->word));
    }
    return true;
}

int zs_shm_missing(const zs_shm *shm, int who, zs_shm_act act)
{
    for (int r = 0; r < shm->base.world; r++)
        if (r != who && !done(shm, who, r, act)) return r;
    return -1;
}

bool zs_shm_is_missing(const zs_shm *shm, int r, zs_shm_act act)
{
    return !done(shm, shm->base.rank, r, act);
}
