/* inner.h - what the files of the schedule ask of each other. Each calls those above it: session, through, unshard,
 * rounds, backward, reads, forward. */
#ifndef ZS_SCHEDULE_INNER_H
#define ZS_SCHEDULE_INNER_H

#include "schedule/schedule.h"

/* Carries out an action that may be left out. */
#define ZS_ACT(schedule, action, ...) ((schedule)->act->action != NULL ? (schedule)->act->action(__VA_ARGS__) : ZS_OK)

/* --- session.c ---------------------------------------------------------------------------------------------------- */

/* A backward begins: the session of a forward in which it runs is closed / is opened again / ends, whether it is
 * closed or not. */
zs_status zs_session_suspend(zs_schedule *schedule);
zs_status zs_session_resume(zs_schedule *schedule);
zs_status zs_session_close(zs_schedule *schedule);

/* --- unshard.c ---------------------------------------------------------------------------------------------------- */

/* Unshards the unit as a pass wants it, and lets the gathers of what follows begin. */
zs_status zs_unshard_for(zs_schedule *schedule, zs_record *record, zs_phase phase);

/* Shards a unit, on its way to `next` (SHARDED or REDUCING); no-op if it is not unsharded. */
zs_status zs_reshard_to(zs_schedule *schedule, zs_record *record, zs_unit_state next);

/* Shards all units; `pinned`: those that are pinned as well. The first failure is reported. */
zs_status zs_reshard_all(zs_schedule *schedule, bool pinned);

/* The round that a REDUCING unit waited for is summed. */
void zs_unshard_reduced(zs_record *record);

/* A pass begins / is over: gathers that were begun and not wanted are dropped. */
void zs_unshard_begin_pass(zs_schedule *schedule);
zs_status zs_unshard_end_pass(zs_schedule *schedule, zs_phase phase);

/* Does a unit stay unsharded from its forward, which was entered last, to its backward? `keep`: that may come. */
bool zs_unshard_stays(const zs_schedule *schedule, const zs_record *record, bool keep);

/* Takes a unit out of what others remember. */
void zs_unshard_forget(zs_schedule *schedule, const zs_record *record);

/* --- rounds.c ----------------------------------------------------------------------------------------------------- */

/* A backward begins: its units' rounds are new. */
void zs_rounds_begin(zs_schedule *schedule);

/* None of them is to be reduced, but by zs_schedule_post_only. */
void zs_rounds_stay(zs_schedule *schedule);

/* (stepped in backward) A forward begins that backward may come back to / all of them have been come back to / the next
 * backward may come. */
void zs_rounds_called(zs_record *record);
void zs_rounds_come_back(zs_record *record);
void zs_rounds_over(zs_record *record);

/* Readies a unit for gradients. */
zs_status zs_rounds_prepare(zs_schedule *schedule, zs_record *record, int64_t arriving);

/* Takes the new gradient of parameter `i`; *complete when the round has all that it waits for. */
zs_status zs_rounds_gradient(zs_schedule *schedule, zs_record *record, int64_t i, bool *complete);

/* (in order) The round waits for its turn. */
void zs_rounds_packed(zs_record *record);

/* Posts the unit's round, packed or empty, with what stayed local before; no-op for units whose gradients stay here. */
zs_status zs_rounds_post(zs_schedule *schedule, zs_record *record);

/* Ends all rounds, in the order of posting. All ranks must have posted, or be about to post without waiting for this
 * one; their orders may differ: what a peer may wait for is shared first. */
zs_status zs_rounds_end_all(zs_schedule *schedule);

/* Waits until all buckets are idle. */
zs_status zs_rounds_settle(zs_schedule *schedule);

/* Gives the unit's parameters their gradients, at the end of a backward. */
zs_status zs_rounds_deliver(zs_schedule *schedule, zs_record *record);

/* A backward has raised: gives up what is packed, and what it did to .grad. What is out stays so. */
void zs_rounds_drop(zs_schedule *schedule, zs_record *record);

/* It came to nothing: the queue is emptied as well, without sums. */
void zs_rounds_forget_all(zs_schedule *schedule);

/* Takes a unit out, whatever it has there. */
void zs_rounds_forget(zs_schedule *schedule, zs_record *record);

/* --- reads.c ------------------------------------------------------------------------------------------------------ */

/* The forward of `reader`, which was entered last, ends: what it has read is sharded again. */
zs_status zs_reads_end(zs_schedule *schedule, zs_record *reader);

/* Is a unit whose own forward is over wanted by a reader whose forward still runs? As far as the last pass tells. */
bool zs_reads_keep(zs_schedule *schedule, zs_record *record);

/* Takes a unit out. */
void zs_reads_forget(zs_schedule *schedule, zs_record *record);

/* --- through.c ---------------------------------------------------------------------------------------------------- */

/* Which units a running backward is through with.
 *
 * Torch numbers the nodes of its graph as they are made, and a backward runs them in falling order. So when the hook
 * before a unit's backward runs, every node that was made after that unit's forward has been run; and a unit all of
 * whose forwards began later will get no gradient any more. That is known on all ranks at the same hook, however
 * many of the unit's parameters had a gradient: where collectives must come in one order, that is what the order
 * hangs on. */

/* A forward of the unit's module begins. */
void zs_through_begin(zs_record *record, int64_t now);

/* Its outputs have a history: its backward may come. */
void zs_through_expect(zs_record *record);

/* The backward of the forward `stamp` (zs_schedule_stamp) begins. */
void zs_through_fired(zs_record *record, int64_t stamp);

/* Is the running backward through with the unit, where that of the forward `stamp` begins? `session`: when the last
 * session of forwards began; it is with a unit that took no part in that. (One that did without recording may be
 * recomputed.) */
bool zs_through_with(const zs_record *record, int64_t stamp, int64_t session);

/* What is packed now is all that this backward will: noted, for the units that it is through with. */
void zs_through_retire(zs_record *record);

/* A backward has ended. */
void zs_through_end(zs_record *record);

#endif
