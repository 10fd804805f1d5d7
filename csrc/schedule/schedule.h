/* schedule.h - what happens when in a step of a model: the decisions, and nothing else.
 *
 * Events go in (a module is entered, a gradient is ready), actions come out (gather, post, sum), and between them are
 * the records of the units. What an action does with memory, transports and tensors is its executor's matter. There are
 * two: the engine's (acts.c), and a dry one that knows sizes (dry.c), so that what is planned is what is done. Nothing
 * here is collective by itself; the order of actions is the same on all ranks whose events are.
 *
 *  forward:   enter -> [ready, open] gather, bind ...      leave -> reshard ... [close]
 *  backward:  backward -> [ready, open] gather, bind, prepare  gradient -> pack, post  end -> sum, deliver, close, end
 *
 * Threads: none of this is locked. A model's events come one at a time: forwards from the thread that calls the module,
 * gradients from the one thread that autograd runs the backward on, which the first waits for. Actions must not send
 * events; what users' hooks do in `step` and `deliver` is a matter of the executor, which refuses it or has it wait.
 */
#ifndef ZS_SCHEDULE_H
#define ZS_SCHEDULE_H

#include "base/status.h"
#include "schedule/record.h"

typedef struct zs_schedule zs_schedule;

/* Which pass is running. FAILED: a backward has raised here; what needs no peer is put in order, and the peers' part
 * of it is done before anything else (zs_schedule_settle). */
typedef enum zs_stage { ZS_IDLE, ZS_IN_FORWARD, ZS_IN_BACKWARD, ZS_FAILED } zs_stage;

/* What a forward is, when it begins. */
typedef struct zs_entry {
    bool training;  /* the module is in training mode */
    bool by_hand;   /* no forward: parameters are to be read */
    bool recording; /* autograd records: a backward may follow */
    bool resumed;   /* a backward within it is over, and it goes on */
    int64_t now;    /* nodes that autograd's graph has had so far */
} zs_entry;

/* What a unit has to wait for in a backward. */
typedef struct zs_expected {
    bool known;       /* told before in this backward: the rest is not set */
    int64_t n_wanted; /* gradients */
    bool has_frozen;  /* some parameters want none */
} zs_expected;

/* What an executor does. Those that have nothing to do for an action leave it NULL; but not gather, bind, cancel,
 * reshard, bucket_new, pack, post, sum and reusable. */
typedef struct zs_actions {
    /* --- a pass
     * -------------------------------------------------------------------------------------------------------- */

    /* One is about to begin, and may be refused. No other session of its kind is open. */
    zs_status (*ready)(zs_schedule *, zs_phase);
    /* It begins: peers' shards may be read from now on. `entry` is NULL for a backward. */
    zs_status (*open)(zs_schedule *, const zs_entry *entry);
    /* Nobody reads peers' shards any more. Called after each `open`, whether it failed or not; for a forward also
     * where its `ready` has failed. */
    zs_status (*close)(zs_schedule *, zs_phase);

    /* --- parameters
     * ---------------------------------------------------------------------------------------------------- */

    /* Begins to gather. If it fails, nothing is under way. */
    zs_status (*gather)(zs_record *);
    /* Waits for that, and binds the parameters to the full buffer. If it fails, it is as before the gather. */
    zs_status (*bind)(zs_record *);
    /* Drops a gather that was begun, after waiting for it. If that has failed, it says so when all is as before. */
    zs_status (*cancel)(zs_record *);
    /* Binds the parameters to the shard, and gives the full buffer back. A failure is told when that is done. */
    zs_status (*reshard)(zs_record *);

    /* Does anything but the parameters use the full buffer, such as a view of one? NULL: yes. */
    bool (*held)(const zs_record *);
    /* Nothing that is made from now on uses the unit because it was read. */
    void (*read_over)(zs_record *);
    /* Which units are read in forwards of others is not what it was. */
    void (*reads_changed)(zs_schedule *);

    /* --- gradients
     * ----------------------------------------------------------------------------------------------------- */

    /* Readies the unit for gradients, once in a backward. `arriving`: a parameter whose new gradient is there, or
     * -1. */
    zs_status (*prepare)(zs_record *, int64_t arriving, zs_expected *out);
    /* The gradient of parameter `i` stays where autograd put it. *all: they are all there. */
    zs_status (*keep)(zs_record *, int64_t i, bool *all);
    /* A new bucket of at least `bytes`, added by zs_schedule_add_lease; its lease is zeroed but for `bytes`. */
    zs_status (*bucket_new)(zs_schedule *, size_t bytes, zs_lease **out);
    /* A round begins, in round.packing, or (`local`) in memory of this rank's own. */
    zs_status (*begin_round)(zs_record *, bool local);
    /* Packs the gradient of parameter `i`, which is counted from nothing (`anew`) or not. *first: it was not counted
     * yet. */
    zs_status (*pack)(zs_record *, int64_t i, bool anew, bool *first);
    /* What stayed local goes into round.packing. */
    zs_status (*send_local)(zs_record *);
    /* Posts round.packing, or a round without gradients. */
    zs_status (*post)(zs_record *);
    /* (replicated) Sums this rank's shard once all ranks have posted, and shares it. */
    zs_status (*share)(zs_record *, zs_wait, bool *ready);
    /* Ends the oldest round that is out (with ZS_WAIT_NOT: any), once all ranks are there: *done, and the peers may
     * go on. With *done, an error says that the sum is none. *over: early.over, on all ranks. */
    zs_status (*sum)(zs_record *, zs_wait, bool *done, bool *over);
    /* Have all peers read the bucket of the unit's last round? */
    zs_status (*reusable)(zs_record *, zs_wait, bool *ready);
    /* (stepped in backward) Steps the unit with what has been summed. */
    zs_status (*step)(zs_record *);

    /* --- the end of a backward
     * ------------------------------------------------------------------------------------------ */

    /* All rounds of this rank have been posted. */
    zs_status (*posted)(zs_schedule *);
    /* (in order) Tells the peers that no more rounds will come. */
    zs_status (*give_up)(zs_schedule *);
    /* All rounds have been summed. */
    zs_status (*summed)(zs_schedule *);
    /* The unit's parameters get their gradients; or lose what this backward gave them. */
    zs_status (*deliver)(zs_record *);
    void (*drop)(zs_record *);
    /* It is over; `reduced` says whether gradients were, `delivered` whether users' hooks were content. */
    zs_status (*end)(zs_schedule *, zs_status reduced, zs_status delivered);
} zs_actions;

