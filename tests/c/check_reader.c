/* check_reader.c - all interleavings of ranks that run the reader protocol of shm_reader.c.
 *
 *   check_reader RANKS LENGTH     prints "programs P states S"; exit 1 and the last state if a promise is broken
 *
 * LENGTH bounds the programs of three ranks, in letters.
 *
 * A rank is a chain of steps (reader_model.h), each of one load or store of shared memory, and any rank may make the
 * next one. So all states that can be reached are reached. A visited one is remembered by a hash of 64 bits.
 *
 * A program is a string for each rank:
 *   T  training forward      V  the same in evaluation mode       E  evaluation            A  the script's own all-reduce
 *   B  backward              N  backward within no_sync           P  another backward of the same forward, of other parameters
 *   W  optimizer step        L  load of other values              S  swap, by hand         U  swap back, by hand
 *   R  training forward that raises     F  the same, but its end is left out     I  the same, interrupted while it waits, or not
 *   X  the model is freed, the end    D  the process dies, at any moment from here on
 *
 * Promises, in every state that can be reached:
 *   - a pass reads of all ranks what its own rank has, whole; or it fails by one of the errors (out of step, alone);
 *   - no known write changes a shard while a rank reads it;
 *   - in programs that all ranks run alike, or whose lone evaluations have peers in a pass to read from, nobody waits for ever,
 *     and nothing fails. In the others, who waits for ever waits for a rank that has ended, or in a circle: shm_wait.c ends
 *     both with an error.
 */
#include "reader_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t longest;
static long n_states, n_programs;

/* --- all interleavings -------------------------------------------------------------------------------------------- */

typedef struct seen_set {
    uint64_t *slots;
    size_t n, room;
} seen_set;

static uint64_t hash_of(const world_state *w)
{
    uint64_t words[sizeof *w / 8], x = UINT64_C(0x9e3779b97f4a7c15);
    memcpy(words, w, sizeof *w);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        x = (x ^ words[i]) * UINT64_C(0xbf58476d1ce4e5b9);
        x ^= x >> 29;
    }
    return x | 1;
}

static void grow(seen_set *set)
{
    seen_set larger = {.room = set->room * 2};
    larger.slots = calloc(larger.room, sizeof *larger.slots);
    if (larger.slots == NULL) exit(2);
    for (size_t i = 0; i < set->room; i++) {
        if (set->slots[i] == 0) continue;
        size_t at = set->slots[i] & (larger.room - 1);
        while (larger.slots[at] != 0)
            at = (at + 1) & (larger.room - 1);
        larger.slots[at] = set->slots[i];
    }
    larger.n = set->n;
    free(set->slots);
    *set = larger;
}

/* Is it new? */
static bool add(seen_set *set, uint64_t hash)
{
    if (2 * set->n >= set->room) grow(set);
    size_t at = hash & (set->room - 1);
    for (; set->slots[at] != 0; at = (at + 1) & (set->room - 1))
        if (set->slots[at] == hash) return false;
    set->slots[at] = hash;
    set->n++;
    return true;
}

typedef struct frontier {
    world_state *states;
    size_t n, room;
} frontier;

static void push(frontier *f, const world_state *w)
{
    if (f->n == f->room) {
        f->room = 2 * f->room + 1024;
        f->states = realloc(f->states, f->room * sizeof *f->states);
        if (f->states == NULL) exit(2);
    }
    f->states[f->n++] = *w;
}

static void describe(const world_state *w, const char *what)
{
    printf("broken: %s\n", what);
    for (int r = 0; r < model_ranks; r++) {
        const rank_state *s = &w->rank[r];
        printf("  rank %d: program %s, letter %d, place %d, peer %d, state %d, trains %llu, version %llu, looks %d, "
               "shard %d, "
               "written %d, changed %d\n",
               r, model_running->text[r], s->letter, s->at, s->peer, (int)zs_word_state(s->word),
               (unsigned long long)zs_word_trains(s->word), (unsigned long long)zs_word_version(s->word), s->looks,
               s->shard, s->written, zs_word_changed(s->word));
    }
}

/* Checks a program's promises in a state in which no rank can continue. */
static const char *check_end(const world_state *w)
{
    for (int r = 0; r < model_ranks && model_running->legal; r++)
        if (w->rank[r].at != GONE) return "a rank waits for ever";
    return NULL;
}

/* Does rank `i`, which has just backed off, only loop, while no other rank can move? */
static bool spins(const world_state *from, int i)
{
    world_state w = *from;
    for (int r = 0; r < model_ranks; r++)
        if (r != i && model_can_step(&w, r)) return false;
    for (int k = 0; k < 12 * model_ranks; k++) {
        if (!model_can_step(&w, i)) return false;
        (void)model_step(&w, i, false);
        if (w.rank[i].at == BACK_OFF) return true;
    }
    return false;
}

