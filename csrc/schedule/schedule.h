/* schedule.h - decides the time of every act in a step of a model, and nothing else.
 *
 * Events go in (a module is entered, a gradient is ready), actions come out (gather, post, sum), and the units' records
 * hold the state between them. An executor carries the actions out with memory, transports and tensors. There are two:
 * the engine's (acts.c), and a dry one that works on sizes (dry.c), so the plan matches the run. Nothing here is
 * collective; ranks with the same events have the same actions in the same order.
 *
 *  forward:   enter -> [ready, open] gather, bind ...      leave -> reshard ... [close]
 *  backward:  backward -> [ready, open] gather, bind, prepare  gradient -> pack, post  end -> sum, deliver, close, end
 *
 * Threads: nothing here is locked. A model's events come one at a time: forwards from the thread that calls the
 * module, gradients from the thread on which autograd runs the backward, while the calling thread waits. Actions must
 * not send events; if users' hooks do so within `step` or `deliver`, the executor refuses the event or defers it.
 */
#ifndef ZS_SCHEDULE_H
#define ZS_SCHEDULE_H

#include "base/status.h"
#include "schedule/record.h"

typedef struct zs_schedule zs_schedule;

/* The running pass. FAILED: a backward raised here. Its local state is cleaned up; zs_schedule_settle does the rest,
 * which needs the peers, before anything else. */
typedef enum zs_stage { ZS_IDLE, ZS_IN_FORWARD, ZS_IN_BACKWARD, ZS_FAILED } zs_stage;

/* A forward as it begins. */
typedef struct zs_entry {
    bool training;  /* the module is in training mode */
    bool by_hand;   /* not a forward: a script will read parameters */
    bool recording; /* autograd records: a backward may follow */
    bool resumed;   /* the forward continues after a backward or a write within it */
    int64_t now;    /* how many nodes autograd has created so far */
} zs_entry;

/* The gradients that a unit waits for in a backward. */
typedef struct zs_expected {
    bool known;       /* already prepared in this backward; the other fields are unset */
    int64_t n_wanted; /* the number of gradients */
    bool has_frozen;  /* some parameters need none */
} zs_expected;

/* An executor's actions. All may be NULL except gather, bind, cancel, reshard, bucket_new, pack, post, sum and
 * reusable. */
typedef struct zs_actions {
    /* --- a pass ---------------------------------------------------------------------------------------------- */

    /* A pass is about to begin; an error refuses it. No other session of its kind is open. */
    zs_status (*ready)(zs_schedule *, zs_phase);
    /* The pass begins: from now on ranks may read peers' shards. `entry` is NULL for a backward. */
    zs_status (*open)(zs_schedule *, const zs_entry *entry);
    /* Ranks stop reading peers' shards. Called after each `open`, failed or not; for a forward also after a failed
     * `ready`. */
    zs_status (*close)(zs_schedule *, zs_phase);

    /* --- parameters ----------------------------------------------------------------------------------------------- */

    /* Starts to gather. If it fails, nothing is in flight. */
    zs_status (*gather)(zs_record *);
    /* Waits for the gather, and binds the parameters to the full buffer. After a failure all is as before the gather.
     */
    zs_status (*bind)(zs_record *);
    /* Waits for a gather and drops its result. Reports a failed gather after restoring the state before it. */
    zs_status (*cancel)(zs_record *);
    /* Binds the parameters to the shard, and frees the full buffer. Reports a failure only after both. */
    zs_status (*reshard)(zs_record *);

    /* Does anything but the parameters use the full buffer, such as a view of one? If NULL: yes. */
    bool (*held)(const zs_record *);
    /* The read ends: graph nodes created from now on do not belong to it. */
    void (*read_over)(zs_record *);
    /* The set of units that other units' forwards read has changed. */
    void (*reads_changed)(zs_schedule *);

    /* --- gradients ------------------------------------------------------------------------------------------------ */

    /* Prepares the unit for gradients, once in a backward. `arriving`: a parameter that already has its new gradient,
     * or -1. */
    zs_status (*prepare)(zs_record *, int64_t arriving, zs_expected *out);
    /* The gradient of parameter `i` stays where autograd put it. *all: the unit's gradients are complete. */
    zs_status (*keep)(zs_record *, int64_t i, bool *all);
    /* Creates a bucket of at least `bytes` and adds it with zs_schedule_add_lease; its lease is zero except `bytes`. */
    zs_status (*bucket_new)(zs_schedule *, size_t bytes, zs_lease **out);
    /* A round begins, in round.packing, or (`local`) in this rank's local gradients. */
    zs_status (*begin_round)(zs_record *, bool local);
    /* Packs the gradient of parameter `i`: overwrites its place in the round (`anew`), or adds to it. *first: the round
     * had none. */
    zs_status (*pack)(zs_record *, int64_t i, bool anew, bool *first);
    /* Moves local gradients into round.packing. */
    zs_status (*send_local)(zs_record *);
    /* Posts round.packing, or a round without gradients. */
    zs_status (*post)(zs_record *);
    /* (replicated) Sums this rank's shard of the gradients once all ranks have posted, and shares the sum. */
    zs_status (*share)(zs_record *, zs_wait, bool *ready);
    /* Completes the oldest posted round (with ZS_WAIT_NOT: any) once all ranks have posted it: sets *done, and lets the
     * peers continue. An error with *done means that there is no valid sum. *over: early.over holds on all ranks. */
    zs_status (*sum)(zs_record *, zs_wait, bool *done, bool *over);
    /* Have all peers read the bucket of the unit's last round? */
    zs_status (*reusable)(zs_record *, zs_wait, bool *ready);
    /* (stepped in backward) Steps the unit with the sums. */
    zs_status (*step)(zs_record *);

    /* --- the end of a backward ------------------------------------------------------------------------------------ */

    /* (in order) Reports to the peers that this rank posts no more rounds. */
    zs_status (*give_up)(zs_schedule *);
    /* All rounds have been summed. */
    zs_status (*summed)(zs_schedule *);
    /* Sets the .grad of the unit's parameters / removes the gradients that this backward brought. */
    zs_status (*deliver)(zs_record *);
    void (*drop)(zs_record *);
    /* The backward ends. `reduced`: the status of the reduction; `delivered`: the status of the users' hooks. */
    zs_status (*end)(zs_schedule *, zs_status reduced, zs_status delivered);
} zs_actions;

