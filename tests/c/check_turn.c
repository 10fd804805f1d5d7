/* check_turn.c - conclusions of csrc/comm/turn.c from the turns of all worlds of 2 to 4 ranks.
 *
 *   check_turn [EVERY]     prints "worlds N"; exit 1 and the broken promise
 *
 * A rank has one of a list of turns: of each kind, and in each field that counts one value or another. In a world of 2
 * it has any of them; with more ranks each EVERYth of the list (or more) for each rank, from another start. */
#include "comm/turn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4, LIST = 1024 };

static zs_turn list[LIST];
static int n_turns;

static void add(zs_turn turn, int model, int fingerprint)
{
    turn.model = (uint64_t)model;
    turn.fingerprint.steps = fingerprint == 1;
    turn.fingerprint.grads = fingerprint == 2;
    list[n_turns++] = turn;
}

/* A rank's gather: of a flat, in a pass, of a model; `serves` of its models' shards are as they were. */
static void add_gathers(int number, zs_reading reading)
{
    for (int model = 1; model <= 2; model++) {
        for (int serves = 0; serves <= 2; serves++) {
            for (int more = 0; more < 4; more++) {
                zs_turn turn = zs_turn_of(ZS_TURN_GATHER, (uint64_t)number, 64, "a");
                turn.reading = zs_reading_encode(&reading);
                turn.joinable = more != 3;
                for (int i = 0; i < serves; i++)
                    turn.serves[i] = (uint32_t)i + 1;
                add(turn, model, more % 3);
            }
        }
    }
}

static void fill_list(void)
{
    for (int number = 0; number < 2; number++) {
        for (int pass = ZS_PASS_TRAIN; pass <= ZS_PASS_BACKWARD; pass++)
            add_gathers(number, (zs_reading){.pass = (zs_pass)pass});
        add_gathers(number, (zs_reading){.changed = true});
        for (int fingerprint = 0; fingerprint < 3; fingerprint++)
            for (int serves = 0; serves < 2; serves++) {
                zs_turn post = zs_turn_of(ZS_TURN_POST, (uint64_t)number, 64, "a");
                post.serves[0] = (uint32_t)serves;
                add(post, 1, fingerprint);
            }
        add(zs_turn_of(ZS_TURN_SHARE, (uint64_t)number, 64, "a"), 1, 0);
        for (int call = 0; call < 3; call++)
            add(zs_turn_of(call == 0 ? ZS_TURN_BROADCAST : ZS_TURN_EXCHANGE, (uint64_t)number, 8,
                           call > 1 ? "save()" : NULL),
                0, 0);
    }
    zs_turn give_up = zs_turn_of(ZS_TURN_GIVE_UP, 0, 0, NULL);
    add(give_up, 0, 0);
    give_up.serves[0] = 1;
    add(give_up, 0, 0);
}

static void promise(bool kept, const char *what, const zs_turn *turns, int world)
{
    if (kept) return;
    printf("broken: %s\n", what);
    for (int r = 0; r < world; r++) {
        char phrase[ZS_TURN_PHRASE];
        zs_turn_describe(&turns[r], "", phrase, sizeof phrase);
        printf("  rank %d: %s\n", r, phrase);
    }
    exit(1);
}

#define PROMISE(condition) promise(condition, #condition, turns, world)

static bool serves(const zs_turn *turn, uint64_t model)
{
    bool any = false;
    for (int i = 0; i < ZS_TURN_SERVES; i++)
        any |= turn->serves[i] == model;
    return any;
}

/* Ranks take part only in gathers to which all can contribute. */
static void check_gather(const zs_turn *turns, int world, const zs_turn *chosen)
{
    PROMISE(chosen->kind == ZS_TURN_GATHER && chosen->joinable && chosen->model != 0);
    for (int r = 0; r < world; r++)
        PROMISE(serves(&turns[r], chosen->model) && turns[r].kind != ZS_TURN_GIVE_UP);
}

/* Each rank's error names itself, and a rank that is elsewhere. */
static void check_errors(const zs_turn *turns, int world, int gave_up)
{
    for (int own = 0; own < world; own++) {
        int a = -1, b = -1;
        PROMISE(zs_turns_explain(turns, world, own, "") == ZS_ERR_DIVERGED);
        const char *message = zs_last_message(), *but = strstr(message, ", but rank ");
        if (gave_up >= 0) {
            PROMISE(sscanf(message, "rank %d abandoned", &a) == 1 && a == gave_up);
        } else {
            PROMISE(sscanf(message, "ranks diverged: rank %d", &a) == 1 && a == own);
            PROMISE(but != NULL && sscanf(but, ", but rank %d", &b) == 1 && b >= 0 && b < world);
            PROMISE(!zs_turns_same(&turns[a], &turns[b]));
        }
        zs_clear_error();
    }
}

