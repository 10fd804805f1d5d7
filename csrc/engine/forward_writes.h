/* forward_writes.h - scripts that write to a unit's shards within a forward, as MoCo's momentum update and SwAV's
 * normalized prototypes do.
 *
 * Peers may read this rank's shards in place. Two barriers separate reads of the old values from reads of the new
 * ones: one before the first write, and one before the unit is gathered again or the forward ends. Where no peer maps
 * the shards, the gathers themselves keep the order.
 */
#ifndef ZS_FORWARD_WRITES_H
#define ZS_FORWARD_WRITES_H

#include "engine/engine.h"

/* A script is about to write to the unit's shards. No-op outside a forward of its model. Collective the first time.
 * ZS_ERR_STATE in join(), and in a forward without gradients if peers map the shards, since one rank may run it
 * alone. */
zs_status zs_forward_write_begin(zs_unit *unit);

/* The unit is about to be gathered. Collective if it has been written to in this forward, otherwise a no-op. */
zs_status zs_forward_write_settle(zs_unit *unit);

/* The forward ends: settles all of its model's units. */
zs_status zs_forward_writes_end(zs_engine *engine);

#endif
