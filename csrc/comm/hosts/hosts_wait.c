/* hosts_wait.c - waits for a rank's collectives with its counterparts, and reports failures to the host's ranks. See
 * hosts.h.
 *
 * If one rank of a host is unusable, the others need not wait for their deadline. */
#include "comm/hosts/hosts.h"

zs_group *zs_hosts_across(zs_hosts_comm *self, int host)
{
    zs_group *group = self->across[host % 2];
    zs_group_set_timeout(group, self->c10d.base.timeout);
    return group;
}

zs_status zs_hosts_pass(zs_hosts_comm *self, zs_status status)
{
    const char *lost = self->c10d.base.lost;
    if (status != ZS_OK && lost != NULL) zs_hosts_break_off(self, lost);
    return status;
}

void zs_hosts_leave(zs_hosts_comm *self, zs_work **works, size_t n, zs_mem *memory)
{
    for (size_t i = 0; i < n; i++) {
        if (works[i] != NULL) zs_c10d_leave_behind(&self->c10d, works[i], memory);
        works[i] = NULL;
    }
}

zs_status zs_hosts_finish(zs_hosts_comm *self, const zs_turn *turn, zs_work **works, size_t n, zs_mem *memory)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; i < n && status == ZS_OK; i++) {
        zs_work *work = works[i];
        works[i] = NULL;
        if (work != NULL) status = zs_c10d_finish(&self->c10d, turn, work, memory);
    }
    if (status != ZS_OK) zs_hosts_leave(self, works, n, memory);
    return status;
}
