/* check_wake.c - sleeping and waking over shm (csrc/comm/shm/shm_wake.c) in all interleavings of its loads and stores.
 *
 * Ranks go through rounds: each raises its count, hands on the turns that are its own, and waits until all have counted as far. The
 * system's 100 ms are left out: a sleeper that nobody wakes stays asleep, and then all wait. That is what is looked for: a state
 * in which no rank can take a step, and not all are through. A few sleeps end for no reason, as any may.
 *
 * A rank is a small machine that makes one access to shared memory per step, line by line as in shm_wake.c; all
 * orders of steps are tried, each state once.
 *
 *     check_wake ranks waiters rounds spurious [fault]
 *
 * The first `waiters` ranks wait; the others run ahead, as ranks that post rounds do.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4 };

enum fault { NONE, NO_SECOND_LOOK, NO_LOOK_AFTER_HANDING_ON, LATE_SEEN, FAULTS };

static const char *const faults[FAULTS] = {"", "no second look", "no look after handing on", "seen is read late"};

/* Where a rank stands. SET: zs_shm_set; TURN: take_turn; LIE: zs_shm_prepare_sleep. */
enum pc {
    WORK,
    SET_LOAD,
    TURN_ACT,
    TURN_SCAN,
    TURN_DECIDE,
    TURN_RAISE,
    TURN_WAKE,
    LIE_FIRST,
    LIE_SEEN,
    LIE_STORE,
    LIE_SCAN,
    LIE_LATE,
    SLEEP,
    BLOCKED,
    GET_UP,
    THROUGH
};

typedef struct rank_state {
    uint8_t count, wake, turn, number, act; /* shared: turn and number are `asleep` */
    uint8_t pc, peer, at, from, missing, seen, waits, spurious;
    uint8_t told_turn, told_number, told_act; /* as read of a sleeper */
} rank_state;

typedef struct state {
    rank_state of[MOST];
} state;

static int ranks, waiters, rounds;
static enum fault fault;

/* One step of a scan for who has not counted to `act`; true when it is over, with `missing` (the rank + 1, 0: none). */
static bool scan(state *s, rank_state *me, int who, int act)
{
    for (; me->at < ranks; me->at++) {
        int r = (me->from + me->at) % ranks;
        if (r == who) continue;
        if (s->of[r].count < act) {
            me->missing = (uint8_t)(r + 1);
            return true;
        }
        me->at++;
        me->missing = 0;
        return me->at == ranks;
    }
    me->missing = 0;
    return true;
}

static void start_scan(rank_state *me, int from, enum pc pc)
{
    me->from = (uint8_t)from;
    me->at = 0;
    me->pc = (uint8_t)pc;
}

static void next_peer(rank_state *me)
{
    me->peer++;
    me->pc = SET_LOAD;
}

static void go_on_with_turn(rank_state *me, int id)
{
    if (me->told_turn == id + 1)
        me->pc = TURN_ACT;
    else
        next_peer(me);
}

/* The turn of `me->peer`, which `me` has found to belong to `me->from`. */
static void decide(state *s, rank_state *me)
{
    rank_state *peer = &s->of[me->peer];
    if (me->missing == me->from + 1) {
        next_peer(me);
        return;
    }
    if (peer->turn != me->told_turn || peer->number != me->told_number) {
        next_peer(me);
        return;
    }
    peer->turn = me->missing;
    me->told_turn = me->missing;
    if (me->missing == 0)
        me->pc = TURN_RAISE;
    else if (fault == NO_LOOK_AFTER_HANDING_ON)
        next_peer(me);
    else
        me->pc = TURN_ACT;
}

static void step_awake(state *s, rank_state *me, int id)
{
    rank_state *peer = &s->of[me->peer % MOST];
    switch (me->pc) {
    case WORK:
        me->count++;
        me->peer = 0;
        me->pc = SET_LOAD;
        return;
    case SET_LOAD:
        if (me->peer == id) me->peer++;
        if (me->peer >= ranks && id >= waiters) {
            me->pc = me->count == rounds ? THROUGH : WORK;
            return;
        }
        if (me->peer >= ranks) {
            me->act = me->count;
            me->waits++;
            start_scan(me, id, LIE_FIRST);
            return;
        }
        me->told_turn = s->of[me->peer].turn;
        me->told_number = s->of[me->peer].number;
        go_on_with_turn(me, id);
        return;
    case TURN_ACT:
        me->told_act = peer->act;
        start_scan(me, me->told_turn - 1, TURN_SCAN);
        return;
    case TURN_SCAN:
        if (scan(s, me, me->peer, me->told_act)) me->pc = TURN_DECIDE;
        return;
    case TURN_DECIDE: decide(s, me); return;
    case TURN_RAISE:
        peer->wake++;
        me->pc = TURN_WAKE;
        return;
    case TURN_WAKE:
        if (peer->pc == BLOCKED) start_scan(peer, me->peer, LIE_FIRST);
        next_peer(me);
        return;
    default: return;
    }
}

