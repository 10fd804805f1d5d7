/* shm_report.c - messages of the shm transport: the waits of ranks, and the reasons of failed ones.
 *
 * Every act has one verb phrase, in the infinitive, that fits after "waiting for rank 1 to" and after "last
 * operation:". So it serves for the missing peer, for a peer's own wait, and for its last act. */
#include "comm/shm/shm.h"

#include "base/log.h"
#include "comm/shm/shm_place.h"
#include "comm/where.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SENTENCE = 320, PLACES = 4 * (ZS_PLACE + 24) };

/* The verb for a round of a unit's gradients; NULL: `what` belongs to no round. */
static const char *round_verb(zs_shm_what what)
{
    switch (what) {
    case ZS_SHM_POSTED: return "reduce gradients";
    case ZS_SHM_SHARED: return "all-gather reduced gradients";
    case ZS_SHM_RELEASED: return "release gradients";
    default: return NULL;
    }
}

/* Is it an exchange or a broadcast? */
static bool is_talk(zs_shm_what what)
{
    return what == ZS_SHM_EXCHANGED || what == ZS_SHM_SENT || what == ZS_SHM_TAKEN;
}

/* The call that an exchange or broadcast of rank `who` belongs to; "": none, or none with a name. */
static const char *call_of(const zs_shm *shm, int who, zs_shm_act act)
{
    return is_talk(act.what) ? shm->peers[who].control->doing : "";
}

/* The peer's contribution to `act` of rank `who`, as in "rank 1's ...": "gradients of unit 'a' (round 2)". */
static void describe(const zs_shm *shm, int who, zs_shm_act act, char *text, size_t size)
{
    const char *name = shm->peers[who].control->heap + act.record; /* a record starts with its name */
    unsigned long long number = act.number;
    if (call_of(shm, who, act)[0] != 0) {
        snprintf(text, size, "join its %s", call_of(shm, who, act));
        return;
    }
    switch (act.what) {
    case ZS_SHM_JOINED: snprintf(text, size, "connect"); return;
    case ZS_SHM_POSTED:
    case ZS_SHM_SHARED:
    case ZS_SHM_RELEASED:
        snprintf(text, size, "%s of unit '%s' (round %llu)", round_verb(act.what), name, number);
        return;
    case ZS_SHM_EXCHANGED: snprintf(text, size, "all-gather message %llu", number); return;
    case ZS_SHM_SENT: snprintf(text, size, "send broadcast chunk %llu", number); return;
    case ZS_SHM_TAKEN: snprintf(text, size, "receive broadcast chunk %llu", number); return;
    case ZS_SHM_FORWARD: snprintf(text, size, "begin forward %llu of '%s' since the last step", number, name); return;
    case ZS_SHM_EVALUATION:
        snprintf(text, size, "change the parameters of '%s' as rank %d has (change %llu since the last backward)", name,
                 who, number);
        return;
    case ZS_SHM_BACKWARD: snprintf(text, size, "begin backward of '%s'", name); return;
    case ZS_SHM_CAUGHT_UP:
        snprintf(text, size, "evaluate '%s' as often as rank %d has, or to change its parameters too", name, who);
        return;
    case ZS_SHM_LEFT_ALONE:
    case ZS_SHM_UNREAD: snprintf(text, size, "finish its pass through '%s'", name); return;
    }
    snprintf(text, size, "run an unknown operation");
}

void zs_shm_describe(const zs_shm *shm, zs_shm_act act, char *text, size_t size)
{
    const char *name = shm->peers[shm->base.rank].control->heap + act.record, *call = call_of(shm, shm->base.rank, act);
    if (call[0] != 0) {
        snprintf(text, size, "join %s", call);
        return;
    }
    switch (act.what) {
    case ZS_SHM_POSTED:
    case ZS_SHM_SHARED:
    case ZS_SHM_RELEASED: snprintf(text, size, "%s of unit '%s'", round_verb(act.what), name); return;
    case ZS_SHM_EXCHANGED: snprintf(text, size, "all-gather a message"); return;
    case ZS_SHM_SENT: snprintf(text, size, "send a broadcast"); return;
    case ZS_SHM_TAKEN: snprintf(text, size, "receive a broadcast"); return;
    case ZS_SHM_FORWARD: snprintf(text, size, "begin forward of '%s'", name); return;
    case ZS_SHM_EVALUATION: snprintf(text, size, "change the parameters of '%s'", name); return;
    default: describe(shm, shm->base.rank, act, text, size);
    }
}

/* The act of rank `r` at that moment: "rank 1 (pid 7) waits for rank 0's ..." or "... has done nothing here since its
 * ...". */
