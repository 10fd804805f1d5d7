/* reader_model.c - see reader_model.h. */
#include "reader_model.h"

#include <string.h>

int model_ranks;
const program *model_running;

static bool lags(const rank_state *peer, const rank_state *me)
{
    return me->looks > 0 && peer->met <= me->met && zs_word_lags(peer->word, me->word, peer->looks < me->looks);
}

static uint64_t want(uint64_t word, char letter, bool changed)
{
    zs_reading reading = {.pass = ZS_PASS_TRAIN, .eval_mode = strchr("VE", letter) != NULL, .changed = changed};
    if (strchr("BNP", letter) != NULL) reading.pass = ZS_PASS_BACKWARD;
    if (letter == 'E') reading.pass = ZS_PASS_EVALUATE;
    return zs_word_want(word, &reading);
}

/* --- a step of one rank ------------------------------------------------------------------------------------------- */

char model_letter(const world_state *w, int me)
{
    return model_running->text[me][w->rank[me].letter];
}

static bool is_backward(char letter)
{
    return letter == 'B' || letter == 'N' || letter == 'P';
}

void model_go(rank_state *me, place at)
{
    me->at = (uint8_t)at;
    me->peer = 0;
}

static void done_with_letter(rank_state *me)
{
    me->letter++;
    model_go(me, NEXT);
}

/* The peer was found as it should be: on to the next one, or to `then`. */
static void on(rank_state *me, place then)
{
    if (++me->peer == model_ranks) model_go(me, then);
}

static void write_next(rank_state *me, uint8_t values)
{
    me->next_shard = values;
    model_go(me, CATCH_UP);
}

/* Stores the word; with another version there are no looks, which is stored just before. */
static void store(rank_state *me, uint64_t word)
{
    if (!zs_word_same_version(word, me->word)) me->looks = 0;
    me->word = word;
}

/* A rank declares its writes by hand complete. */
static void complete(rank_state *me, bool changed)
{
    uint64_t next = zs_word_complete(me->word, changed);
    if (!zs_word_same_version(next, me->word)) me->work = (uint8_t)(3 * me->work + 1);
    store(me, next);
}

/* A known write of new values. */
static void write_known(rank_state *me, uint8_t values, uint8_t event)
{
    me->history = (uint8_t)(me->history * 5 + event);
    write_next(me, values);
}

static void take_letter(rank_state *me, char letter)
{
    switch (letter) {
    case 0: model_go(me, GONE); return;
    case 'S':
    case 'U': write_next(me, letter == 'S' ? (uint8_t)(me->written + 100) : me->written); return;
    case 'W':
        if (me->stepped == me->reductions) { /* without a backward there are no gradients, and nothing changes */
            done_with_letter(me);
            return;
        }
        me->stepped = me->reductions;
        write_known(me, (uint8_t)(me->written + 1), (uint8_t)(1 + me->reductions));
        return;
    case 'L': write_known(me, (uint8_t)(me->written + 50), 90); return;
    case 'X':
        me->word = zs_word_free(me->word);
        done_with_letter(me);
        model_go(me, GONE);
        return;
    case 'D':
        me->died = 1; /* it may go at any moment */
        done_with_letter(me);
        return;
    case 'A': model_go(me, MEET); return;
    default:
        if (!is_backward(letter))
            model_go(me, TELL);
        else if (letter == 'P' ? me->kept : me->graph)
            model_go(me, WANT);
        else
            done_with_letter(me); /* a script that catches the error of its forward has no graph */
    }
}

/* A pass has been admitted. */
static void admitted(rank_state *me, char letter)
{
    if (is_backward(letter))
        model_go(me, READ);
    else
        model_go(me, letter == 'E' ? COMPARE : APART);
}

static void refused(rank_state *me, char letter)
{
    me->failed = 1;
    if (letter != 'E') me->graph = 0;
    model_go(me, REFUSE);
}

static bool by_hand(char letter)
{
    return letter == 'S' || letter == 'U';
}

enum { FINE, OTHER_VERSION, HALF_WRITTEN };

/* The fault of a peer's shard, as this rank sees it. */
static uint8_t check_read(const world_state *w, int me, int peer)
{
    uint8_t seen = w->rank[peer].shard;
    if (model_letter(w, me) == 'P') return FINE; /* of parameters that no step between the two backwards has changed */
    if (seen == HALF) return HALF_WRITTEN;
    return seen != w->rank[me].shard ? OTHER_VERSION : FINE;
}

/* The fault of a pass that is about to end well. A backward of old gradients, on a rank that another has left behind by
 * a step, is reported at the next forward. */
static const char *check_pass(world_state *w, int i, bool backward)
{
    rank_state *me = &w->rank[i];
    if (me->tainted) return "a forward goes on after a backward that has gone wrong";
    if (me->wrong == FINE) return NULL;
    bool apart = false;
    for (int r = 0; r < model_ranks; r++)
        apart |= w->rank[r].history != me->history;
    me->tainted = backward && apart;
    if (me->tainted) return NULL;
    return me->wrong & HALF_WRITTEN ? "a pass has read a shard that was half-written"
                                    : "a pass has read a shard of another version";
}