/* One model. An executor's own struct begins with it. */
struct zs_schedule {
    const zs_actions *act;
    /* --- set between passes (forward.c) --- */
    bool gathers_cost;   /* a gather takes time and memory; else peers' shards are mapped */
    bool in_order;       /* rounds are collectives: all ranks post and end them in one order; else at any time */
    bool alone;          /* one rank: a round that is posted can be ended at once */
    bool adds_leaves;    /* a step is several backwards, whose gradients the executor adds up (reduce/leaves.h) */
    bool last_leaf;      /* (with adds_leaves) the next backward is its step's last */
    int ahead[2];        /* gathers that may be in flight ahead of use, by zs_phase; see unshard.c; 0: none */
    zs_record **records; /* [n] borrowed; parents before children; the array is owned */
    size_t n;
    /* --- the pass --- */
    zs_stage stage;
    zs_record **open; /* [n_open] owned: the units whose forwards are running, innermost last. NULL: a session opened by
                       * hand, or a unit that was freed */
    size_t n_open, open_room;
    zs_entry entry;         /* of the last session of forwards */
    bool suspended;         /* it is closed for a backward or a write within it */
    size_t n_read;          /* units being read */
    bool outermost_gathers; /* the session began with a unit that has parameters */
    bool gave_up;           /* this rank abandoned the backward that is being closed */
    size_t next_post;       /* (in order) how many units have posted in this backward */
    /* --- unshard.c --- */
    zs_record *latest; /* unsharded last in this pass; borrowed */
    zs_record *before; /* unsharded before that one; borrowed */
    zs_record *last;   /* unsharded last in the last forward; borrowed */

    /* --- rounds.c --- */
    zs_record *first_out, *last_out; /* units with a posted round, in the order of posting; borrowed */
    zs_lease **leases;               /* [n_leases] borrowed; the array is owned */
    size_t n_leases;
    uint64_t posts;
};

enum { ZS_BUCKETS_OUT = 2 }; /* posted buckets of one size before a rank waits for its peers */

/* --- between passes ----------------------------------------------------------------------------------------------- */

/* Initializes an empty schedule that gathers one unit ahead. */
void zs_schedule_init(zs_schedule *schedule, const zs_actions *act);

/* Sets how the transports behave; see zs_schedule. */
void zs_schedule_set_transports(zs_schedule *schedule, bool gathers_cost, bool in_order, bool alone);

/* Frees the schedule, but not records and buckets. */
void zs_schedule_free(zs_schedule *schedule);

/* Initializes a unit's record before it is added / frees its contents. */
void zs_record_init(zs_record *record, zs_traits traits);
void zs_record_free(zs_record *record);

/* Adds a unit, last in the order / removes it from everything. */
zs_status zs_schedule_add(zs_schedule *schedule, zs_record *record);
void zs_schedule_forget(zs_schedule *schedule, zs_record *record);

/* Sets the order of units; gradients are posted from the last to the first. `records` [n] are all of its units, each
 * once. */
void zs_schedule_set_order(zs_schedule *schedule, zs_record *const *records);

/* Makes these units follow `record` in that pass; n = 0: those that followed last time. ZS_ERR_MEMORY. */
zs_status zs_schedule_follow(zs_record *record, zs_phase phase, zs_record *const *records, size_t n);

/* Sets how many units ahead to gather, by zs_phase. */
void zs_schedule_set_ahead(zs_schedule *schedule, const int ahead[2]);

