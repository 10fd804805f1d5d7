/* secondary.h - secondary shards: a copy of the parameters that stays between steps, sharded over fewer ranks.
 *
 * The optimizer's shards are spread over all ranks; forward and backward gather from a copy that the shard group shares
 * (a host's ranks, or with zero1 each rank alone). The replica group, whose ranks have the same secondary shard, renews
 * it when shards have changed. A rank finds that out by itself: the copy holds what it gave last.
 */
#ifndef ZS_SECONDARY_H
#define ZS_SECONDARY_H

#include "unit/unit.h"

/* Allocates the flat's copy, without values, if its engine keeps one. */
zs_status zs_secondary_new(zs_unit *unit, zs_flat *flat);

/* Renews the copies of those flats whose shard has changed on any rank of the replica group. Collective there; call
 * where no peer reads. A failure invalidates the copies, and the next call renews them. */
zs_status zs_secondary_refresh(zs_comm *replica_group, zs_record *const *records, size_t n);

/* Fills `slot` with the full parameters in their own dtype, where the copy has another. Collective over all ranks. */
zs_status zs_secondary_gather_exact(zs_unit *unit, const zs_flat *flat, zs_mem *slot);

/* Invalidates the unit's copies, after another write than a refresh. */
void zs_secondary_spoil(zs_unit *unit);

#endif
