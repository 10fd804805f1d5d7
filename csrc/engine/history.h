/* history.h - what has been done to a model's parameters that must be done on all ranks, or on none.
 *
 * The one idea: a step that one rank alone leaves out, or a load that it alone does, leaves slices of different moments, and
 * training would go on with the mixture. So each rank folds such events into one number, and wherever ranks meet anyway they
 * compare it (zs_comm_tell_history).
 *
 *   event    | folded in
 *   a step   | once for each backward that has ended, with that backward's number. Not how often: a rank may have several
 *            | optimizers, or one that it does not call.
 *   a load   | for each parameter what was loaded last. Once all of a model's have been, what was before them counts no more:
 *            | a load makes good what was amiss.
 *
 *   a thaw   | the unit that trains more than before
 *
 * Events are counted from the last backward that went well on all ranks, where their numbers were the same.
 */
#ifndef ZS_HISTORY_H
#define ZS_HISTORY_H

#include "engine/engine.h"

/* An optimizer has stepped the model's parameters. */
void zs_engine_note_step(zs_engine *engine);

/* Parameter `i` has been loaded; `content`: the same number on ranks that loaded the same. */
void zs_unit_note_load(zs_unit *unit, int64_t i, uint64_t content);

/* Parameters of a unit were frozen when it was made, and are trained from now on. */
void zs_engine_note_thaw(zs_engine *engine, const zs_unit *unit);

/* What this rank has failed in, as a clause that goes on "rank 0 "; "": nothing any more. */
void zs_engine_tell_mishap(zs_engine *engine, const char *what);

/* Peers are about to be met: has them told what is new. */
void zs_history_tell(zs_engine *engine);

/* A backward has ended; `good`: on all ranks, so that their histories are the same. */
void zs_history_reduced(zs_engine *engine, bool good);

#endif