static void describe_rank(const zs_shm *shm, int r, const zs_shm_moment *moment, char *text, size_t size)
{
    char phrase[ZS_SHM_PHRASE];
    describe(shm, r, moment->act, phrase, sizeof phrase);
    int pid = (int)shm->peers[r].pid;
    const char *call = call_of(shm, r, moment->act);
    if (moment->missing >= 0)
        snprintf(text, size, "rank %d (pid %d) is waiting for rank %d to %s", r, pid, moment->missing, phrase);
    else
        snprintf(text, size, "rank %d (pid %d) is not in a zshard collective, last operation: %s", r, pid,
                 call[0] != 0 ? call : phrase);
}

/* The remedy if ranks wait for `act`. */
static const char *remedy_of(zs_shm_act act)
{
    if (is_talk(act.what)) return "call it on all ranks";
    if (act.what == ZS_SHM_FORWARD) return "run a forward that records gradients on all ranks" ZS_ALONE ZS_UNEVEN;
    if (act.what == ZS_SHM_EVALUATION || act.what == ZS_SHM_CAUGHT_UP)
        return "change parameters on all ranks alike, and call torch.distributed.barrier() after code that one rank "
               "runs "
               "alone";
    return "run the same forwards and backwards on all ranks" ZS_UNEVEN;
}

zs_status zs_shm_fail_dead(const zs_shm *shm, zs_shm_act act, int dead, int missing)
{
    char phrase[ZS_SHM_PHRASE], late[32] = "it", places[PLACES];
    zs_shm_list_places(shm, places, sizeof places);
    describe(shm, shm->base.rank, act, phrase, sizeof phrase);
    if (dead != missing) snprintf(late, sizeof late, "rank %d", missing);
    return ZS_FAIL(
        ZS_ERR_PEER,
        "rank %d (pid %d) died while rank %d was waiting for %s to %s%s; see the output of rank %d for the cause", dead,
        (int)shm->peers[dead].pid, shm->base.rank, late, phrase, places, dead);
}

zs_status zs_shm_fail_left(const zs_shm *shm, zs_shm_act act, int left)
{
    char phrase[ZS_SHM_PHRASE], places[PLACES];
    describe(shm, shm->base.rank, act, phrase, sizeof phrase);
    zs_shm_list_places(shm, places, sizeof places);
    return ZS_FAIL(ZS_ERR_PEER, "rank %d (pid %d) exited while rank %d was waiting for it to %s%s; %s", left,
                   (int)shm->peers[left].pid, shm->base.rank, phrase, places, remedy_of(act));
}

/* Appends the acts of the ranks missing for `act`, as far as there is room. */
static void append_missing(const zs_shm *shm, zs_shm_act act, char *text, size_t size)
{
    size_t length = strlen(text);
    for (int r = 0; r < shm->base.world && length + 2 < size; r++) {
        if (r == shm->base.rank || !zs_shm_is_missing(shm, r, act)) continue;
        length += (size_t)snprintf(text + length, size - length, "; ");
        zs_shm_moment moment = zs_shm_state_of(shm, r);
        if (moment.wait_id % 2 == 1) moment.missing = zs_shm_missing(shm, r, moment.act);
        if (length < size) describe_rank(shm, r, &moment, text + length, size - length);
        length = strlen(text);
    }
}

zs_status zs_shm_fail_timeout(const zs_shm *shm, zs_shm_act act, int missing, double waited)
{
    char phrase[ZS_SHM_PHRASE], others[2 * SENTENCE] = "", places[PLACES];
    describe(shm, shm->base.rank, act, phrase, sizeof phrase);
    append_missing(shm, act, others, sizeof others);
    zs_shm_list_places(shm, places, sizeof places);
    return ZS_FAIL(ZS_ERR_TIMEOUT,
                   "rank %d timed out after %.1f s waiting for rank %d to %s%s%s; %s; raise timeout if rank %d is only "
                   "slow",
                   shm->base.rank, waited, missing, phrase, others, places, remedy_of(act), missing);
}

/* The remedy if ranks wait for each other: one is in a call of zshard, or at a forward. */
static void remedy_of_circle(const zs_shm *shm, const zs_shm_moment *moments, char *text, size_t size)
{
    const char *call = "";
    bool trains = false;
    for (int r = 0; r < shm->base.world; r++) {
        if (call[0] == 0) call = call_of(shm, r, moments[r].act);
        trains |= moments[r].act.what == ZS_SHM_FORWARD;
    }
    snprintf(text, size, "run the same forwards, backwards and collectives on all ranks%s%s%s%s",
             call[0] != 0 ? ", here " : "", call, trains && call[0] == 0 ? ZS_ALONE : "", trains ? ZS_UNEVEN : "");
}

