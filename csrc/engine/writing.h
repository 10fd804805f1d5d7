/* writing.h - permission to write this rank's shards, for an engine without a failed backward; see
 * zs_engine_write_begin. */
#ifndef ZS_WRITING_H
#define ZS_WRITING_H

#include "engine/engine.h"

/* A pass begins, which ends a write that raised. */
void zs_writing_over(zs_engine *engine);

/* The write that has begun is an optimizer's step. */
void zs_writing_steps(zs_engine *engine);

/* Fails within an optimizer's step: to read or load in one of its hooks would end its right to write, while peers read
 * the same memory. */
zs_status zs_writing_check(const zs_engine *engine);

/* Waits until no peer reads the shards, and keeps readers out / lets them in again. ZS_ERR_STATE while this rank has a
 * session open by hand. */
zs_status zs_writing_begin(zs_engine *engine);
void zs_writing_end(zs_engine *engine);

/* The same for one of a script's own operations; *begun: it is not within another write, so the caller must end it. */
zs_status zs_writing_by_hand(zs_engine *engine, bool *begun);
void zs_writing_by_hand_end(zs_engine *engine);

/* Copies tensors that scripts assigned (`p.data = t`) into the shards, which peers may be reading. */
zs_status zs_writing_back(zs_engine *engine);

/* A barrier of all ranks: their scripts' writes are complete, so peers may evaluate with the values, and earlier reads
 * by a lone rank no longer count. No-op within a pass and a write. */
zs_status zs_writing_barrier(zs_engine *engine);

/* Casts the shards to the compute dtype. */
zs_status zs_writing_cast(zs_engine *engine);

/* Keeps peers from reading the shards until the next known write or pass. */
void zs_writing_unknown(zs_engine *engine);

#endif
