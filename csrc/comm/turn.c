/* turn.c - compares the turns of all ranks. See turn.h.
 *
 * All ranks have the same turns, and every function here depends on nothing else, so all ranks conclude the same.
 * tests/c/check_turn.c compares turns of all kinds. */
#include "comm/turn.h"

#include <stdio.h>
#include <string.h>

enum { OWNER = 96 };

zs_turn zs_turn_of(zs_turn_kind kind, uint64_t number, size_t bytes, const char *name)
{
    zs_turn turn;
    memset(&turn, 0, sizeof turn); /* compared byte for byte */
    turn.kind = kind;
    turn.number = number;
    turn.bytes = bytes;
    if (name != NULL) snprintf(turn.name, sizeof turn.name, "%s", zs_unit_label(name));
    return turn;
}

/* --- comparing ---------------------------------------------------------------------------------------------------- */

bool zs_turns_same(const zs_turn *a, const zs_turn *b)
{
    return a->kind == b->kind && a->number == b->number && a->round == b->round && a->bytes == b->bytes &&
           memcmp(a->name, b->name, sizeof a->name) == 0;
}

/* Do parameters or their gradients travel? */
static bool is_of_parameters(const zs_turn *turn)
{
    return turn->kind == ZS_TURN_GATHER || turn->kind == ZS_TURN_POST;
}

static bool are_synced(const zs_turn *a, const zs_turn *b)
{
    zs_fingerprint other = b->fingerprint;
    if (a->kind != ZS_TURN_POST || b->kind != ZS_TURN_POST)
        other.grads = a->fingerprint.grads; /* a gather needs none */
    return memcmp(&other, &a->fingerprint, sizeof other) == 0;
}

/* A rank that evaluates may gather with others that train, but only if none has swapped other weights in. If all have,
 * by hand, one may be ahead of another in their step, and in its backward. */
static int find_unsynced(const zs_turn *turns, int world)
{
    int changed = -1, n = 0, looks = 0;
    bool same = true;
    for (int r = 0; r < world; r++) {
        same &= zs_reading_alike(turns[r].reading, turns->reading);
        looks += zs_reading_is_look(turns[r].reading);
        if (!zs_reading_changed(turns[r].reading)) continue;
        if (n++ == 0) changed = r;
    }
    bool together = same || n == 0 || (n == world && looks == 0);
    return together ? -1 : changed;
}

/* Will all ranks contribute their shards of the model? */
static bool is_served(const zs_turn *turns, int world, uint64_t model)
{
    for (int r = 0; r < world; r++) {
        bool serves = false;
        for (int i = 0; i < ZS_TURN_SERVES; i++)
            serves |= turns[r].serves[i] == (uint32_t)model;
        if (!serves) return false;
    }
    return true;
}

/* A rank that left a unit out catches up soonest if the others gather in the order of its pass. */
static bool is_before(const zs_turn *a, const zs_turn *b)
{
    bool back = zs_reading_is_backward(a->reading), other_back = zs_reading_is_backward(b->reading);
    if (back != other_back) return other_back;
    return back ? a->number > b->number : a->number < b->number;
}

/* The rank whose gather comes next; -1: there is none that all can take part in. */
static int choose(const zs_turn *turns, int world)
{
    int chosen = -1;
    for (int r = 0; r < world; r++) {
        const zs_turn *turn = &turns[r];
        bool can = turn->kind == ZS_TURN_GATHER && turn->joinable && turn->model != 0;
        if (can && is_served(turns, world, turn->model) && (chosen < 0 || is_before(turn, &turns[chosen]))) chosen = r;
    }
    return chosen;
}