/* Is it one collective? */
static bool is_one(const zs_turn *a, const zs_turn *b)
{
    bool fields = a->kind == b->kind && a->number == b->number && a->round == b->round && a->bytes == b->bytes;
    return fields && strcmp(a->name, b->name) == 0;
}

/* Have some ranks of a gather changed their parameters by hand, and others not, in passes that differ? */
static bool is_mixed(const zs_turn *turns, int world)
{
    bool some = false, all = true, single = true;
    for (int r = 0; r < world; r++) {
        some |= zs_reading_changed(turns[r].reading);
        all &= zs_reading_changed(turns[r].reading);
        single &= zs_reading_alike(turns[r].reading, turns->reading);
    }
    return some && !all && !single;
}

static bool are_same(const zs_turn *a, const zs_turn *b)
{
    zs_fingerprint other = b->fingerprint;
    if (a->kind == ZS_TURN_GATHER) other.grads = a->fingerprint.grads;
    return memcmp(&a->fingerprint, &other, sizeof other) == 0;
}

static void check(const zs_turn *turns, int world)
{
    const zs_comparison all = zs_turns_compare(turns, world);
    bool single = true, same = true;
    for (int r = 0; r < world; r++)
        for (int s = 0; s < world; s++) {
            PROMISE(zs_turns_same(&turns[r], &turns[s]) == is_one(&turns[r], &turns[s]));
            single &= is_one(&turns[r], &turns[s]);
            same &= are_same(&turns[r], &turns[s]);
        }
    PROMISE(all.same == single);
    PROMISE(all.gather >= -1 && all.gather < world && all.gave_up >= -1 && all.gave_up < world);
    PROMISE(all.unsynced >= -1 && all.unsynced < world);
    PROMISE(!single || all.gather < 0);
    if (single && (turns->kind == ZS_TURN_GATHER || turns->kind == ZS_TURN_POST)) PROMISE(all.synced == same);
    if (all.gave_up >= 0) PROMISE(turns[all.gave_up].kind == ZS_TURN_GIVE_UP && all.gather < 0);
    if (single && turns->kind == ZS_TURN_GATHER && is_mixed(turns, world)) PROMISE(all.unsynced >= 0);
    if (all.unsynced >= 0) PROMISE(zs_reading_changed(turns[all.unsynced].reading));
    if (all.gather >= 0) check_gather(turns, world, &turns[all.gather]);
    if (!single && all.gather < 0) check_errors(turns, world, all.gave_up);
    /* The order of ranks decides nothing but which of several is named. */
    zs_turn *turned = malloc((size_t)world * sizeof *turned); /* of its size: a sanitizer sees reads beyond it */
    for (int r = 0; r < world; r++)
        turned[r] = turns[(r + 1) % world];
    const zs_comparison other = zs_turns_compare(turned, world);
    PROMISE(other.same == all.same && (other.gave_up < 0) == (all.gave_up < 0));
    PROMISE((other.gather < 0) == (all.gather < 0) && (other.unsynced < 0) == (all.unsynced < 0));
    if (all.gather >= 0) PROMISE(turned[other.gather].number == turns[all.gather].number);
    free(turned);
}

static long check_worlds(zs_turn *turns, int world, int rank, int step)
{
    long worlds = 0;
    for (int i = rank % step; i < n_turns; i += step) {
        turns[rank] = list[i];
        if (rank + 1 < world) {
            worlds += check_worlds(turns, world, rank + 1, step);
        } else {
            check(turns, world);
            worlds++;
        }
    }
    return worlds;
}

int main(int argc, char **argv)
{
    int every = argc > 1 ? atoi(argv[1]) : 3;
    zs_turn turns[MOST];
    fill_list();
    long worlds =
        check_worlds(turns, 2, 0, 1) + check_worlds(turns, 3, 0, every) + check_worlds(turns, 4, 0, 3 * every);
    printf("worlds %ld\n", worlds);
    return 0;
}
