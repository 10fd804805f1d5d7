/* join.c - see join.h. */
#include "engine/join.h"

#include "comm/where.h"
#include "engine/engine_inside.h"
#include "reduce/grads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct zs_join {
    zs_meeting meeting; /* first: the transport calls it before a collective */
    zs_engine *engine;  /* borrowed */
    bool by_all, throws;
    bool follows;    /* this rank's data has ended */
    bool shadowed;   /* some rank's had, at the last announcement */
    bool over;       /* all ranks know that it has failed */
    bool in_forward; /* a session that was announced is open */
    bool has_followed;
    zs_join_news news;
    zs_join_message said[]; /* [world] the announcement that is exchanged */
};

enum { PHRASE = 300 };

/* --- words -------------------------------------------------------------------------------------------------------- */

static const char *unit_name(const zs_engine *engine, uint32_t number)
{
    return number < zs_engine_n_units(engine) ? zs_unit_label(zs_engine_unit(engine, number)->name) : "?";
}

/* What a rank does, as a phrase that fits behind "rank 0 was". */
static void describe(const zs_engine *engine, const zs_join_message *word, char *text, size_t size)
{
    const char *name = unit_name(engine, word->number);
    switch ((zs_join_act)word->act) {
    case ZS_JOIN_ENDED: snprintf(text, size, "out of data"); return;
    case ZS_JOIN_FORWARD: snprintf(text, size, "beginning a forward"); return;
    case ZS_JOIN_FORWARD_END: snprintf(text, size, "ending a forward"); return;
    case ZS_JOIN_GATHER: snprintf(text, size, "all-gathering parameters of unit '%s'", name); return;
    case ZS_JOIN_BACKWARD: snprintf(text, size, "beginning a backward"); return;
    case ZS_JOIN_POST: snprintf(text, size, "reducing gradients of unit '%s'", name); return;
    case ZS_JOIN_BACKWARD_END: snprintf(text, size, "ending a backward"); return;
    case ZS_JOIN_ABANDON: snprintf(text, size, "abandoning its backward"); return;
    case ZS_JOIN_MEETING: snprintf(text, size, "in another collective"); return;
    case ZS_JOIN_FAILED:
    case ZS_JOIN_CALL: break;
    }
    snprintf(text, size, "%.*s", (int)sizeof word->text, word->text);
}

/* --- saying and hearing ------------------------------------------------------------------------------------------- */

static zs_comm *all_of(const zs_join *join)
{
    return join->engine->context.ranks.all;
}

static bool has_data(const zs_join_message *word)
{
    return word->act != ZS_JOIN_ENDED;
}

/* Counts the ranks with data; or if none has, finds the last that had. */
static void count(zs_join *join, const zs_join_message *said)
{
    zs_join_news news = {.leader = -1, .followed = join->news.followed};
    int world = all_of(join)->world;
    for (int r = 0; r < world; r++)
        news.n_active += has_data(&said[r]);
    for (int r = 0; r < world; r++) {
        bool counts = news.n_active > 0 ? has_data(&said[r]) : said[r].bits != 0;
        if (!counts) continue;
        if (news.leader < 0) news.leader = r;
        news.latest = r;
    }
    if (news.leader < 0) news.leader = 0;
    news.word = said[news.leader];
    join->shadowed = news.n_active > 0 && news.n_active < world;
    news.followed |= join->shadowed;
    join->news = news;
}

/* Has a rank left by an exception? Then all know. */
static zs_status check_failed(zs_join *join, const zs_join_message *said)
{
    int own = all_of(join)->rank, world = all_of(join)->world;
    for (int r = 0; r < world && !join->over; r++)
        join->over = said[r].act == ZS_JOIN_FAILED;
    if (!join->over || said[own].act == ZS_JOIN_FAILED) return ZS_OK;
    for (int r = 0; r < world; r++)
        if (said[r].act == ZS_JOIN_FAILED)
            return ZS_FAIL(ZS_ERR_DIVERGED,
                           "rank %d left join() by an exception: %.*s; restart training on all ranks, "
                           "or leave join() on all ranks alike",
                           r, (int)sizeof said[r].text, said[r].text);
    return ZS_OK;
}

static zs_status check_abandoned(const zs_join *join, const zs_join_message *said)
{
    zs_comm *all = all_of(join);
    if (said[all->rank].act == ZS_JOIN_ABANDON) return ZS_OK;
    for (int r = 0; r < all->world; r++) {
        if (said[r].act != ZS_JOIN_ABANDON) continue;
        char phrase[PHRASE], failures[ZS_FAILURES];
        describe(join->engine, &said[all->rank], phrase, sizeof phrase);
        zs_comm_failures(all, failures, sizeof failures);
        all->heard = true;
        return ZS_FAIL(ZS_ERR_DIVERGED,
                       "rank %d abandoned its backward (probably after a caught exception) while rank %d was %s%s; the "
                       "gradients of this step are incomplete: skip the step on all ranks",
                       r, all->rank, phrase, failures);
    }
    return ZS_OK;
}