/* One model. An executor's own struct begins with it. */
struct zs_schedule {
    const zs_actions *act;
    /* --- what it is told between passes (forward.c) --- */
    bool gathers_cost;   /* a gather takes time and memory; else peers' shards are mapped */
    bool in_order;       /* rounds are collectives: all ranks post and end them in one order; else at any time */
    int ahead[2];        /* gathers that may be under way before they are wanted, by zs_phase; see unshard.c; 0: none */
    zs_record **records; /* [n] borrowed; parents before children; the array is owned */
    size_t n;
    /* --- the pass --- */
    zs_stage stage;
    zs_record *
        *open; /* [n_open] what holds the session open, the innermost last: forwards of units that are running; NULL:
                       * a session opened by hand, or of a unit that is gone; owned */
    size_t n_open, open_room;
    zs_entry entry;         /* of the last session of forwards */
    bool suspended;         /* that is closed for a backward within it */
    size_t n_read;          /* units that are read */
    bool outermost_gathers; /* that began with a unit that has parameters */
    bool gave_up;           /* the backward being closed was abandoned here */
    size_t next_post;       /* (in order) how many units have posted in this backward */
    /* --- unshard.c --- */
    zs_record *latest; /* unsharded last in this pass; borrowed */
    zs_record *before; /* unsharded before that one; borrowed */
    zs_record *last;   /* unsharded last in the last forward; borrowed */
    /* --- rounds.c --- */
    zs_record *first_out, *last_out; /* units with a round out, in the order of posting; borrowed */
    zs_lease **leases;               /* [n_leases] borrowed; the array is owned */
    size_t n_leases;
    uint64_t posts;
};

enum { ZS_BUCKETS_OUT = 2 }; /* buckets of one size that may be out before a rank waits for its peers */

/* --- between passes ----------------------------------------------------------------------------------------------- */

/* Begins with no units, and gathers that go one unit ahead. */
void zs_schedule_init(zs_schedule *schedule, const zs_actions *act);

/* How the transports behave, see zs_schedule. */
void zs_schedule_set_transports(zs_schedule *schedule, bool gathers_cost, bool in_order);

/* Frees what it owns; the units' records and the buckets are others'. */
void zs_schedule_free(zs_schedule *schedule);

/* A unit's record before it is added, and what it has besides when it is gone. */
void zs_record_init(zs_record *record, zs_traits traits);
void zs_record_free(zs_record *record);

/* Adds a unit, last in the order / takes it out of whatever it takes part in. */
zs_status zs_schedule_add(zs_schedule *schedule, zs_record *record);
void zs_schedule_forget(zs_schedule *schedule, zs_record *record);

/* Sets the order, in which gradients leave from the last to the first: `records` [n] are all of its units, each
 * once. */
void zs_schedule_set_order(zs_schedule *schedule, zs_record *const *records);

/* Has these follow `record` in that pass; n = 0: those that did last time. ZS_ERR_MEMORY. */
zs_status zs_schedule_follow(zs_record *record, zs_phase phase, zs_record *const *records, size_t n);

/* How far gathers go ahead, by zs_phase. */
void zs_schedule_set_ahead(zs_schedule *schedule, const int ahead[2]);

/* Forgets in which order units were unsharded, as where a model is new. */
void zs_schedule_forget_order(zs_schedule *schedule);

