/* c10d_turn.c - before each collective: do all ranks mean the same one? and the wait for it. See c10d.h.
 *
 * The one idea: a process group pairs collectives up by their order alone. So each is preceded by a small gather, always of
 * one size, in which every rank says what comes next. Ranks that went different ways (a backward skipped, another model)
 * get an error that says which; without it they would sum what does not belong together, or gloo, finding a message of
 * another length, would end the process.
 */
#define _GNU_SOURCE /* strdup */
#include "comm/c10d/c10d.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Seconds: one look at the peers' lives and for Ctrl-C; between two looks for last words; that the end of a process may
 * come later than the end of its connections; from finding a peer gone until a wait that goes on is given up. */
static const double slice = 0.1, ask_every = 2.0, straggle = 2.0, grace = 1.0;

enum { PHRASE = 256, WORDS = 512 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- turns -------------------------------------------------------------------------------------------------------------- */

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

/* What a rank does, as a phrase that fits behind "rank 0 was". */
static void describe(const zs_c10d_turn *turn, char *text, size_t size)
{
    unsigned long long number = turn->number, round = turn->round, bytes = turn->bytes;
    switch ((zs_c10d_kind)turn->kind) {
    case ZS_C10D_GATHER:
        snprintf(text, size, "all-gathering parameters of unit '%s' (%llu bytes)", turn->name, bytes);
        return;
    case ZS_C10D_POST: snprintf(text, size, "reducing gradients of unit '%s' (round %llu)", turn->name, round); return;
    case ZS_C10D_SHARE:
        snprintf(text, size, "all-gathering reduced gradients of unit '%s' (round %llu)", turn->name, round);
        return;
    case ZS_C10D_EXCHANGE: snprintf(text, size, "all-gathering message %llu (%llu bytes)", number, bytes); return;
    case ZS_C10D_BROADCAST:
        snprintf(text, size, "broadcasting %llu bytes from rank %llu (message %llu)", bytes, round, number);
        return;
    case ZS_C10D_GIVE_UP: snprintf(text, size, "abandoning its backward"); return;
    }
    snprintf(text, size, "in an unknown collective (a different zshard version?)");
}

/* Has a rank given up the backward in which this one is? */
static zs_status check_gave_up(zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    const zs_c10d_turn *own = &turns[comm->base.rank];
    for (int r = 0; r < comm->base.world; r++) {
        if (turns[r].kind != ZS_C10D_GIVE_UP) continue;
        char phrase[PHRASE], mishaps[ZS_MISHAPS];
        describe(own, phrase, sizeof phrase);
        zs_comm_mishaps(&comm->base, mishaps, sizeof mishaps);
        comm->base.heard = true;
        return ZS_FAIL(
            ZS_ERR_DIVERGED,
            "rank %d abandoned its backward (probably after a caught exception) while rank %d was %s%s; the gradients "
            "of this step are incomplete: skip the step on all ranks",
            r, comm->base.rank, phrase, mishaps);
    }
    return ZS_OK;
}

/* Do two ranks mean the same, for whichever pass, and with whichever past? */
static bool alike(const zs_c10d_turn *a, const zs_c10d_turn *b)
{
    zs_c10d_turn other = *b;
    other.reading = a->reading;
    other.past = a->past;
    return memcmp(&other, a, sizeof other) == 0;
}

static bool all_alike(const zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    for (int r = 1; r < comm->base.world; r++)
        if (!alike(&turns[r], turns) || memcmp(&turns[r].past, &turns->past, sizeof turns->past) != 0) return false;
    return true;
}

/* A rank that evaluates may gather with others that train, but only if none has other weights swapped in. */
static zs_status check_readings(const zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    int changed = -1;
    bool same = true;
    for (int r = 0; r < comm->base.world; r++) {
        same &= zs_reading_alike(turns[r].reading, turns->reading);
        if (changed < 0 && zs_reading_changed(turns[r].reading)) changed = r;
    }
    return same || changed < 0 ? ZS_OK : zs_comm_fail_apart(&comm->base, changed);
}

/* All ranks have seen that turns differ: they tell each other what they have words for, before they say so. */
static void learn_words(zs_c10d_comm *comm, const zs_c10d_turn *turn)
{
    zs_words *others = calloc((size_t)comm->base.world, sizeof *others);
    zs_mem *area = NULL;
    size_t bytes = (size_t)comm->base.world * sizeof(zs_words);
    if (zs_c10d_borrow_area(comm, bytes + sizeof(zs_words), &area) != ZS_OK) {
        free(others);
        return;
    }
    char *all = area->ptr, *mine = all + bytes;
    memcpy(mine, &comm->base.words, sizeof(zs_words));
    zs_work *work = NULL;
    zs_status status = zs_group_all_gather(comm->group, mine, all, sizeof(zs_words), comm->base.world, &work);
    ZS_THEN(status, zs_c10d_finish(comm, turn, work, NULL));
    if (status == ZS_OK && others != NULL) memcpy(others, all, bytes);
    zs_comm_set_others(&comm->base, others);
    zs_c10d_return_area(comm, &area);
    zs_clear_error();
}

/* Do the ranks mean the same, but with parameters of different steps? */
static zs_status compare_pasts(zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    zs_past pasts[comm->base.world];
    for (int r = 0; r < comm->base.world; r++)
        pasts[r] = turns[alike(&turns[r], turns) ? r : 0].past;
    return zs_comm_check_pasts(&comm->base, pasts);
}

static zs_status compare(zs_c10d_comm *comm, const zs_c10d_turn *turns)
{
    int own = comm->base.rank;
    if (all_alike(comm, turns)) return check_readings(comm, turns);
    learn_words(comm, &turns[own]);
    if (turns[own].kind == ZS_C10D_GIVE_UP) return ZS_OK; /* whatever the others are at, they hear of it */
    ZS_TRY(check_gave_up(comm, turns));
    ZS_TRY(compare_pasts(comm, turns));
    char mishaps[ZS_MISHAPS];
    zs_comm_mishaps(&comm->base, mishaps, sizeof mishaps);
    for (int r = 0; r < comm->base.world; r++) {
        if (alike(&turns[r], &turns[own])) continue;
        char ours[PHRASE], theirs[PHRASE];
        describe(&turns[own], ours, sizeof ours);
        describe(&turns[r], theirs, sizeof theirs);
        return ZS_FAIL(
            ZS_ERR_DIVERGED,
            "ranks diverged: rank %d was %s, but rank %d was %s%s; run the same forwards, backwards and collectives "
            "on all ranks (over c10d, also the units in the same order)",
            own, ours, r, theirs, mishaps);
    }
    return check_readings(comm, turns); /* they differ in what words have made good */
}

zs_status zs_c10d_agree(zs_c10d_comm *comm, const zs_c10d_turn *turn)
{
    if (comm->base.lost != NULL)
        return ZS_FAIL(ZS_ERR_PEER,
                       "cannot run a collective on this process group after an earlier failure; restart all ranks: %s",
                       comm->base.lost);
    zs_mem *area = NULL;
    ZS_TRY(zs_c10d_borrow_area(comm, (size_t)(comm->base.world + 1) * sizeof *turn, &area));
    zs_c10d_turn *turns = area->ptr, *mine = turns + comm->base.world;
    *mine = *turn;
    if (turn->kind == ZS_C10D_GATHER || turn->kind == ZS_C10D_POST) mine->past = comm->base.past;
    if (turn->kind == ZS_C10D_GATHER) {
        mine->reading = comm->base.reading;
        mine->past.grads = 0; /* a gather reads none */
    }
    zs_work *work = NULL;
    zs_group_set_timeout(comm->group, comm->base.timeout);
    zs_status status = zs_group_all_gather(comm->group, mine, turns, sizeof *turn, comm->base.world, &work);
    status = status == ZS_OK ? zs_c10d_finish(comm, turn, work, NULL) : zs_c10d_fail(comm, turn, status);
    ZS_THEN(status, compare(comm, turns));
    if (status != ZS_OK) comm->base.failed = true;
    zs_c10d_return_area(comm, &area);
    return status;
}

/* --- failures ----------------------------------------------------------------------------------------------------------- */

/* Looks for who is gone; the end of a process may show a little later than the end of its connections. */
static bool look_for_gone(zs_c10d_comm *comm, double patience, char *sentence, size_t size)
{
    double end = now() + patience;
    for (;;) {
        bool last = now() >= end;
        if (zs_c10d_find_gone(comm, last || patience == 0, sentence, size)) return true;
        if (last) return false;
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
}

zs_status zs_c10d_fail(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_status status)
{
    char words[WORDS], phrase[PHRASE], who[WORDS];
    snprintf(words, sizeof words, "%s", zs_last_message());
    zs_clear_error();
    describe(turn, phrase, sizeof phrase);
    int own = comm->base.rank;
    if (look_for_gone(comm, status == ZS_ERR_PEER ? straggle : 0, who, sizeof who)) {
        status = ZS_FAIL(ZS_ERR_PEER, "%s; rank %d was %s: %s", who, own, phrase, words);
    } else {
        zs_c10d_name_others(comm, who, sizeof who);
        if (status == ZS_ERR_TIMEOUT)
            status = ZS_FAIL(
                status, "rank %d timed out after %.1f s waiting for %s while %s; raise timeout if it is only slow: %s",
                own, comm->base.timeout, who, phrase, words);
        else if (status == ZS_ERR_PEER)
            status = ZS_FAIL(status, "%s exited or is unreachable; rank %d was %s: %s", who, own, phrase, words);
        else
            status = ZS_FAIL(status, "rank %d failed while %s: %s", own, phrase, words);
    }
    if (comm->base.lost == NULL) comm->base.lost = strdup(zs_last_message());
    return status;
}

/* --- waiting -------------------------------------------------------------------------------------------------------------- */

/* What a wait has seen so far, in seconds of now(). */
typedef struct patience {
    double asked; /* the store, last */
    double gone;  /* a peer was first seen to be gone; 0: none */
} patience;

/* Fails if the wait is to be broken off. */
static zs_status check_wait(zs_c10d_comm *comm, patience *seen)
{
    char who[WORDS];
    double time = now();
    if (zs_comm_interrupted()) return ZS_FAIL(ZS_ERR_TORCH, "interrupted while waiting for another rank");
    bool ask = time - seen->asked > ask_every;
    if (ask) seen->asked = time;
    if (!zs_c10d_find_gone(comm, ask, who, sizeof who)) return ZS_OK;
    if (seen->gone == 0) seen->gone = time;
    if (time - seen->gone < grace) return ZS_OK; /* what it has sent before may be enough for us */
    return ZS_FAIL(ZS_ERR_PEER, "the collective cannot complete without that rank");
}

/* torch's threads will write to the memory whenever the missing peer comes. */
static void leave_behind(zs_c10d_comm *comm, zs_work *work, zs_mem *memory)
{
    zs_c10d_stray *stray = malloc(sizeof *stray);
    if (stray == NULL) return; /* lost without a trace is as good */
    *stray = (zs_c10d_stray){work, memory != NULL ? zs_mem_retain(memory) : NULL, comm->strays};
    comm->strays = stray;
}

zs_status zs_c10d_finish(zs_c10d_comm *comm, const zs_c10d_turn *turn, zs_work *work, zs_mem *memory)
{
    patience seen = {.asked = now()};
    for (;;) {
        bool done = false;
        zs_status status = zs_work_wait(work, slice, &done);
        if (done) zs_work_free(work);
        if (done && status == ZS_OK) return ZS_OK;
        if (done) return zs_c10d_fail(comm, turn, status);
        status = check_wait(comm, &seen);
        if (status == ZS_OK) continue;
        leave_behind(comm, work, memory);
        if (status == ZS_ERR_PEER) return zs_c10d_fail(comm, turn, status);
        if (comm->base.lost == NULL)
            comm->base.lost = strdup("a wait was interrupted (Ctrl-C) while its collective was in flight");
        return status;
    }
}

/* --- areas ---------------------------------------------------------------------------------------------------------------- */

zs_status zs_c10d_borrow_area(zs_c10d_comm *comm, size_t bytes, zs_mem **area)
{
    if (comm->areas == NULL) ZS_TRY(zs_arena_new(comm->base.device, &comm->areas));
    return zs_arena_take(comm->areas, bytes, area);
}

void zs_c10d_return_area(zs_c10d_comm *comm, zs_mem **area)
{
    if (*area != NULL) zs_arena_give(comm->areas, *area);
    *area = NULL;
}

void zs_c10d_free_areas(zs_c10d_comm *comm)
{
    if (comm->strays != NULL) return;
    zs_arena_free(comm->areas);
    comm->areas = NULL;
}