static const char *check_scribble(const world_state *w, int me)
{
    for (int r = 0; r < model_ranks; r++)
        if (r != me && zs_word_delays_write(w->rank[r].word, w->rank[me].word) && w->rank[r].at >= READ &&
            w->rank[r].at <= LEAVE)
            return "a rank writes what is being read";
    return NULL;
}

bool model_can_step(const world_state *w, int i)
{
    const rank_state *me = &w->rank[i], *peer = &w->rank[me->peer];
    bool own = me->peer == i;
    switch ((place)me->at) {
    case ADMIT: return own || zs_word_admits(peer->word, me->word);
    case LEFT: return own || !zs_word_holds_up(peer->word, me->word);
    case CATCH_UP: return own || !lags(peer, me);
    case UNREAD: return own || !zs_word_delays_write(peer->word, me->word);
    case MET: return own || peer->met >= me->met;
    case COLLECT: return own || peer->posted >= me->posted;
    case GONE: return false;
    default: return true;
    }
}

const char *model_step(world_state *w, int i, bool interrupt)
{
    rank_state *me = &w->rank[i], *peer = &w->rank[me->peer];
    char letter = model_letter(w, i);
    bool own = me->peer == i, changed = me->shard != me->written;
    const char *broken = NULL;
    switch ((place)me->at) {
    case NEXT: take_letter(me, letter); break;
    case TELL:
        me->told = me->history;
        model_go(me, WANT);
        break;
    case WANT:
        me->wanted = want(me->word, letter, changed);
        if (!zs_word_same_version(me->wanted, me->word)) me->work = (uint8_t)(3 * me->work + (letter == 'E'));
        store(me, me->wanted);
        me->wrong = 0;
        model_go(me, ADMIT);
        break;
    case ADMIT:
        if (interrupt) {
            me->word = zs_word_stop(me->word);
            done_with_letter(me);
        } else {
            on(me, ENTER);
        }
        break;
    case ENTER:
        me->word = zs_word_enter(me->wanted);
        model_go(me, RECHECK);
        break;
    case RECHECK:
        if (!own && !zs_word_stands_still(peer->word, me->wanted)) {
            model_go(me, BACK_OFF);
        } else {
            on(me, RECHECK);
            if (me->peer == 0) admitted(me, letter);
        }
        break;
    case BACK_OFF:
        me->word = me->wanted;
        model_go(me, ADMIT);
        break;
    case APART:
        if (!own && zs_word_clashes(peer->word, me->word, peer->work == me->work))
            refused(me, letter);
        else
            on(me, COMPARE);
        break;
    case COMPARE:
        if (peer->told != me->told)
            refused(me, letter);
        else
            on(me, letter == 'E' ? OPEN : READ);
        break;
    case OPEN:
        if (!own && !zs_word_is_alike(peer->word, me->word, peer->work == me->work))
            refused(me, letter);
        else
            on(me, LOOK);
        break;
    case LOOK:
        me->looks++;
        model_go(me, READ);
        break;
    case READ:
        me->wrong |= check_read(w, i, me->peer);
        on(me, letter == 'B' || letter == 'P' ? POST : LEAVE);
        if (me->at == LEAVE && letter == 'F') done_with_letter(me);
        break;
    case POST:
        me->posted++;
        model_go(me, COLLECT);
        break;
    case COLLECT: on(me, READ_AGAIN); break;
    case READ_AGAIN:
        me->wrong |= check_read(w, i, me->peer);
        on(me, LEAVE);
        break;
    case LEAVE:
        broken = check_pass(w, i, is_backward(letter));
        store(me, zs_word_leave(me->word));
        me->reductions += is_backward(letter);
        if (is_backward(letter)) me->kept = letter == 'B' && me->graph;
        if (letter != 'E') me->graph = !is_backward(letter) && letter != 'R';
        model_go(me, LEFT);
        break;
    case REFUSE:
        me->word = zs_word_stop(me->word);
        model_go(me, LEFT);
        break;
    case LEFT:
        on(me, NEXT);
        if (me->at == NEXT) me->letter++;
        break;
    case CATCH_UP: on(me, WRITE); break;
    case WRITE:
        me->word = zs_word_write(me->word);
        model_go(me, UNREAD);
        break;
    case UNREAD: on(me, SCRIBBLE); break;
    case SCRIBBLE:
        broken = check_scribble(w, i);
        me->shard = HALF;
        model_go(me, SCRIBBLED);
        break;
    case SCRIBBLED:
        me->shard = me->next_shard;
        if (!by_hand(letter)) me->written = me->shard;
        model_go(me, by_hand(letter) ? WROTE : WRITTEN);
        break;
    case WRITTEN:
        me->told = me->history;
        model_go(me, WROTE);
        break;
    case WROTE:
        me->work = by_hand(letter) ? (uint8_t)(me->work + 1) : 0;
        store(me, zs_word_wrote(me->word, !by_hand(letter)));
        done_with_letter(me);
        break;
    case MEET: /* the script's own collective: its writes by hand are complete */
        complete(me, changed);
        me->looks = 0;
        me->met++;
        model_go(me, MET);
        break;
    case MET:
        on(me, NEXT);
        if (me->at == NEXT) me->letter++;
        break;
    case GONE: break;
    }
    return broken;
}
