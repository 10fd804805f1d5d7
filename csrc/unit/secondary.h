/* secondary.h - a second copy of the parameters that stays between steps, within fewer ranks.
 *
 * Slices lie over all ranks, for the optimizer's sake; forward and backward gather from a copy that only the shard
 * group shares (a host's ranks, or with zero1 each rank for itself). It is renewed by the replica group, which has the
 * same part of it, when slices have changed. Nobody has to say that they have: what a rank gave last lies in the copy,
 * and is compared.
 */
#ifndef ZS_SECONDARY_H
#define ZS_SECONDARY_H

#include "unit/unit.h"

/* Makes the flat's copy, of no values yet, if its engine keeps one. */
zs_status zs_secondary_new(zs_unit *unit, zs_flat *flat);

/* Renews the copies of those flats of which a slice has changed on any rank of the replica group. Collective there;
 * call where no peer reads. On failure the copies are as good as none, and the next call renews them. */
zs_status zs_secondary_refresh(zs_comm *replica_group, zs_record *const *records, size_t n);

/* Fills `slot` with the whole parameters in their own dtype, where the copy is of another. Collective over all
 * ranks. */
zs_status zs_secondary_gather_exact(zs_unit *unit, const zs_flat *flat, zs_mem *slot);

/* Forgets the unit's copies: something else than a refresh has written to them. */
void zs_secondary_spoil(zs_unit *unit);

#endif
