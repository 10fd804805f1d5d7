/* offload.h - which parts of a model lie on a disk: a model's settings, and what its units make of them.
 *
 * Settings say which kinds of memory go to the disk, and for what share of the model; each unit is told once,
 * when it is made, and from then on its memory is what it is. Nothing else in the core asks where memory lies.
 */
#ifndef ZS_OFFLOAD_H
#define ZS_OFFLOAD_H

#include "unit/disk.h"
#include "unit/unit.h"

/* A model's settings. */
typedef struct zs_offload {
    bool on;       /* is anything offloaded? */
    zs_disk *disk; /* counted reference; NULL in dry runs (zs_unit_spec) */
    bool params, grads, state;
    double fraction;     /* of the bytes of parameters: the units that have them are offloaded */
    double seen, chosen; /* bytes of the units so far, and of those that were offloaded */
} zs_offload;

/* Sets where the parts of `what` go for units that are made from now on: to files in `directory`. For all ranks
 * together; fails as zs_disk_new does. `directory` "": the memory of a GPU's host. NULL: in dry runs, which have no
 * memory. Of `what`, the kinds and the fraction are read. */
zs_status zs_offload_set(zs_context *context, const char *directory, const zs_offload *what);

/* Decides for a new unit with `bytes` of parameters, evenly over the model; all ranks decide alike. */
void zs_offload_choose(zs_offload *offload, zs_unit *unit, size_t bytes);

/* Gives back what zs_offload_choose gave. */
void zs_offload_forget(zs_unit *unit);

/* Memory for a flat's shard, where the unit's parameters lie; `shards` is its transport. */
zs_status zs_offload_flat_new(const zs_unit *unit, zs_comm *shards, size_t shard_bytes, zs_flat_mem *out);

/* Memory of this rank's own: for parameters (replicated units), or for gradients, where these lie. */
zs_status zs_offload_params_new(const zs_unit *unit, size_t bytes, zs_mem **out);
zs_status zs_offload_grads_new(const zs_unit *unit, size_t bytes, zs_mem **out);

/* A new tensor of `numel` zeros on the disk where the state of the unit's optimizer goes; of `like`'s dtype. Only where
 * unit->offloads.state. */
zs_status zs_offload_state_new(const zs_unit *unit, int64_t numel, const zs_tensor *like, zs_tensor **out);

/* --- what is in use: no-ops for units whose parameters are in memory ---------------------------------------------- */

/* The bytes that the flat is gathered from, or mapped by, are wanted / not any more. */
zs_status zs_offload_want_flat(const zs_unit *unit, zs_flat *flat);
void zs_offload_done_flat(zs_flat *flat);

/* The unit has just been filled with values. */
void zs_offload_filled(const zs_unit *unit);

/* Its gradients are about to be summed / have been. */
zs_status zs_offload_want_grads(const zs_unit *unit);
void zs_offload_done_grads(const zs_unit *unit);

/* Nobody wants the gradients any more: their pages go without being written. */
void zs_offload_discard_grads(const zs_unit *unit);

#endif