/* Forgets the order in which units were unsharded, as in a new model. */
void zs_schedule_forget_order(zs_schedule *schedule);

/* Set a unit's variable traits. */
void zs_record_set_reduces(zs_record *record, bool reduces, size_t bucket_bytes);
void zs_record_set_stays(zs_record *record, bool stays);
void zs_record_set_kept(zs_record *record, bool kept);
void zs_record_set_sync(zs_record *record, bool sync);
void zs_record_set_early(zs_record *record, bool on);

/* The unit's local gradients were dropped. */
void zs_record_forget_local(zs_record *record);

/* Adds / removes an idle bucket. */
zs_status zs_schedule_add_lease(zs_schedule *schedule, zs_lease *lease);
void zs_schedule_drop_lease(zs_schedule *schedule, const zs_lease *lease);

/* --- forward: events ---------------------------------------------------------------------------------------------- */

/* The forward of a unit's module begins (`record` NULL: a script will read parameters). Opens a session unless one is
 * open. A failure before the unit is entered leaves no new forward open. */
zs_status zs_schedule_enter(zs_schedule *schedule, zs_record *record, const zs_entry *entry);

/* The forward begins again within a backward, to be recomputed, or a hook or a custom function reads the unit there.
 * `now` -1: autograd does not record. */
zs_status zs_schedule_recompute(zs_schedule *schedule, zs_record *record, int64_t now);

/* An operation in the innermost forward reads the unit's parameters: it is unsharded until that ends, or until
 * another unit is read and nothing uses this one's full buffer. */
zs_status zs_schedule_read(zs_schedule *schedule, zs_record *record, int64_t now);

/* Sets the number of the operation that reads the unit. */
void zs_record_set_operation(zs_record *record, uint64_t operation);

/* A script is about to write to the unit: reshards it if only a read unsharded it, or if it was gathered ahead. */
zs_status zs_schedule_unread(zs_schedule *schedule, zs_record *record);

/* The forward ends, also if it raised; no-op if none is running. `keep`: its outputs have a history, so a backward may
 * come. */
zs_status zs_schedule_leave(zs_schedule *schedule, zs_record *record, bool keep);

/* Ends all forwards entered since there were `n_open`. Reports the first failure. */
zs_status zs_schedule_unwind(zs_schedule *schedule, size_t n_open);

/* Before / after a write within a forward, such as an optimizer's step: reshards all units but pinned ones and closes
 * the session, so that no rank reads / opens it again. No-op outside of a forward, and in a backward. If the write has
 * raised, the next event of the forward opens it. */
zs_status zs_schedule_pause(zs_schedule *schedule);
zs_status zs_schedule_resume(zs_schedule *schedule);

/* Ends the innermost session that was opened by hand, and the forwards entered in it; no-op if there is none. */
zs_status zs_schedule_leave_by_hand(zs_schedule *schedule);

/* --- by hand ------------------------------------------------------------------------------------------------------ */

/* Unshards a unit in a session, without gathering ahead; no-op if it is unsharded. */
zs_status zs_schedule_unshard(zs_schedule *schedule, zs_record *record);

/* Pins an unsharded unit: it stays so until zs_schedule_reshard, or the end of the next backward. */
void zs_schedule_pin(zs_record *record);

/* Reshards it; no-op if it is sharded. */
zs_status zs_schedule_reshard(zs_schedule *schedule, zs_record *record);

/* Drops a gather in flight, which may have failed; no-op without one. */
zs_status zs_schedule_cancel(zs_schedule *schedule, zs_record *record);

/* --- backward: events --------------------------------------------------------------------------------------------- */

/* The stamp of a forward, for the hook before its backward. The forward created nodes `begun` to `ended` (INT64_MAX: it
 * still runs). */
int64_t zs_schedule_stamp(int64_t begun, int64_t ended);

/* Did the forward of stamp `inner` run within that of `outer`? */
bool zs_schedule_stamp_is_within(int64_t inner, int64_t outer);

/* The backward of that forward begins. */
zs_status zs_schedule_backward(zs_schedule *schedule, zs_record *record, int64_t stamp);

/* The unit's parameter `i` has a new gradient. */
zs_status zs_schedule_gradient(zs_schedule *schedule, zs_record *record, int64_t i);

/* Opens a backward, unless one is open. For events that may precede the first backward hook. */
zs_status zs_schedule_begin_backward(zs_schedule *schedule);

/* Autograd has finished the backward. */
zs_status zs_schedule_end(zs_schedule *schedule);

/* Do all units have the gradients that they wait for? If so, a backward that raises now lacks nothing. */
bool zs_schedule_all_arrived(const zs_schedule *schedule);

/* Autograd raised. Cleans up what needs no peer. */
void zs_schedule_fail(zs_schedule *schedule);

/* After zs_schedule_fail: reports to the peers that this rank's gradients will not come, and completes the rounds.
 * Otherwise a no-op. */
zs_status zs_schedule_settle(zs_schedule *schedule);

#endif
