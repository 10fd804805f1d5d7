/* c10d_turn.c - before each collective: do all ranks run the same one? See c10d.h.
 *
 * A process group pairs collectives up by order alone. So a small gather of fixed size precedes each, in which every
 * rank sends what comes next. A unit that some ranks leave out is gathered all the same (c10d_serve.c). Ranks that
 * diverged (a skipped backward, another model) get an error that says how; without it they would sum unrelated data,
 * or gloo would abort the process on a message of another length. */
#include "comm/c10d/c10d.h"
#include "comm/where.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OWNER = 96 };

/* --- turns -------------------------------------------------------------------------------------------------------- */

zs_c10d_turn zs_c10d_turn_of(zs_c10d_kind kind, uint64_t number, size_t bytes, const char *name)
{
    zs_c10d_turn turn;
    memset(&turn, 0, sizeof turn); /* compared byte for byte */
    turn.kind = kind;
    turn.number = number;
    turn.bytes = bytes;
    if (name != NULL) snprintf(turn.name, sizeof turn.name, "%s", zs_unit_label(name));
    return turn;
}

zs_c10d_turn zs_c10d_talk_turn(const zs_c10d_comm *comm, zs_c10d_kind kind, size_t bytes)
{
    zs_c10d_turn turn = zs_c10d_turn_of(kind, comm->messages, bytes, NULL);
    snprintf(turn.name, sizeof turn.name, "%s", zs_call_name());
    return turn;
}

static void describe(const zs_c10d_turn *turn, char *text, size_t size)
{
    zs_c10d_describe(turn, "", text, size);
}

typedef void words_of(const zs_c10d_turn *, const char *owner, char *text, size_t size);

/* The same, with the model if two must be told apart. */
static void describe_beside(const zs_c10d_turn *turn, const zs_c10d_turn *other, words_of *say, char *text, size_t size)
{
    char owner[OWNER] = "";
    if (turn->model != 0 && other->model != 0 && turn->model != other->model)
        snprintf(owner, sizeof owner, " of model %llu (%s)", (unsigned long long)turn->model, turn->owner);
    say(turn, owner, text, size);
}

/* Has a rank abandoned the backward that this rank is in? */
static zs_status check_gave_up(zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    const zs_c10d_turn *own = &turns[comm->base.rank];
    for (int r = 0; r < comm->base.world; r++) {
        if (turns[r].kind != ZS_C10D_GIVE_UP) continue;
        char phrase[ZS_C10D_PHRASE], failures[ZS_FAILURES];
        describe(own, phrase, sizeof phrase);
        zs_comm_failures(&comm->base, failures, sizeof failures);
        comm->base.heard = true;
        return ZS_FAIL(
            ZS_ERR_DIVERGED,
            "rank %d abandoned its backward (probably after a caught exception) while rank %d was %s%s; the gradients "
            "of this step are incomplete: skip the step on all ranks",
            r, comm->base.rank, phrase, failures);
    }
    return ZS_OK;
}

/* Do two ranks have the same turn, for any pass and any fingerprint? An equivalence: where all ranks have the turn of
 * one of them, any two have the same. */
static bool alike(const zs_c10d_turn *a, const zs_c10d_turn *b)
{
    return a->kind == b->kind && a->number == b->number && a->round == b->round && a->bytes == b->bytes &&
           memcmp(a->name, b->name, sizeof a->name) == 0;
}

/* Do parameters or their gradients travel? */
static bool is_of_parameters(const zs_c10d_turn *turn)
{
    return turn->kind == ZS_C10D_GATHER || turn->kind == ZS_C10D_POST;
}

static bool same_past(const zs_c10d_turn *a, const zs_c10d_turn *b)
{
    zs_fingerprint other = b->fingerprint;
    if (a->kind != ZS_C10D_POST || b->kind != ZS_C10D_POST)
        other.grads = a->fingerprint.grads; /* a gather needs none */
    return memcmp(&other, &a->fingerprint, sizeof other) == 0;
}

static bool all_alike(const zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    for (int r = 1; r < comm->base.world; r++)
        if (!alike(&turns[r], turns) || (is_of_parameters(turns) && !same_past(&turns[r], turns))) return false;
    return true;
}

/* The rank that has changed its parameters, if ranks cannot gather together because of that; -1: they can.
 *
 * A rank that evaluates may gather with others that train, but only if none has swapped other weights in. If all
 * have, by hand, one may be ahead of another in their step, and in its backward. */
static int find_apart(const zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    int changed = -1, n = 0, looks = 0;
    bool same = true;
    for (int r = 0; r < comm->base.world; r++) {
        same &= zs_reading_alike(turns[r].reading, turns->reading);
        looks += zs_reading_is_look(turns[r].reading);
        if (!zs_reading_changed(turns[r].reading)) continue;
        if (n++ == 0) changed = r;
    }
    bool together = same || n == 0 || (n == comm->base.world && looks == 0);
    return together ? -1 : changed;
}