/* Is it to be an error that some rank has no more data? */
static zs_status check_uneven(zs_join *join, const zs_join_message *said)
{
    if (!join->throws || !join->shadowed) return ZS_OK;
    int r = 0;
    while (has_data(&said[r]))
        r++;
    join->over = true;
    return ZS_FAIL(ZS_ERR_STATE,
                   "rank %d has no more data, but %d of %d ranks have some (throw_on_early_termination=True): give all "
                   "ranks as many batches, or pass throw_on_early_termination=False",
                   r, join->news.n_active, all_of(join)->world);
}

/* Are all that have data about to do the same? */
static zs_status check_alike(const zs_join *join, const zs_join_message *said)
{
    const zs_join_message *first = &said[join->news.leader];
    for (int r = 0; r < all_of(join)->world; r++) {
        const zs_join_message *other = &said[r];
        bool abandons = other->act == ZS_JOIN_ABANDON || first->act == ZS_JOIN_ABANDON;
        if (!has_data(other) || abandons || (other->act == first->act && other->number == first->number)) continue;
        char ours[PHRASE], theirs[PHRASE];
        describe(join->engine, first, ours, sizeof ours);
        describe(join->engine, other, theirs, sizeof theirs);
        return ZS_FAIL(ZS_ERR_DIVERGED,
                       "ranks diverged in join(): rank %d was %s, but rank %d was %s; run the same forwards, backwards "
                       "and collectives on all ranks that have data",
                       join->news.leader, ours, r, theirs);
    }
    return ZS_OK;
}

/* Ranks announce in whatever calls they are; those that follow are then in the same one. */
static zs_status announce(zs_comm *all, const zs_join_message *mine, zs_join_message *said)
{
    char call[ZS_CALL] = "join()";
    zs_call_swap(call);
    zs_status status = all->ops->talk->exchange(all, mine, sizeof *mine, said);
    zs_call_swap(call);
    return status;
}

static zs_status exchange(zs_join *join, const zs_join_message *mine)
{
    zs_comm *all = all_of(join);
    zs_join_message *said = join->said;
    if (join->over)
        return ZS_FAIL(ZS_ERR_DIVERGED, "join() has failed on some rank: leave it before you use the model again");
    ZS_TRY(announce(all, mine, said));
    for (int r = 0; r < all->world; r++)
        said[r].text[sizeof said[r].text - 1] = 0;
    ZS_TRY(check_failed(join, said));
    count(join, said);
    ZS_TRY(check_abandoned(join, said));
    ZS_TRY(check_uneven(join, said));
    return join->over ? ZS_OK : check_alike(join, said);
}

static zs_status say(zs_join *join, zs_join_message *mine)
{
    snprintf(mine->call, sizeof mine->call, "%s", mine->act == ZS_JOIN_ENDED ? "join()" : zs_call_name());
    return zs_comm_locate(all_of(join), exchange(join, mine));
}

static zs_status say_act(zs_join *join, zs_join_act act, uint32_t number, uint32_t bits)
{
    zs_join_message word = {.act = act, .number = number, .bits = bits};
    return say(join, &word);
}

/* --- its begin and end -------------------------------------------------------------------------------------------- */

/* Before a collective that ranks without data cannot follow. */
static zs_status ask(zs_meeting *meeting)
{
    zs_join *join = (zs_join *)meeting;
    ZS_TRY(say_act(join, ZS_JOIN_MEETING, 0, 0));
    if (!join->shadowed) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE, "a collective of all ranks (a checkpoint, a state dict, named_norms(), ...) is not "
                                 "possible in join() once a rank has no more data: call it after join()");
}

static void set_meeting(const zs_engine *engine, zs_meeting *meeting)
{
    zs_comm *each[ZS_RANKS];
    size_t n = zs_ranks_list(&engine->context.ranks, each);
    for (size_t i = 0; i < n; i++)
        each[i]->meeting = meeting;
}

