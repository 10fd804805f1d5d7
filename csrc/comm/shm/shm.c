/* shm.c - see shm.h: whether the transport is usable, and publishing what does not wake peers. */
#include "comm/shm/shm.h"

#include <poll.h>
#include <stdio.h>

bool zs_shm_live(const zs_shm *shm)
{
    return shm->connected && !shm->closed && shm->lifetime == zs_lifetime();
}

zs_status zs_shm_usable(const zs_shm *shm)
{
    /* If a peer has stopped, this rank's last wait has failed, and the peer's memory must not be read. */
    bool may_be_stopped = shm->base.failed || (zs_shm_live(shm) && atomic_load(&shm->own->stopped) != 0);
    if (zs_shm_live(shm)) return may_be_stopped ? zs_shm_check_stop(shm) : ZS_OK;
    if (shm->lifetime != zs_lifetime())
        return ZS_FAIL(ZS_ERR_STATE,
                       "a process forked from rank %d cannot use its process group; start it with 'spawn'",
                       shm->base.rank);
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

/* --- publishing --------------------------------------------------------------------------------------------------- */

void zs_shm_note(zs_shm *shm, zs_shm_act act)
{
    zs_shm_control *own = shm->own;
    atomic_store_explicit(&own->act_what, (uint64_t)act.yields << 63 | (uint64_t)act.what << 32 | act.record,
                          memory_order_release);
    atomic_store_explicit(&own->act_number, act.number, memory_order_release);
}

void zs_shm_publish_text(zs_comm *comm, zs_topic topic, const char *text)
{
    zs_shm *shm = (zs_shm *)comm;
    if (zs_shm_live(shm)) zs_diagnostics_set(&shm->own->texts, topic, text);
}

const char *zs_shm_published_text(const zs_comm *comm, int rank, zs_topic topic)
{
    return zs_diagnostics_on(&((const zs_shm *)comm)->peers[rank].control->texts, topic);
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

/* --- looking ------------------------------------------------------------------------------------------------------ */

void zs_shm_look_at_lives(zs_shm *shm)
{
    for (int r = 0; r < shm->base.world; r++) /* poll skips a negative descriptor */
        shm->polls[r] = (struct pollfd){.fd = shm->peers[r].dead ? -1 : shm->peers[r].pidfd, .events = POLLIN};
    if (poll(shm->polls, (nfds_t)shm->base.world, 0) <= 0) return;
    for (int r = 0; r < shm->base.world; r++)
        if (shm->polls[r].revents & POLLIN) shm->peers[r].dead = true;
}
