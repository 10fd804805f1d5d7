/* join.h - ranks whose data has ended, and what the others tell them: join().
 *
 * While join() is on, a rank says what it is about to do before it meets others, in one exchange of all ranks. A rank
 * whose data has ended says that instead, hears what the others are about to do, and does its part of it
 * (join_follow.h). What happens within a pass (each gather, each round) is said only once somebody's data has ended.
 */
#ifndef ZS_JOIN_H
#define ZS_JOIN_H

#include "engine/engine.h"

/* What a rank says. */
typedef enum zs_join_act {
    ZS_JOIN_ENDED,  /* its data has; `bits`: it has not followed anybody yet */
    ZS_JOIN_FAILED, /* it leaves by an exception, whose words are `text` */
    ZS_JOIN_FORWARD,
    ZS_JOIN_FORWARD_END,
    ZS_JOIN_GATHER, /* of unit `number` */
    ZS_JOIN_BACKWARD,
    ZS_JOIN_POST, /* of unit `number` */
    ZS_JOIN_BACKWARD_END,
    ZS_JOIN_ABANDON, /* of its backward */
    ZS_JOIN_MEETING, /* that nobody can follow */
    ZS_JOIN_CALL,    /* of Python's, `number`, which `text` describes */
} zs_join_act;

/* `bits` of a forward. */
enum { ZS_JOIN_TRAINING = 1, ZS_JOIN_RECORDING = 2, ZS_JOIN_BY_HAND = 4 };

typedef struct zs_join_message {
    uint32_t act, number, bits; /* a zs_join_act; see there */
    char text[244];
} zs_join_message;

/* What has been heard last. */
typedef struct zs_join_news {
    zs_join_message word; /* of `leader`; ZS_JOIN_ENDED if all have */
    int n_active;         /* ranks that have data */
    int leader, latest; /* the lowest and the highest of them; if there are none, of those that have followed nobody */
    bool followed;      /* some rank has followed others since join() began */
} zs_join_news;

/* Begins. `by_all`: gradients are divided by all ranks, else by those that have data. `throws`: it is ZS_ERR_STATE
 * on all ranks if one's data ends before the others'. ZS_ERR_STATE if some model is joined that uses the same ranks. */
zs_status zs_join_begin(zs_engine *engine, bool by_all, bool throws);

/* Ends, whatever has come of it; no-op without a begin. */
void zs_join_end(zs_engine *engine);

/* (a rank with data) Says that a call of Python's comes next, in which so many `meetings` follow. *followed: some
 * rank will follow it. */
zs_status zs_join_call(zs_engine *engine, uint32_t number, const char *text, int meetings, bool *followed);

/* Leaves by an exception: the others hear of it where they meet next. Waits for that. */
zs_status zs_join_leave(zs_engine *engine, const char *text);

/* (within a call that is followed) The leader's `data` to all. */
zs_status zs_join_share(zs_engine *engine, void *data, size_t bytes);

/* (a rank whose data has ended) From now on it follows / says so, and hears what comes next. */
void zs_join_follow(zs_engine *engine);
zs_status zs_join_receive(zs_engine *engine);

/* What was heard last; NULL outside of join(). */
const zs_join_news *zs_join_received(const zs_engine *engine);

/* (all ranks, before a followed backward) Parameters that hold gradients on the leader hold them on those that
 * follow. */
zs_status zs_join_align(zs_engine *engine);

/* --- what the actions tell; no-ops outside of join(), and where this rank follows --------------------------------- */

/* A forward begins, which `meets` peers. ZS_ERR_STATE for a session opened by hand that somebody would have to
 * follow. */
zs_status zs_join_forward(zs_engine *engine, const zs_entry *entry, bool meets);

/* A session of forwards is over. */
zs_status zs_join_forward_end(zs_engine *engine);

/* A backward begins / has posted all of its rounds. */
zs_status zs_join_backward(zs_engine *engine);
zs_status zs_join_backward_end(zs_engine *engine);

/* Do gathers in the engine's forwards meet ranks that may follow? */
bool zs_join_gathers(const zs_engine *engine);

/* A unit is about to be gathered, or its round posted. */
zs_status zs_join_unit(zs_engine *engine, zs_join_act act, const zs_record *record);

/* This rank abandons its backward; *said: the peers have been told so here. */
zs_status zs_join_abandon(zs_engine *engine, bool *said);

/* Whose buffers count; and meetings within a forward's begin, which are all ranks'. */
int zs_join_source(const zs_engine *engine);
void zs_join_meetings(zs_engine *engine, bool begin);

/* Does this rank follow others? */
bool zs_join_follows(const zs_engine *engine);

#endif
