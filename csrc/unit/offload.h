/* offload.h - the parts of a model that are offloaded to a disk: a model's settings, and each unit's choice.
 *
 * The settings name the kinds of memory to offload, and the fraction of the model. Each unit's choice is made once,
 * when it is created. Otherwise only counts of bytes and samples ask where memory lies.
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

/* Offloads the kinds of `what` of units created from now on to files in `directory`; "": to the memory of a GPU's host;
 * NULL: in dry runs, which have no memory. Reads the kinds and the fraction of `what`. Collective; fails as zs_disk_new
 * does. */
zs_status zs_offload_set(zs_context *context, const char *directory, const zs_offload *what);

/* Chooses for a new unit with `bytes` of parameters, spread evenly over the model; the same on all ranks. */
void zs_offload_choose(zs_offload *offload, zs_unit *unit, size_t bytes);

/* Releases what zs_offload_choose took. */
void zs_offload_forget(zs_unit *unit);

/* Memory for a flat's shard, where the unit's parameters lie; `shards` is its transport. */
zs_status zs_offload_flat_new(const zs_unit *unit, zs_comm *shards, size_t shard_bytes, zs_flat_mem *out);

/* Memory of this rank's own for parameters of replicated units, where these lie. */
zs_status zs_offload_params_new(const zs_unit *unit, size_t bytes, zs_mem **out);

/* A new tensor of `numel` zeros on the disk where the state of the unit's optimizer goes; of `like`'s dtype. Only where
 * unit->offloads.state. */
zs_status zs_offload_state_new(const zs_unit *unit, int64_t numel, const zs_tensor *like, zs_tensor **out);

/* --- memory in use; no-ops for units whose parameters are in memory ----------------------------------------------- */

/* The bytes from which the flat is gathered, or by which it is mapped, are needed / no longer needed. */
zs_status zs_offload_want_flat(const zs_unit *unit, zs_flat *flat);
void zs_offload_done_flat(zs_flat *flat);

/* The unit's values have just been written. */
void zs_offload_filled(const zs_unit *unit);

/* Its gradients are about to be summed / have been. */
zs_status zs_offload_want_grads(const zs_unit *unit);
void zs_offload_done_grads(const zs_unit *unit);

/* Drops the pages of gradients that are no longer needed, without writing them. */
void zs_offload_discard_grads(const zs_unit *unit);

#endif