/* Adds a state, if it is new. Returns NULL, or the promise that it breaks. */
static const char *visit(seen_set *seen, frontier *todo, const world_state *next, int i, const char *broken)
{
    const rank_state *me = &next->rank[i];
    if (broken == NULL && model_running->legal && me->failed) broken = "a rank fails";
    if (broken == NULL && me->at == ADMIT && me->peer == 0 && spins(next, i)) broken = "a rank backs off for ever";
    if (broken != NULL) {
        describe(next, broken);
        return broken;
    }
    if (add(seen, hash_of(next))) push(todo, next);
    return NULL;
}

static const char *expand(seen_set *seen, frontier *todo, const world_state *w)
{
    bool any = false;
    const char *broken = NULL;
    for (int i = 0; i < model_ranks && broken == NULL; i++) {
        const rank_state *me = &w->rank[i];
        world_state next = *w;
        if (me->died && me->at != GONE) {
            model_go(&next.rank[i], GONE); /* its words stay as they are */
            broken = visit(seen, todo, &next, i, NULL);
            next = *w;
        }
        if (broken == NULL && me->at == ADMIT && model_letter(w, i) == 'I') {
            any = true;
            broken = visit(seen, todo, &next, i, model_step(&next, i, true));
            next = *w;
        }
        if (broken != NULL || !model_can_step(w, i)) continue;
        any = true;
        const char *text = model_step(&next, i, false);
        broken = visit(seen, todo, &next, i, text);
    }
    if (any || broken != NULL) return broken;
    broken = check_end(w);
    if (broken != NULL) describe(w, broken);
    return broken;
}

static const char *run(const program *what)
{
    model_running = what;
    seen_set seen = {.room = 1 << 12};
    seen.slots = calloc(seen.room, sizeof *seen.slots);
    if (seen.slots == NULL) exit(2);
    frontier todo = {0};
    world_state start;
    memset(&start, 0, sizeof start);
    (void)add(&seen, hash_of(&start));
    push(&todo, &start);
    const char *broken = NULL;
    while (todo.n > 0 && broken == NULL) {
        world_state w = todo.states[--todo.n];
        broken = expand(&seen, &todo, &w);
    }
    n_states += (long)seen.n;
    n_programs++;
    free(todo.states);
    free(seen.slots);
    return broken;
}

/* --- programs ----------------------------------------------------------------------------------------------------- */

enum { TEXT = 40 };

/* Programs of all ranks, from step to step. */
static const char *const steps[] = {"TB",     "ETB",     "TTB",     "TEB",   "TNTB",    "SEUTB",  "EETB",
                                    "SEUETB", "SESEUTB", "TETB",    "EEVB",  "VB",      "ETEB",   "TNWTB",
                                    "TSEUTB", "TB",      "TNSEUTB", "TBSEU", "TBSTBUE", "EEETTB", "ETTETEB"};
/* Programs of one rank alone before that; and whether they are legal. */
typedef struct deviation {
    const char *text;
    bool legal;
} deviation;
static const deviation deviations[] = {{"", true},     {"E", true},   {"EE", true},  {"SEU", false}, {"L", false},
                                       {"TNW", false}, {"F", true},   {"I", false},  {"T", false},   {"SEEU", false},
                                       {"SUE", false}, {"EL", false}, {"D", false},  {"X", false},   {"SESEU", false},
                                       {"IL", false},  {"FE", true},  {"TN", false}, {"V", true}};
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Left out, as only the written values would show it:
 * - other weights swapped in on a rank that has run a training forward alone, or a failing one, while the others'
 *   backward follows theirs;
 * - a rank that alone swaps weights in, where the others swap them back by the same number of operations, before passes
 *   of the same kind. */
static bool is_left_out(const char *alone, const char *common)
{
    return strchr(common, 'S') != NULL && (strpbrk(alone, "FITNRV") != NULL || strstr(alone, "SES") != NULL);
}

/* Ranks that all run `before`, then each its own program, then `common`. */
static const char *run_with(const char *before, const deviation *const *alone, const char *common)
{
    char texts[MAX_RANKS][TEXT];
    program p = {.legal = true};
    for (int r = 0; r < model_ranks; r++) {
        for (int other = 0; other < model_ranks; other++) {
            snprintf(texts[r], TEXT, "%s%s", other == r ? "" : alone[other]->text, common);
            if (is_left_out(alone[r]->text, texts[r])) return NULL;
        }
        snprintf(texts[r], TEXT, "%s%s%sW%s", before, alone[r]->text, common, model_ranks == 2 ? "TBW" : "");
        p.text[r] = texts[r];
        /* Others may swap weights while a rank evaluates alone, if nothing has them wait for it before. And their
         * forward takes a failed one for theirs: all then are one behind, until the next backward ends. */
        bool looks = alone[r]->text[strspn(alone[r]->text, "E")] == 0 && strcspn(common, "TV") < strcspn(common, "S");
        looks |= *alone[r]->text == 0;
        p.legal &= alone[r]->legal && (looks || (common[0] == 'T' && strchr("BN", common[1]) != NULL));
    }
    return run(&p);
}