/* Sets what may change of a unit. */
void zs_record_set_reduces(zs_record *record, bool reduces, size_t bucket_bytes);
void zs_record_set_stays(zs_record *record, bool stays);
void zs_record_set_kept(zs_record *record, bool kept);
void zs_record_set_sync(zs_record *record, bool sync);
void zs_record_set_early(zs_record *record, bool on);

/* What has stayed local is gone. */
void zs_record_forget_local(zs_record *record);

/* Adds an idle bucket / takes an idle one away. */
zs_status zs_schedule_add_lease(zs_schedule *schedule, zs_lease *lease);
void zs_schedule_drop_lease(zs_schedule *schedule, const zs_lease *lease);

/* --- forward: events ---------------------------------------------------------------------------------------------- */

/* The forward of a unit's module begins (`record` NULL: parameters will be read). Opens a session unless one is
 * open. If it fails before the unit is in, nothing is open that was not before. */
zs_status zs_schedule_enter(zs_schedule *schedule, zs_record *record, const zs_entry *entry);

/* It begins again within a backward, to be recomputed. */
zs_status zs_schedule_recompute(zs_schedule *schedule, zs_record *record, int64_t now);

/* An operation in the innermost forward reads the unit's parameters: it is unsharded until that ends, or until
 * another unit is read and nothing uses this one's full buffer. */
zs_status zs_schedule_read(zs_schedule *schedule, zs_record *record, int64_t now);

/* The number of the operation that is to read it, and does. */
void zs_record_set_operation(zs_record *record, uint64_t operation);

/* The unit is to be written to: if it is unsharded for that alone, or its gather has begun ahead, it is sharded
 * again. */
zs_status zs_schedule_unread(zs_schedule *schedule, zs_record *record);

/* It ends, also if it raised; no-op if none is running. `keep`: its outputs have a history, so a backward may come. */
zs_status zs_schedule_leave(zs_schedule *schedule, zs_record *record, bool keep);

/* Ends what has been entered since there were `n_open`. The first failure is reported, and all end. */
zs_status zs_schedule_unwind(zs_schedule *schedule, size_t n_open);

/* The innermost session that was opened by hand ends, and what was entered in it; no-op if there is none. */
zs_status zs_schedule_leave_by_hand(zs_schedule *schedule);

/* --- by hand ------------------------------------------------------------------------------------------------------ */

/* Unshards a unit in a session, without what goes ahead of a pass; no-op if it is unsharded. */
zs_status zs_schedule_unshard(zs_schedule *schedule, zs_record *record);

/* Pins an unsharded unit: it stays so until zs_schedule_reshard, or the end of the next backward. */
void zs_schedule_pin(zs_record *record);

/* Shards it again; no-op if it is not unsharded. */
zs_status zs_schedule_reshard(zs_schedule *schedule, zs_record *record);

/* Drops a gather that is under way, which may have failed; else a no-op. */
zs_status zs_schedule_cancel(zs_schedule *schedule, zs_record *record);

/* --- without modules: what other ranks' passes want of this one's (join()) ---------------------------------------- */

/* Takes part in the gather of a unit, and drops what it brings. */
zs_status zs_schedule_gather_only(zs_schedule *schedule, zs_record *record);

/* Begins a backward that brings no gradients, and in which no unit is reduced but by zs_schedule_post_only. */
zs_status zs_schedule_begin_to_follow(zs_schedule *schedule);

/* Takes part in a round of a unit, without gradients, and ends it. */
zs_status zs_schedule_post_only(zs_schedule *schedule, zs_record *record);

/* --- backward: events --------------------------------------------------------------------------------------------- */

/* What the hook before the backward of a forward is to be told, which made the nodes from `begun` up to `ended`
 * (INT64_MAX: it still runs). */
int64_t zs_schedule_stamp(int64_t begun, int64_t ended);

/* Was the forward of stamp `inner` made within that of `outer`? */
bool zs_schedule_stamp_is_within(int64_t inner, int64_t outer);

/* The backward of that forward begins. */
zs_status zs_schedule_backward(zs_schedule *schedule, zs_record *record, int64_t stamp);

/* The unit's parameter `i` has a new gradient. */
zs_status zs_schedule_gradient(zs_schedule *schedule, zs_record *record, int64_t i);

/* Opens a backward, unless one is open. For an event that comes before its first. */
zs_status zs_schedule_begin_backward(zs_schedule *schedule);

/* Autograd is through. */
zs_status zs_schedule_end(zs_schedule *schedule);

/* Have all units all the gradients that they wait for? Then a backward that raises after that misses nothing. */
bool zs_schedule_all_arrived(const zs_schedule *schedule);

/* Autograd has raised. What needs no peer is done at once. */
void zs_schedule_fail(zs_schedule *schedule);

/* After that: tells the peers, who still wait for this rank's gradients, that they will not come, and ends the
 * rounds. Else a no-op. */
zs_status zs_schedule_settle(zs_schedule *schedule);

#endif