bool zs_c10d_all_agree(const zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    return all_alike(comm, turns) && (turns->kind != ZS_C10D_GATHER || find_apart(comm, turns) < 0);
}

/* Gets all ranks' texts [world], over the group. */
static zs_status gather_words(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_diagnostics *others)
{
    size_t bytes = (size_t)comm->base.world * sizeof *others;
    zs_mem *area = NULL;
    ZS_TRY(zs_c10d_borrow_area(comm, bytes + sizeof *others, &area));
    char *all = area->ptr, *mine = all + bytes;
    memcpy(mine, &comm->base.words, sizeof *others);
    zs_work *work = NULL;
    zs_status status = zs_group_all_gather(comm->group, mine, all, sizeof *others, comm->base.world, &work);
    ZS_THEN(status, zs_c10d_finish(comm, turn, work, NULL));
    if (status == ZS_OK) memcpy(others, all, bytes);
    zs_c10d_return_area(comm, &area);
    return status;
}

/* All ranks have seen that turns differ: they exchange their texts before they report it. A rank that cannot has lost
 * the transport: the others are in that exchange. */
static void learn_words(zs_c10d_comm *comm, const zs_c10d_turn *turn)
{
    zs_diagnostics *others = calloc((size_t)comm->base.world, sizeof *others);
    zs_status status = others == NULL ? ZS_FAIL(ZS_ERR_MEMORY, "out of memory asking what the ranks have done") : ZS_OK;
    zs_comm_look(&comm->base);
    ZS_THEN(status, comm->hooks != NULL ? comm->hooks->exchange_words(comm, others) : gather_words(comm, turn, others));
    if (status != ZS_OK) {
        free(others);
        others = NULL;
        (void)zs_c10d_fail(comm, turn, status);
    }
    zs_comm_set_others(&comm->base, others);
    zs_clear_error();
}

static zs_status check_readings(zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    int changed = find_apart(comm, turns);
    if (changed < 0) return ZS_OK;
    learn_words(comm, &turns[comm->base.rank]);
    return zs_comm_fail_apart(&comm->base, changed);
}

/* If parameters travel: do all ranks have those of the same step? `joined`: whatever each is about to do. Not on the
 * stack: with thousands of ranks it would fill that of a script's thread. */