/* Everything of a wait; false: it cannot go on. */
static bool step_waiting(state *s, rank_state *me, int id)
{
    switch (me->pc) {
    case LIE_FIRST:
        if (scan(s, me, id, me->act)) me->pc = me->missing ? LIE_SEEN : GET_UP;
        return true;
    case LIE_SEEN:
        me->seen = me->wake;
        me->pc = LIE_STORE;
        return true;
    case LIE_STORE:
        me->turn = me->missing;
        me->number = me->waits;
        start_scan(me, me->missing - 1, fault == NO_SECOND_LOOK ? SLEEP : LIE_SCAN);
        return true;
    case LIE_SCAN:
        if (!scan(s, me, id, me->act)) return true;
        if (me->missing == me->from + 1)
            me->pc = fault == LATE_SEEN ? LIE_LATE : SLEEP;
        else
            me->pc = me->missing ? LIE_STORE : GET_UP;
        return true;
    case LIE_LATE:
        me->seen = me->wake;
        me->pc = SLEEP;
        return true;
    case SLEEP:
        me->pc = BLOCKED;
        if (me->wake != me->seen) start_scan(me, id, LIE_FIRST);
        return true;
    case BLOCKED:
        if (me->spurious == 0) return false;
        me->spurious--;
        start_scan(me, id, LIE_FIRST);
        return true;
    case GET_UP:
        me->turn = 0;
        me->pc = me->count == rounds ? THROUGH : WORK;
        return true;
    default: return false;
    }
}

static bool step(state *s, int id)
{
    rank_state *me = &s->of[id];
    if (me->pc >= LIE_FIRST) return step_waiting(s, me, id);
    step_awake(s, me, id);
    return true;
}

/* --- all states --------------------------------------------------------------------------------------------------------- */

static state *known, *stack;
static unsigned char *taken;
static size_t room, count, depth, stack_room;

static void *need(void *pointer)
{
    if (pointer != NULL) return pointer;
    fprintf(stderr, "out of memory\n");
    exit(2);
}

static size_t place_of(const state *s)
{
    uint64_t hash = 1469598103934665603u;
    const unsigned char *bytes = (const unsigned char *)s;
    for (size_t i = 0; i < sizeof *s; i++)
        hash = (hash ^ bytes[i]) * 1099511628211u;
    size_t at = (size_t)(hash ^ hash >> 29) & (room - 1);
    while (taken[at] && memcmp(&known[at], s, sizeof *s) != 0)
        at = (at + 1) & (room - 1);
    return at;
}

static void grow(void)
{
    state *old = known;
    unsigned char *was = taken;
    size_t before = room;
    room = room ? 2 * room : 1 << 16;
    known = need(malloc(room * sizeof *known));
    taken = need(calloc(room, 1));
    for (size_t i = 0; i < before; i++) {
        if (!was[i]) continue;
        size_t at = place_of(&old[i]);
        known[at] = old[i];
        taken[at] = 1;
    }
    free(old);
    free(was);
}

static void visit(const state *s)
{
    if (2 * count >= room) grow();
    size_t at = place_of(s);
    if (taken[at]) return;
    known[at] = *s;
    taken[at] = 1;
    count++;
    if (depth == stack_room) {
        stack_room = stack_room ? 2 * stack_room : 1 << 12;
        stack = need(realloc(stack, stack_room * sizeof *stack));
    }
    stack[depth++] = *s;
}

/* Tries every rank's next step; false: none can take one, and not all are through. */
static bool expand(const state *s)
{
    bool any = false, through = true;
    for (int id = 0; id < ranks; id++) {
        state next = *s;
        through = through && s->of[id].pc == THROUGH;
        if (!step(&next, id)) continue;
        any = true;
        visit(&next);
    }
    return any || through;
}

int main(int argc, char **argv)
{
    if (argc < 5) return 2;
    ranks = atoi(argv[1]);
    waiters = atoi(argv[2]);
    rounds = atoi(argv[3]);
    for (int i = 1; i < FAULTS && argc > 5; i++)
        if (strcmp(argv[5], faults[i]) == 0) fault = (enum fault)i;
    if (ranks < 2 || ranks > MOST || (argc > 5 && fault == NONE)) return 2;
    state first;
    memset(&first, 0, sizeof first);
    for (int id = 0; id < ranks; id++)
        first.of[id].spurious = (uint8_t)atoi(argv[4]);
    visit(&first);
    while (depth > 0) {
        state s = stack[--depth];
        if (expand(&s)) continue;
        printf("broken: nobody wakes");
        for (int id = 0; id < ranks; id++)
            printf("  rank %d: count %d, waits for %d, turn of %d", id, s.of[id].count, s.of[id].act,
                   s.of[id].turn - 1);
        printf("\n");
        return 1;
    }
    printf("states %zu\n", count);
    return 0;
}