zs_status zs_shm_fail_circle(const zs_shm *shm, const zs_shm_moment *moments)
{
    char text[2 * SENTENCE] = "", places[PLACES], remedy[SENTENCE], failures[ZS_FAILURES];
    size_t length = 0;
    for (int r = 0; r < shm->base.world && length + 3 < sizeof text; r++) {
        describe_rank(shm, r, &moments[r], text + length, sizeof text - length);
        length = strlen(text);
        if (r + 1 < shm->base.world) length += (size_t)snprintf(text + length, sizeof text - length, "; ");
    }
    zs_shm_list_places(shm, places, sizeof places);
    remedy_of_circle(shm, moments, remedy, sizeof remedy);
    zs_comm_failures(&shm->base, failures, sizeof failures);
    return ZS_FAIL(ZS_ERR_DIVERGED, "ranks diverged and are waiting for each other: %s%s%s; %s", text, failures, places,
                   remedy);
}

static const char *named(const char *call)
{
    return call[0] != 0 ? call : "another collective";
}

zs_status zs_shm_fail_calls(const zs_shm *shm, const char *ours, int r, const char *theirs)
{
    char places[PLACES], failures[ZS_FAILURES];
    zs_shm_list_places(shm, places, sizeof places);
    zs_comm_failures(&shm->base, failures, sizeof failures);
    return ZS_FAIL(ZS_ERR_DIVERGED,
                   "ranks diverged: rank %d called %s, but rank %d called %s%s%s; run the same collectives on all "
                   "ranks",
                   shm->base.rank, named(ours), r, named(theirs), failures, places);
}

zs_status zs_shm_fail_apart(const zs_shm *shm, zs_shm_act act, int r)
{
    int own = shm->base.rank;
    const zs_shm_mailbox *ours = &shm->own->mail[act.number % 2],
                         *theirs = &shm->peers[r].control->mail[act.number % 2];
    char places[PLACES], failures[ZS_FAILURES];
    if (strcmp(ours->call, theirs->call) != 0) return zs_shm_fail_calls(shm, ours->call, r, theirs->call);
    zs_shm_list_places(shm, places, sizeof places);
    zs_comm_failures(&shm->base, failures, sizeof failures);
    const char *of = ours->call[0] != 0 ? " of " : "";
    unsigned long long number = act.number;
    if (ours->bytes == theirs->bytes)
        return ZS_FAIL(ZS_ERR_DIVERGED,
                       "ranks diverged before all-gather message %llu%s%s: rank %d took part in %llu chunks of "
                       "broadcasts, but rank %d in %llu%s%s; run the same collectives on all ranks",
                       number, of, ours->call, own, (unsigned long long)ours->pieces, r,
                       (unsigned long long)theirs->pieces, failures, places);
    return ZS_FAIL(
        ZS_ERR_DIVERGED,
        "ranks diverged at all-gather message %llu%s%s: rank %d sent %llu bytes, but rank %d sent %llu%s%s; run "
        "the same collectives on all ranks",
        number, of, ours->call, own, (unsigned long long)ours->bytes, r, (unsigned long long)theirs->bytes, failures,
        places);
}

/* Lists the peers' answers so far, and this rank's line. */
static void list_lines(zs_shm *shm, char *text, size_t size)
{
    char (*texts)[ZS_WHERE] = calloc((size_t)shm->base.world, sizeof *texts);
    text[0] = 0;
    if (texts == NULL) return;
    zs_shm_read_lines(shm, texts);
    zs_script_look(texts[shm->base.rank], ZS_WHERE);
    if (texts[shm->base.rank][0] != 0) zs_where_lines(texts, shm->base.world, text, size);
    free(texts);
}

void zs_shm_print_stall(zs_shm *shm, zs_shm_act act, double waited)
{
    char phrase[ZS_SHM_PHRASE], others[2 * SENTENCE] = "", places[PLACES], lines[ZS_LINES];
    describe(shm, shm->base.rank, act, phrase, sizeof phrase);
    append_missing(shm, act, others, sizeof others);
    zs_shm_list_places(shm, places, sizeof places);
    list_lines(shm, lines, sizeof lines);
    zs_log(ZS_LOG_INFO, "has been waiting %.0f s for other ranks to %s%s%s", waited, phrase, others, places);
    fprintf(stderr, "zshard: rank %d has been waiting %.0f s for other ranks to %s%s%s%s%s%s\n", shm->base.rank, waited,
            phrase, others, places, places[0] != 0 ? "; " : "", places[0] != 0 ? remedy_of(act) : "", lines);
}