static zs_status compare_fingerprints(zs_c10d_comm *comm, const zs_c10d_turn *turns, bool joined)
{
    zs_fingerprint *fingerprints = calloc((unsigned)comm->base.world, sizeof *fingerprints);
    if (fingerprints == NULL) /* the others may continue */
        return zs_c10d_fail(comm, &turns[comm->base.rank],
                            ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' steps"));
    bool looks = false;
    for (int r = 0; r < comm->base.world; r++) {
        looks |= zs_reading_is_look(turns[r].reading);
        bool counts = joined || (alike(&turns[r], turns) && is_of_parameters(turns));
        fingerprints[r] = turns[counts ? r : 0].fingerprint;
        if (same_past(&turns[r], turns)) fingerprints[r].grads = fingerprints[0].grads;
    }
    zs_status status = (looks ? zs_comm_check_look : zs_comm_check_fingerprints)(&comm->base, fingerprints);
    free(fingerprints);
    return status;
}

/* What else to do if ranks are at these. */
static const char *remedy_of(const zs_c10d_turn *a, const zs_c10d_turn *b)
{
    bool trains = is_of_parameters(a) || is_of_parameters(b);
    return trains ? ZS_UNEVEN : "";
}

/* The first rank with another turn than this one. */
static int first_unlike(const zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    int r = 0;
    while (r + 1 < comm->base.world && alike(&turns[r], &turns[comm->base.rank]))
        r++;
    return r;
}

/* Are two ranks within the same call, so that its name does not show the difference? */
static bool same_call(const zs_c10d_turn *a, const zs_c10d_turn *b)
{
    return zs_c10d_talks(a) && zs_c10d_talks(b) && a->name[0] != 0 && strcmp(a->name, b->name) == 0;
}

static zs_status fail_apart(zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    int own = comm->base.rank, other = first_unlike(comm, turns);
    char ours[ZS_C10D_PHRASE], theirs[ZS_C10D_PHRASE], failures[ZS_FAILURES];
    zs_comm_failures(&comm->base, failures, sizeof failures);
    describe_beside(&turns[own], &turns[other], zs_c10d_describe_here, ours, sizeof ours);
    describe_beside(&turns[other], &turns[own], zs_c10d_describe, theirs, sizeof theirs);
    if (same_call(&turns[own], &turns[other])) {
        zs_c10d_describe_talk(&turns[own], ours, sizeof ours);
        zs_c10d_describe_talk(&turns[other], theirs, sizeof theirs);
    }
    return ZS_FAIL(
        ZS_ERR_DIVERGED,
        "ranks diverged: rank %d was %s, but rank %d was %s%s; run the same forwards, backwards and collectives "
        "on all ranks (over c10d, also the units in the same order)%s",
        own, ours, other, theirs, failures, remedy_of(&turns[own], &turns[other]));
}

bool zs_c10d_same_slots(const zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    int per_host = comm->base.per_host;
    for (int r = 0; r < comm->base.world; r++)
        if (turns[r].slot == 0 || turns[r].slot != turns[r - r % per_host].slot) return false;
    return true;
}

/* What all ranks find in `turns`, with the same conclusion: *next is the rank whose gather all take part in before
 * they send their turns again, or -1: this rank's turn comes next. */
static zs_status compare(zs_c10d_comm *comm, const zs_c10d_turn *turns, int *next)
{
    int own = comm->base.rank;
    bool same = all_alike(comm, turns), meant = true, joined = true;
    *next = -1;
    if (same) return turns->kind == ZS_C10D_GATHER ? check_readings(comm, turns) : ZS_OK;
    for (int r = 1; r < comm->base.world; r++) {
        meant &= alike(&turns[r], turns);
        joined &= same_past(&turns[r], turns);
    }
    int chosen = meant ? -1 : zs_c10d_choose(comm, turns);
    if (chosen < 0 || !joined) {
        learn_words(comm, &turns[own]);
        if (turns[own].kind == ZS_C10D_GIVE_UP) return ZS_OK; /* the others receive it whatever they are at */
        ZS_TRY(check_gave_up(comm, turns));
        ZS_TRY(compare_fingerprints(comm, turns, chosen >= 0));
    }
    if (chosen < 0 && !meant) return fail_apart(comm, turns);
    ZS_TRY(zs_c10d_check_usable(comm)); /* without the others' texts, they may conclude something else */
    *next = chosen;
    /* If all have the same turn, they differ in what the texts have settled. */
    return chosen >= 0 || turns->kind == ZS_C10D_GATHER ? check_readings(comm, turns) : ZS_OK;
}

static zs_status say_to_all(zs_c10d_comm *comm, const zs_c10d_turn *mine, zs_c10d_turn *turns)
{
    zs_work *work = NULL;
    zs_group_set_timeout(comm->group, comm->base.timeout);
    zs_status status = zs_group_all_gather(comm->group, mine, turns, sizeof *mine, comm->base.world, &work);
    return status == ZS_OK ? zs_c10d_finish_turn(comm, mine, work) : zs_c10d_fail(comm, mine, status);
}

zs_c10d_turn zs_c10d_turn_to_send(const zs_c10d_comm *comm, const zs_c10d_turn *turn)
{
    zs_c10d_turn mine = *turn;
    mine.fingerprint = comm->base.fingerprint;
    mine.reading = comm->base.reading;
    zs_c10d_served(comm, mine.serves);
    if (turn->kind == ZS_C10D_GATHER || turn->kind == ZS_C10D_POST || turn->kind == ZS_C10D_SHARE) {
        mine.model = comm->base.model.number;
        memcpy(mine.owner, comm->base.model.name, sizeof mine.owner);
    }
    return mine;
}

/* Sends this rank's turn, and receives the others'. */
static zs_status say(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_c10d_turn *turns)
{
    zs_c10d_turn *mine = turns + comm->base.world;
    *mine = zs_c10d_turn_to_send(comm, turn);
    return (comm->say != NULL ? comm->say : say_to_all)(comm, mine, turns);
}

zs_status zs_c10d_agree_on(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_c10d_turn *turns)
{
    for (;;) {
        int next = -1;
        ZS_TRY(zs_comm_locate(&comm->base, compare(comm, turns, &next)));
        comm->same_slots = next < 0 && comm->base.per_host > 0 && zs_c10d_same_slots(comm, turns);
        if (next < 0 || alike(&turns[next], &turns[comm->base.rank])) return ZS_OK;
        zs_c10d_turn other = turns[next];
        ZS_TRY(zs_c10d_serve(comm, &other));
        ZS_TRY(say(comm, turn, turns));
    }
}

zs_status zs_c10d_check_usable(const zs_c10d_comm *comm)
{
    if (zs_c10d_is_forked(comm))
        return ZS_FAIL(ZS_ERR_STATE,
                       "a process forked from rank %d cannot use its process group; start it with 'spawn'",
                       comm->base.rank);
    if (comm->base.lost != NULL)
        return ZS_FAIL(ZS_ERR_PEER,
                       "cannot run a collective on this process group after an earlier failure; restart all ranks: %s",
                       comm->base.lost);
    return ZS_OK;
}

zs_status zs_c10d_agree(zs_c10d_comm *comm, const zs_c10d_turn *turn)
{
    ZS_TRY(zs_c10d_check_usable(comm));
    if (comm->hear_said != NULL) ZS_TRY(comm->hear_said(comm));
    zs_mem *area = NULL;
    ZS_TRY(zs_c10d_borrow_area(comm, (size_t)(comm->base.world + 1) * sizeof *turn, &area));
    zs_status status = say(comm, turn, area->ptr);
    ZS_THEN(status, zs_c10d_agree_on(comm, turn, area->ptr));
    if (status != ZS_OK) comm->base.failed = true;
    zs_c10d_return_area(comm, &area);
    return status;
}
