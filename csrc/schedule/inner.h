/* inner.h - the interfaces between the files of the schedule. Each calls only those before it in this list: session,
 * through, unshard, rounds, backward, reads, forward. */
#ifndef ZS_SCHEDULE_INNER_H
#define ZS_SCHEDULE_INNER_H

#include "schedule/schedule.h"

/* Carries out an optional action. */
#define ZS_ACT(schedule, action, ...) ((schedule)->act->action != NULL ? (schedule)->act->action(__VA_ARGS__) : ZS_OK)

/* --- session.c ---------------------------------------------------------------------------------------------------- */

/* For a backward or a write within a forward: closes the forward's session / opens it again / ends it in any case. */
zs_status zs_session_suspend(zs_schedule *schedule);
zs_status zs_session_resume(zs_schedule *schedule);
zs_status zs_session_close(zs_schedule *schedule);

/* --- unshard.c ---------------------------------------------------------------------------------------------------- */

/* Unshards the unit for a pass, and starts to gather the units that follow. */
zs_status zs_unshard_for(zs_schedule *schedule, zs_record *record, zs_phase phase);

/* Reshards a unit, whose state becomes `next` (SHARDED or REDUCING); no-op if it is sharded. */
zs_status zs_reshard_to(zs_schedule *schedule, zs_record *record, zs_unit_state next);

/* Reshards all units; `pinned`: also the pinned ones. Reports the first failure. */
zs_status zs_reshard_all(zs_schedule *schedule, bool pinned);

/* The round that a REDUCING unit waited for is summed. */
void zs_unshard_reduced(zs_record *record);

/* A pass begins / ends: drops gathers that were not used. */
void zs_unshard_begin_pass(zs_schedule *schedule);
zs_status zs_unshard_end_pass(zs_schedule *schedule, zs_phase phase);

/* Does a unit, whose forward was entered last, stay unsharded until its backward? `keep`: a backward may come. */
bool zs_unshard_stays(const zs_schedule *schedule, const zs_record *record, bool keep);

/* Removes a unit from other units' records. */
void zs_unshard_forget(zs_schedule *schedule, const zs_record *record);

/* --- rounds.c ----------------------------------------------------------------------------------------------------- */

/* A backward begins: starts new rounds. */
void zs_rounds_begin(zs_schedule *schedule);

/* (stepped in backward) A forward begins that may have a backward / all such forwards had theirs / the next backward
 * may begin. */
void zs_rounds_called(zs_record *record);
void zs_rounds_come_back(zs_record *record);
void zs_rounds_over(zs_record *record);

/* Prepares a unit for gradients. */
zs_status zs_rounds_prepare(zs_schedule *schedule, zs_record *record, int64_t arriving);

/* Takes the new gradient of parameter `i`; *complete: the round has all gradients that it waits for. */
zs_status zs_rounds_gradient(zs_schedule *schedule, zs_record *record, int64_t i, bool *complete);

/* (in order) The round waits for its turn. */
void zs_rounds_packed(zs_record *record);

/* Posts the unit's round, packed or empty, with its local gradients; no-op for units whose gradients stay on this rank.
 */
zs_status zs_rounds_post(zs_schedule *schedule, zs_record *record);

/* (no_shard) Shares this rank's part of each sum that all ranks have posted, without a wait: a peer may wait for it. */
void zs_rounds_share_now(zs_schedule *schedule);

/* Completes all rounds, in the order of posting. All ranks must have posted, or be about to post without waiting for
 * this one. Their orders may differ, so this rank shares its sums before it waits. */
zs_status zs_rounds_end_all(zs_schedule *schedule);

/* Waits until all buckets are idle. */
zs_status zs_rounds_settle(zs_schedule *schedule);

/* Gives the unit's parameters their gradients, at the end of a backward. */
zs_status zs_rounds_deliver(zs_schedule *schedule, zs_record *record);

/* A backward raised: drops packed gradients and the backward's changes of .grad. Posted rounds stay posted. */
void zs_rounds_drop(zs_schedule *schedule, zs_record *record);

/* The backward had no result: also empties the queue, without sums. */
void zs_rounds_forget_all(zs_schedule *schedule);

/* Removes a unit in any state of its round. */
void zs_rounds_forget(zs_schedule *schedule, zs_record *record);

/* --- reads.c ------------------------------------------------------------------------------------------------------ */

/* The forward of `reader`, which was entered last, ends: reshards the units that it read. */
zs_status zs_reads_end(zs_schedule *schedule, zs_record *reader);

/* Will a running forward read this unit, whose own forward has ended? Predicted from the last pass. */
bool zs_reads_keep(zs_schedule *schedule, zs_record *record);

/* Removes a unit. */
void zs_reads_forget(zs_schedule *schedule, zs_record *record);

/* --- through.c ---------------------------------------------------------------------------------------------------- */

/* Finds the units that a running backward has finished with.
 *
 * Torch numbers graph nodes as it creates them, and a backward runs them in descending order. So when the hook before a
 * unit's backward runs, every node created after that unit's forward has run, and a unit all of whose forwards began
 * later gets no more gradients. All ranks learn this at the same hook, however many of the unit's parameters had a
 * gradient; the order of collectives relies on it. */

/* A forward of the unit's module begins. */
void zs_through_begin(zs_record *record, int64_t now);

/* Its outputs have a history: its backward may come. */
void zs_through_expect(zs_record *record);

/* The backward of the forward `stamp` (zs_schedule_stamp) begins. */
void zs_through_fired(zs_record *record, int64_t stamp);

/* Has the running backward finished with the unit when the backward of the forward `stamp` begins? `session`: when the
 * last session of forwards began; units outside of it are finished. (A unit that ran in it without recording may be
 * recomputed.) */
bool zs_through_with(const zs_record *record, int64_t stamp, int64_t session);

/* Notes that this backward packs nothing more for the unit. */
void zs_through_retire(zs_record *record);

/* A backward has ended. */
void zs_through_end(zs_record *record);

#endif
