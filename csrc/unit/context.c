/* context.c - see context.h. */
#include "unit/context.h"

size_t zs_ranks_list(const zs_ranks *ranks, zs_comm *each[ZS_RANKS])
{
    zs_comm *all[ZS_RANKS] = {ranks->all, ranks->shard_group, ranks->shards, ranks->replica_group};
    size_t n = 0;
    for (size_t i = 0; i < ZS_RANKS; i++) {
        bool known = all[i] == NULL;
        for (size_t k = 0; k < n; k++)
            known |= each[k] == all[i];
        if (!known) each[n++] = all[i];
    }
    return n;
}

bool zs_context_captured(zs_context *context)
{
    bool capturing = false;
    if (zs_device_capturing(zs_context_device(context), &capturing) != ZS_OK) zs_clear_error();
    context->captured |= capturing;
    return context->captured;
}
