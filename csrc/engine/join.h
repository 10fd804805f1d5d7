/* join.h - join(): ranks that run out of data, and the messages that the others send them.
 *
 * Within join(), a rank announces its next collective call in one exchange of all ranks. A rank without data announces
 * that instead, receives the others' announcements, and does its part of them (join_follow.c). Collectives within a
 * pass (each gather, each round) are announced only once some rank has run out of data.
 */
#ifndef ZS_JOIN_H
#define ZS_JOIN_H

#include "engine/engine.h"

/* What a rank announces. */
typedef enum zs_join_act {
    ZS_JOIN_ENDED,  /* its data has ended; `bits`: it has not followed yet */
    ZS_JOIN_FAILED, /* it leaves by an exception, with the message `text` */
    ZS_JOIN_FORWARD,
    ZS_JOIN_FORWARD_END,
    ZS_JOIN_GATHER, /* of unit `number` */
    ZS_JOIN_BACKWARD,
    ZS_JOIN_POST, /* of unit `number` */
    ZS_JOIN_BACKWARD_END,
    ZS_JOIN_ABANDON, /* it abandons its backward */
    ZS_JOIN_MEETING, /* a collective that ranks without data cannot follow */
    ZS_JOIN_CALL,    /* of Python's call `number`, which `text` describes */
} zs_join_act;

/* `bits` of a forward. */
enum { ZS_JOIN_TRAINING = 1, ZS_JOIN_RECORDING = 2, ZS_JOIN_BY_HAND = 4 };

typedef struct zs_join_message {
    uint32_t act, number, bits; /* a zs_join_act; see there */
    char text[244];
    char call[ZS_CALL]; /* the public call that the rank is in */
} zs_join_message;

/* The last announcements. */
typedef struct zs_join_news {
    zs_join_message word; /* of `leader`; ZS_JOIN_ENDED if all ranks' data has ended */
    int n_active;         /* ranks that have data */
    int leader, latest;   /* the lowest and the highest of them; if none has data, of those that have not followed */
    bool followed;        /* some rank has followed others since join() began */
} zs_join_news;

/* Begins join(). `by_all`: divides gradients by the number of all ranks, else of those with data. `throws`:
 * ZS_ERR_STATE on all ranks if one runs out of data before the others. ZS_ERR_STATE if a model of the same ranks is in
 * join(). */
zs_status zs_join_begin(zs_engine *engine, bool by_all, bool throws);

/* Ends join(), also after failures; no-op without a begin. */
void zs_join_end(zs_engine *engine);

/* (a rank with data) Announces a call of Python's, in which `meetings` collectives follow. *followed: some rank will
 * follow it. */
zs_status zs_join_call(zs_engine *engine, uint32_t number, const char *text, int meetings, bool *followed);

/* Leaves by an exception: waits until the others learn of it, at their next announcement. */
zs_status zs_join_leave(zs_engine *engine, const char *text);

/* (within a followed call) Broadcasts the leader's `data`. */
zs_status zs_join_share(zs_engine *engine, void *data, size_t bytes);

/* (a rank without data) Starts to follow / announces that, and receives what comes next. */
void zs_join_follow(zs_engine *engine);
zs_status zs_join_receive(zs_engine *engine);

/* The last announcements; NULL outside of join(). */
const zs_join_news *zs_join_received(const zs_engine *engine);

/* (all ranks, before a followed backward) Makes the same parameters hold gradients on followers as on the leader. */
zs_status zs_join_align(zs_engine *engine);

/* --- what the actions tell; no-ops outside of join(), and where this rank follows --------------------------------- */

/* A forward begins; `meets`: with collectives. ZS_ERR_STATE for a session opened by hand that a rank would have to
 * follow. */
zs_status zs_join_forward(zs_engine *engine, const zs_entry *entry, bool meets);

/* A session of forwards ends. */
zs_status zs_join_forward_end(zs_engine *engine);

/* A backward begins / has posted all of its rounds. */
zs_status zs_join_backward(zs_engine *engine);
zs_status zs_join_backward_end(zs_engine *engine);

/* Are gathers in the engine's forwards collectives that ranks may have to follow? */
bool zs_join_gathers(const zs_engine *engine);

/* A unit is about to be gathered, or its round posted. */
zs_status zs_join_unit(zs_engine *engine, zs_join_act act, const zs_record *record);

/* This rank abandons its backward; *said: the announcement has told the peers. */
zs_status zs_join_abandon(zs_engine *engine, bool *said);

/* The rank whose buffers count; marks the begin and end of collectives at the start of a forward, in which all ranks
 * take part. */
int zs_join_source(const zs_engine *engine);
void zs_join_meetings(zs_engine *engine, bool begin);

/* Does this rank follow others? */
bool zs_join_follows(const zs_engine *engine);

/* --- join_follow.c ------------------------------------------------------------------------------------------------ */

/* Follows the ranks that have data until one of them announces a call of Python's (*called), which this rank must make
 * too, or until all ranks' data has ended. */
zs_status zs_engine_follow(zs_engine *engine, bool *called);

#endif