/* Each step after each step, with each deviation of each rank before the second. */
static const char *run_pairs(void)
{
    const char *broken = NULL;
    for (size_t before = 0; before <= COUNT(steps); before++)
        for (size_t common = 0; common < COUNT(steps); common++)
            for (size_t d = 0; d < COUNT(deviations) * (size_t)model_ranks && broken == NULL; d++) {
                const deviation *alone[MAX_RANKS] = {deviations, deviations, deviations};
                alone[d % (size_t)model_ranks] = &deviations[d / (size_t)model_ranks];
                char first[TEXT] = "";
                if (before < COUNT(steps)) snprintf(first, TEXT, "%sW", steps[before]);
                if (model_ranks > 2 && strlen(first) + strlen(steps[common]) > longest) continue;
                broken = run_with(first, alone, steps[common]);
            }
    return broken;
}

/* Deviations of two ranks at a time. */
static const char *run_two_deviations(void)
{
    const char *broken = NULL;
    for (size_t common = 0; common < COUNT(steps); common++)
        for (size_t d = 0; d < COUNT(deviations) * COUNT(deviations) && broken == NULL; d++) {
            const deviation *a = &deviations[d % COUNT(deviations)], *b = &deviations[d / COUNT(deviations)];
            const deviation *alone[MAX_RANKS] = {a, b, deviations};
            if (model_ranks > 2 && strlen(a->text) + strlen(b->text) + strlen(steps[common]) > longest) continue;
            broken = run_with("", alone, steps[common]);
        }
    return broken;
}

/* Ranks that go different ways for longer. */
static const char *run_apart(void)
{
    static const program programs[] = {
        {{"TN", "TX", "TX"}, true},
        {{"TX", "TX", "TN"}, true},
        {{"TNX", "TN", "TNX"}, true},
        {{"TBX", "TBW", "TBWX"}, true},
        {{"TBWEX", "TBWE", "TBWE"}, true},
        {{"TAB", "TAB", "TAB"}, true},
        {{"VABWVAB", "TABWTAB", "TABWTAB"}, true},
        {{"TBWPWTBW", "TBWPWTBW", "TBWPWTBW"}, true},
        {{"STTBWTB", "STBWTB", "STBWTB"}, true},
        {{"SRTBWTB", "STBWTB", "STBWTB"}, true},
        {{"SEUVBW", "VBW", "VBW"}, false},
        {{"SVUVBW", "TBW", "TBW"}, false},
        {{"TBWSVUTBW", "TBWTBW", "TBWTBW"}, false},
        {{"SEUTBW", "SEEUTBW", "SEUTBW"}, false},
        {{"TNTBW", "TTBW", "TTBW"}, false},
        {{"TNTNTBW", "TNTBW", "TNTBW"}, false},
        {{"TWTBW", "TBWTBW", "TBWTBW"}, false},
        {{"TBWEETBW", "TBWTBWEE", "TBWTBW"}, false},
        {{"STBSTBUTB", "STBSTBUTB", "STBSTBUTB"}, true},
        {{"TBWSEAUTBW", "TBWSAUTBW", "TBWSAUTBW"}, true},
        {{"SEAUSEEAUTBW", "SAUSAUTBW", "SAUSAUTBW"}, true},
        {{"TBWSEAUEATBW", "TBWSAUATBW", "TBWSAUEATBW"}, true},
        {{"TBWLEALATBW", "TBWLALATBW", "TBWLALATBW"}, true},
        {{"TBWEEAELTBW", "TBWAELTBW", "TBWAELTBW"}, true},
        {{"EEEAESAEELEETBW", "AESAEELEETBW", "EAESAEELEETBW"}, true},
    };
    const char *broken = NULL;
    for (size_t i = 0; i < COUNT(programs) && broken == NULL; i++)
        broken = run(&programs[i]);
    return broken;
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    model_ranks = atoi(argv[1]);
    longest = (size_t)atoi(argv[2]);
    const char *broken = run_apart();
    if (broken == NULL) broken = run_pairs();
    if (broken == NULL) broken = run_two_deviations();
    printf("programs %ld states %ld\n", n_programs, n_states);
    return broken != NULL;
}