zs_comparison zs_turns_compare(const zs_turn *turns, int world)
{
    zs_comparison all = {.same = true, .synced = true, .gather = -1, .gave_up = -1, .unsynced = -1};
    for (int r = world - 1; r >= 0; r--) {
        all.same &= zs_turns_same(&turns[r], turns);
        all.synced &= are_synced(&turns[r], turns);
        if (turns[r].kind == ZS_TURN_GIVE_UP) all.gave_up = r;
    }
    all.synced |= all.same && !is_of_parameters(turns);
    if (!all.same && all.gave_up < 0) all.gather = choose(turns, world);
    if (all.gather >= 0 || (all.same && turns->kind == ZS_TURN_GATHER)) all.unsynced = find_unsynced(turns, world);
    return all;
}

bool zs_turns_same_slots(const zs_turn *turns, int world, int per_host)
{
    for (int r = 0; r < world; r++)
        if (turns[r].slot == 0 || turns[r].slot != turns[r - r % per_host].slot) return false;
    return true;
}

bool zs_turns_fingerprints(const zs_turn *turns, int world, bool all, zs_fingerprint *out)
{
    bool looks = false;
    for (int r = 0; r < world; r++) {
        looks |= zs_reading_is_look(turns[r].reading);
        bool counts = all || (zs_turns_same(&turns[r], turns) && is_of_parameters(turns));
        out[r] = turns[counts ? r : 0].fingerprint;
        if (are_synced(&turns[r], turns)) out[r].grads = out[0].grads;
    }
    return looks;
}

/* --- explaining --------------------------------------------------------------------------------------------------- */

typedef void describer(const zs_turn *, const char *owner, char *text, size_t size);

/* Names the model if two must be distinguished. */
static void describe_beside(const zs_turn *turn, const zs_turn *other, describer *describe, char *text, size_t size)
{
    char owner[OWNER] = "";
    if (turn->model != 0 && other->model != 0 && turn->model != other->model)
        snprintf(owner, sizeof owner, " of model %llu (%s)", (unsigned long long)turn->model, turn->owner);
    describe(turn, owner, text, size);
}

/* Are two ranks within the same call, so that its name does not show the difference? */
static bool same_call(const zs_turn *a, const zs_turn *b)
{
    return zs_turn_talks(a) && zs_turn_talks(b) && a->name[0] != 0 && strcmp(a->name, b->name) == 0;
}

static zs_status explain_gave_up(const zs_turn *turns, int who, int own, const char *failures)
{
    char phrase[ZS_TURN_PHRASE];
    zs_turn_describe(&turns[own], "", phrase, sizeof phrase);
    return ZS_FAIL(
        ZS_ERR_DIVERGED,
        "rank %d abandoned its backward (probably after a caught exception) while rank %d was %s%s; the gradients "
        "of this step are incomplete: skip the step on all ranks",
        who, own, phrase, failures);
}

zs_status zs_turns_explain(const zs_turn *turns, int world, int own, const char *failures)
{
    char ours[ZS_TURN_PHRASE], theirs[ZS_TURN_PHRASE];
    int gave_up = zs_turns_compare(turns, world).gave_up, other = 0;
    if (gave_up >= 0) return explain_gave_up(turns, gave_up, own, failures);
    while (other + 1 < world && zs_turns_same(&turns[other], &turns[own]))
        other++;
    const zs_turn *mine = &turns[own], *its = &turns[other];
    describe_beside(mine, its, zs_turn_describe_here, ours, sizeof ours);
    describe_beside(its, mine, zs_turn_describe, theirs, sizeof theirs);
    if (same_call(mine, its)) {
        zs_turn_describe_talk(mine, ours, sizeof ours);
        zs_turn_describe_talk(its, theirs, sizeof theirs);
    }
    return ZS_FAIL(
        ZS_ERR_DIVERGED,
        "ranks diverged: rank %d was %s, but rank %d was %s%s; run the same forwards, backwards and collectives "
        "on all ranks (over c10d, also the units in the same order)%s",
        own, ours, other, theirs, failures, is_of_parameters(mine) || is_of_parameters(its) ? ZS_UNEVEN : "");
}
