/* history.h - changes to a model's parameters that all ranks must make, or none.
 *
 * If one rank alone skips a step or loads a checkpoint, the shards are of different moments, and training would
 * continue with the mixture. So each rank keeps a fingerprint of such events (zs_fingerprint). Ranks compare them where
 * they communicate anyway: before a forward (zs_comm_publish_fingerprint), and in each round of gradients (reduce.c).
 *
 *   event    | record
 *   step     | the count, and a digest of the optimizers' settings, since the last backward
 *   load     | each parameter's last load. Loading all of a model's parameters clears earlier events: a full load
 *            | repairs a divergence.
 *   freezing | the parameters that the last training forward or backward found frozen
 *   write    | the kinds of in-place operations on shards of parameters, and of gradients. Not how often: scripts may
 *            | skip empty shards
 *   draw     | a digest of the random numbers drawn for a parameter in place, and of full parameters at the end of a
 *            | context in which a script may have written to them
 *
 * Events count from the last round of gradients in which the ranks' fingerprints were equal.
 */
#ifndef ZS_HISTORY_H
#define ZS_HISTORY_H

#include "engine/engine.h"

/* An optimizer has stepped the model's parameters. `settings`: a digest of its param groups; `counts`: the step
 * count in its state. */
void zs_engine_note_step(zs_engine *engine, uint64_t settings, uint64_t counts);

/* Is a tensor this rank's shard of parameter `i` itself, and not a copy or a gradient? */
bool zs_unit_is_slice(const zs_unit *unit, int64_t i, const zs_tensor *tensor);

/* A script has written to a shard of parameter `i`, or of its gradient, by an in-place operation of this name. No-op
 * for other tensors, such as copies. */
void zs_unit_note_write(zs_unit *unit, int64_t i, const zs_tensor *written, const char *operation);

/* A script has drawn random numbers for parameter `i` in place; `drawn` is equal on ranks that drew the same. Every
 * rank draws for the full parameter, also if its shard is empty. */
void zs_unit_note_draw(zs_unit *unit, int64_t i, uint64_t drawn);

/* Parameter `i` has been loaded; `content` is equal on ranks that loaded the same values. */
void zs_unit_note_load(zs_unit *unit, int64_t i, uint64_t content);

/* A training forward or a backward begins, with these parameters frozen. */
void zs_engine_note_frozen(zs_engine *engine);

/* Publishes this rank's failure, worded to follow "rank 0 "; "" clears it. */
void zs_engine_publish_failure(zs_engine *engine, const char *what);

/* Publishes the settings of the optimizers that step its models: for each setting a line of a name, a tab and values.
 */
void zs_engine_publish_settings(zs_engine *engine, const char *lines);

/* Have all ranks done the same? Collective; otherwise ZS_ERR_DIVERGED on all. */
zs_status zs_engine_compare(zs_engine *engine);

/* Before communication: publishes new events to the peers. */
void zs_history_publish(zs_engine *engine);

/* A backward has ended; `good`: without failures. */
void zs_history_reduced(zs_engine *engine, bool good);

#endif