zs_status zs_join_begin(zs_engine *engine, bool by_all, bool throws)
{
    if (engine->context.ranks.all->meeting != NULL)
        return ZS_FAIL(ZS_ERR_STATE, "join() is already active on these ranks: leave it before you enter another");
    zs_join *join = calloc(1, sizeof *join + (size_t)engine->context.ranks.all->world * sizeof *join->said);
    if (join == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory beginning join()");
    *join = (zs_join){.meeting.ask = ask, .engine = engine, .by_all = by_all, .throws = throws};
    join->news.n_active = engine->context.ranks.all->world;
    engine->join = join;
    set_meeting(engine, &join->meeting);
    return ZS_OK;
}

/* Rounds are posted in one order on all ranks if each is announced. */
static void set_order(zs_engine *engine, bool told)
{
    zs_schedule *schedule = &engine->context.schedule;
    bool in_order = told || !engine->context.ranks.all->ops->mapped;
    zs_schedule_set_transports(schedule, schedule->gathers_cost, in_order);
}

void zs_join_end(zs_engine *engine)
{
    zs_join *join = engine->join;
    if (join == NULL) return;
    /* Followers have not seen the order in which units were gathered, and all ranks must guess the same. */
    if (join->news.followed) zs_schedule_forget_order(&engine->context.schedule);
    set_order(engine, false);
    engine->context.divided_by = 0;
    set_meeting(engine, NULL);
    engine->join = NULL;
    free(join);
}

zs_status zs_join_leave(zs_engine *engine, const char *text)
{
    zs_join *join = engine->join;
    zs_join_message word = {.act = ZS_JOIN_FAILED};
    snprintf(word.text, sizeof word.text, "%s", text);
    if (zs_schedule_settle(&engine->context.schedule) != ZS_OK) zs_clear_error(); /* the exception is what counts */
    zs_status status = ZS_ERR_DIVERGED;
    while (!join->over && status == ZS_ERR_DIVERGED) { /* the others were in another call, and have learned it */
        zs_clear_error();
        status = say(join, &word);
    }
    zs_clear_error();
    return ZS_OK;
}

/* --- Python's calls ----------------------------------------------------------------------------------------------- */

zs_status zs_join_call(zs_engine *engine, uint32_t number, const char *text, int meetings, bool *followed)
{
    zs_join *join = engine->join;
    zs_join_message word = {.act = ZS_JOIN_CALL, .number = number};
    snprintf(word.text, sizeof word.text, "%s", text);
    ZS_TRY(zs_schedule_settle(&engine->context.schedule));
    ZS_TRY(say(join, &word));
    join->meeting.expected = meetings;
    *followed = join->shadowed;
    return ZS_OK;
}

zs_status zs_join_share(zs_engine *engine, void *data, size_t bytes)
{
    zs_comm *all = engine->context.ranks.all;
    return all->ops->talk->broadcast(all, data, bytes, engine->join->news.leader);
}

void zs_join_follow(zs_engine *engine)
{
    zs_join *join = engine->join;
    join->follows = true;
    join->meeting.expected = -1; /* it takes part only in announced collectives */
}

zs_status zs_join_receive(zs_engine *engine)
{
    zs_join *join = engine->join;
    ZS_TRY(say_act(join, ZS_JOIN_ENDED, 0, !join->has_followed));
    join->has_followed |= join->news.n_active > 0;
    char call[ZS_CALL] = "";
    snprintf(call, sizeof call, "%.*s", ZS_CALL - 1, join->news.word.call);
    zs_call_swap(call); /* until this rank's own call of join() returns */
    return ZS_OK;
}

const zs_join_news *zs_join_received(const zs_engine *engine)
{
    return engine->join != NULL ? &engine->join->news : NULL;
}

bool zs_join_follows(const zs_engine *engine)
{
    return engine->join != NULL && engine->join->follows;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static size_t n_params(const zs_engine *engine)
{
    size_t n = 0;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        n += (size_t)zs_engine_unit(engine, i)->n_params;
    return n;
}

/* A replicated unit's gradient is part of what it posts: of those that follow, only where the sum is divided by all
 * ranks. */
static zs_status follow_grads(const zs_engine *engine, const unsigned char *held)
{
    for (size_t i = 0; i < zs_engine_n_units(engine); i++) {
        zs_unit *unit = zs_engine_unit(engine, i);
        ZS_TRY(zs_grads_follow(unit, held, unit->record.is.replicated && !engine->join->by_all));
        held += unit->n_params;
    }
    return ZS_OK;
}

zs_status zs_join_align(zs_engine *engine)
{
    size_t n = n_params(engine);
    unsigned char *held = calloc(n + 1, 1), *at = held;
    if (held == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing gradients in join()");
    zs_status status = ZS_OK;
    for (size_t i = 0; i < zs_engine_n_units(engine) && status == ZS_OK; i++) {
        const zs_unit *unit = zs_engine_unit(engine, i);
        status = zs_grads_held(unit, at);
        at += unit->n_params;
    }
    ZS_THEN(status, zs_join_share(engine, held, n + 1));
    if (engine->join->follows) ZS_THEN(status, follow_grads(engine, held));
    free(held);
    return status;
}

/* --- what the actions tell ---------------------------------------------------------------------------------------- */

/* Does this rank announce what it does? */
static bool tells(const zs_engine *engine)
{
    return engine->join != NULL && !engine->join->follows;
}

/* Another model of the same ranks, which no rank would follow. */
static zs_status check_other(const zs_engine *engine)
{
    if (engine->join != NULL || engine->context.ranks.all->meeting == NULL) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE,
                   "another model is used within join() of a model of the same ranks, where ranks without "
                   "data could not follow it: make both models parts of one module that you shard");
}

/* A replay of a graph announces nothing. */
static zs_status check_capture(const zs_engine *engine)
{
    bool captures = false;
    if (engine->join != NULL) ZS_TRY(zs_device_capturing(zs_context_device(&engine->context), &captures));
    if (!captures) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE, "a CUDA graph is captured in join(), where ranks without data could not follow its "
                                 "replays: capture and replay graphs outside of join()");
}

zs_status zs_join_forward(zs_engine *engine, const zs_entry *entry, bool meets)
{
    zs_join *join = engine->join;
    ZS_TRY(check_capture(engine));
    if (!meets) return ZS_OK;
    ZS_TRY(check_other(engine));
    if (!tells(engine)) return ZS_OK;
    uint32_t bits = (entry->training ? ZS_JOIN_TRAINING : 0) | (entry->recording ? ZS_JOIN_RECORDING : 0) |
                    (entry->by_hand ? ZS_JOIN_BY_HAND : 0);
    ZS_TRY(say_act(join, ZS_JOIN_FORWARD, entry->by_hand, bits));
    join->in_forward = true;
    if (!entry->by_hand || !join->shadowed) return ZS_OK;
    join->in_forward = false;
    return ZS_FAIL(ZS_ERR_STATE, "full parameters cannot be read in join() once a rank has no more data, as all ranks "
                                 "would have to gather them: do so after join(), or use transport='shm'");
}

zs_status zs_join_forward_end(zs_engine *engine)
{
    zs_join *join = engine->join;
    if (!tells(engine) || !join->in_forward) return ZS_OK;
    join->in_forward = false;
    bool told = join->shadowed && zs_join_gathers(engine) && !join->over;
    return told ? say_act(join, ZS_JOIN_FORWARD_END, 0, 0) : ZS_OK;
}

bool zs_join_gathers(const zs_engine *engine)
{
    return engine->context.schedule.gathers_cost;
}

zs_status zs_join_unit(zs_engine *engine, zs_join_act act, const zs_record *record)
{
    if (!tells(engine) || !engine->join->shadowed) return ZS_OK;
    if (act == ZS_JOIN_GATHER && !zs_join_gathers(engine)) return ZS_OK;
    uint32_t i = 0;
    while (engine->context.schedule.records[i] != record)
        i++;
    return say_act(engine->join, act, i, 0);
}

zs_status zs_join_backward(zs_engine *engine)
{
    zs_join *join = engine->join;
    ZS_TRY(check_other(engine));
    if (join == NULL) return ZS_OK;
    if (!join->follows) ZS_TRY(say_act(join, ZS_JOIN_BACKWARD, 0, 0));
    if (!join->follows && join->shadowed) ZS_TRY(zs_join_align(engine));
    set_order(engine, join->shadowed);
    engine->context.divided_by = join->by_all ? 0 : join->news.n_active;
    return ZS_OK;
}

zs_status zs_join_backward_end(zs_engine *engine)
{
    if (!tells(engine) || !engine->join->shadowed || engine->context.schedule.gave_up) return ZS_OK;
    return say_act(engine->join, ZS_JOIN_BACKWARD_END, 0, 0);
}

zs_status zs_join_abandon(zs_engine *engine, bool *said)
{
    zs_join *join = engine->join;
    bool mapped = engine->context.ranks.all->ops->mapped;
    *said = mapped || (join != NULL && join->shadowed); /* otherwise the transport tells them */
    if (!*said || join == NULL || join->over) return ZS_OK;
    return say_act(join, ZS_JOIN_ABANDON, 0, 0);
}

int zs_join_source(const zs_engine *engine)
{
    return engine->join != NULL ? engine->join->news.latest : 0;
}

void zs_join_meetings(zs_engine *engine, bool begin)
{
    if (tells(engine)) engine->join->meeting.expected = begin ? -1 : 0;
}
