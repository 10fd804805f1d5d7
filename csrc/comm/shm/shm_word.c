/* shm_word.c - see shm_word.h.
 *
 * Why a pass may read an owner (zs_word_admits), and why no circle of waits results:
 *
 * wanted   | the owner                                          | why
 * TRAIN    | has begun as many training forwards                | it takes part: all its earlier writes are done
 *          | is in a backward with as many reductions           | it does not write before this rank releases it
 * EVAL     | has this rank's version and reductions, and is not | they have done the same writes, and the next
 *          | dirty                                              | one waits for this look
 *          | has a later version; or another one, and is in a   | it will not reach this rank's version before
 *          | backward or in a later training forward            | this rank trains too: the caller fails
 * BACKWARD | has begun as many training forwards, or is in a    | it is past the same forward, and does not write
 *          | backward, with as many reductions                  | before the backward
 * any      | has made more reductions                           | they needed nothing of this rank
 * none     | WRITES                                             | half-written
 *
 * A training forward and an evaluation never admit each other as the same pass. So others' training forwards wait until
 * a rank that evaluates alone, with or without other weights swapped in, begins its own.
 *
 * Which ranks hold up a rank O that has ended a pass (zs_word_holds_up); O is IDLE by then, and will return to user
 * code:
 * peer P is    | holds up?              | why, and why no circle results
 * behind in    | yes                    | it reads O's shards in a backward that O has finished, with all its rounds:
 * reductions   |                        | it needs nothing more from O. Or it is on its way there: within no_sync
 *              |                        | nothing else makes O wait for that.
 * IDLE, WRITES | no                     | it reads nothing
 * FREED        | no, even if behind     | it never will
 * WANTS_TRAIN  | if O admits it         | it may start at any moment. It waits only for ranks that have not begun its
 *              |                        | pass.
 *              | no, if O does not      | it waits for O's next pass, and cannot start before: O is IDLE, and admits
 *              |                        | no new rank.
 * WANTS_EVAL   | no                     | it needs O's version, and each write of O would wait for it
 * TRAINS       | yes                    | it reads. It waits only for the user's own collectives, in which O has taken
 *              |                        | part, as it is past the same forward.
 * EVALUATES    | if O is not open to it | it is about to fail. Otherwise O's next write waits for it, and O itself must
 *              |                        | not: P's forward may have collectives of the user, which O has not reached
 *              |                        | yet.
 * BACKWARD,    | no                     | it waits for gradients of O's own coming backward.
 * WANTS_       |                        |
 * BACKWARD     |                        |
 *
 * Which rank P a rank O waits for before it writes (zs_word_lags), if O has made more looks at its version than P: P
 * either has yet to make them, or never will, since O has looked alone. The wait ends in the first case when P has made
 * as many; in the second when P begins the same write, is past it, or past a backward. So a rank that has looked alone
 * writes after the others; it never waits if all have trained since. P itself waits for O only in passes that O has
 * begun before.
 *
 * Which ranks may enter while O changes its word? Both sides "write mine, then read yours" (sequentially consistent):
 * - P is WANTS_*, finds itself admitted, stores that it reads, and checks once more; if a rank has changed (it has
 * taken the right to write, or has left the pass in which P was to read it alone), P returns to WANTS_*.
 *     So either that rank sees P read, and waits, or P sees its new word.
 *   - P counts a look only after that: a rank that sees the look sees P read, or P is through.
 *   - P begins the forward of some count, O ends its own of that count. O ran it because P had begun it: P was WANTS_*,
 *     reads, or is through when O ended, never "not yet": no gap.
 *   - P wants to read alone, admitted by O's backward, and O ends that. If P stored WANTS_* before O checked, O waits
 *     for it, as O has made more reductions. If after, P sees an O that has made more reductions than P: P's gradients
 *     were not needed.
 *   - P begins a backward while O, past its forward, is in user code: admitted. To write parameters between a forward
 *     and the backward that needs them breaks autograd in plain PyTorch too. The next forward detects a step on one
 *     rank alone, by the fingerprints.
 *
 * A step with a closure writes after the closure's passes, which have ended its right to write. Still no rank reads
 * then, except in a backward that needs this rank's own.
 *
 * Chains of waits end: WANTS_TRAIN waits only for counts below its own, WANTS_EVAL for versions below its own or for
 * writes to end, a write for looks of ranks that have not begun it, an ended pass for WANTS_TRAIN of no larger counts,
 * for readers, and for backwards of fewer reductions; none waits for its equal in the same state.
 *
 * A rank that skipped a forward, or ran extra ones, agrees with the others again after the next reduction, because
 * that sets the other counts to zero. Looks are compared only before writes.
 */
#include "comm/shm/shm_word.h"

enum { STATE = 4, CHANGED = 1, DIRTY = 1, MODE = 1, TRAINS = 12, VERSION = 20 };
enum {
    CHANGED_AT = STATE,
    DIRTY_AT = CHANGED_AT + CHANGED,
    MODE_AT = DIRTY_AT + DIRTY,
    TRAINS_AT = MODE_AT + MODE,
    VERSION_AT = TRAINS_AT + TRAINS,
    REDUCTIONS_AT = VERSION_AT + VERSION
};

static uint64_t field(uint64_t word, int at, int bits)
{
    return word >> at & ((UINT64_C(1) << bits) - 1);
}

static uint64_t with(uint64_t word, int at, int bits, uint64_t value)
{
    uint64_t mask = ((UINT64_C(1) << bits) - 1) << at;
    return (word & ~mask) | (value << at & mask);
}

static uint64_t plus(uint64_t word, int at, int bits, uint64_t by)
{
    return with(word, at, bits, field(word, at, bits) + by);
}

/* The lead of `a` over `b` in a count of so many bits. */
static int64_t ahead(uint64_t a, uint64_t b, int at, int bits)
{
    uint64_t apart = field(field(a, at, bits) - field(b, at, bits), 0, bits), half = UINT64_C(1) << (bits - 1);
    return apart < half ? (int64_t)apart : (int64_t)apart - (int64_t)(2 * half);
}

static int64_t reductions_ahead(uint64_t a, uint64_t b)
{
    return ahead(a, b, REDUCTIONS_AT, 64 - REDUCTIONS_AT);
}

static int64_t trains_ahead(uint64_t a, uint64_t b)
{
    return ahead(a, b, TRAINS_AT, TRAINS);
}

static int64_t versions_ahead(uint64_t a, uint64_t b)
{
    return ahead(a, b, VERSION_AT, VERSION);
}

zs_reader_state zs_word_state(uint64_t word)
{
    return (zs_reader_state)field(word, 0, STATE);
}

static uint64_t in_state(uint64_t word, zs_reader_state state)
{
    return with(word, 0, STATE, state);
}

uint64_t zs_word_trains(uint64_t word)
{
    return field(word, TRAINS_AT, TRAINS);
}

uint64_t zs_word_version(uint64_t word)
{
    return field(word, VERSION_AT, VERSION);
}

bool zs_word_changed(uint64_t word)
{
    return field(word, CHANGED_AT, CHANGED) != 0;
}

static bool is_dirty(uint64_t word)
{
    return field(word, DIRTY_AT, DIRTY) != 0;
}

bool zs_word_same_version(uint64_t a, uint64_t b)
{
    return a >> VERSION_AT == b >> VERSION_AT;
}

/* --- transitions -------------------------------------------------------------------------------------------------- */

uint64_t zs_word_new(void)
{
    return zs_word_mark_dirty(0);
}

uint64_t zs_word_mark_dirty(uint64_t word)
{
    return with(word, DIRTY_AT, DIRTY, 1);
}

/* The writes by hand are complete. */
static uint64_t settled(uint64_t word)
{
    return is_dirty(word) ? with(plus(word, VERSION_AT, VERSION, 1), DIRTY_AT, DIRTY, 0) : word;
}

uint64_t zs_word_want(uint64_t word, const zs_reading *reading)
{
    if (reading->pass == ZS_PASS_BACKWARD) return in_state(word, ZS_READER_WANTS_BACKWARD);
    bool unfinished = zs_word_state(word) == ZS_READER_WRITES; /* a step that raised */
    word = settled(unfinished ? zs_word_mark_dirty(word) : word);
    word = with(word, CHANGED_AT, CHANGED, reading->changed);
    word = with(word, MODE_AT, MODE, reading->eval_mode);
    if (reading->pass == ZS_PASS_EVALUATE) return in_state(word, ZS_READER_WANTS_EVAL);
    return in_state(plus(word, TRAINS_AT, TRAINS, 1), ZS_READER_WANTS_TRAIN);
}

uint64_t zs_word_enter(uint64_t word)
{
    zs_reader_state wants = zs_word_state(word);
    if (wants == ZS_READER_WANTS_BACKWARD) return in_state(word, ZS_READER_BACKWARD);
    if (wants == ZS_READER_WANTS_EVAL) return in_state(word, ZS_READER_EVALUATES);
    return in_state(word, ZS_READER_TRAINS);
}

uint64_t zs_word_leave(uint64_t word)
{
    if (zs_word_state(word) != ZS_READER_BACKWARD) return in_state(word, ZS_READER_IDLE);
    uint64_t told = field(word, CHANGED_AT, CHANGED + DIRTY + MODE) << CHANGED_AT;
    return ((word >> REDUCTIONS_AT) + 1) << REDUCTIONS_AT | told;
}

uint64_t zs_word_stop(uint64_t word)
{
    return in_state(word, ZS_READER_IDLE);
}

uint64_t zs_word_free(uint64_t word)
{
    bool unfinished = zs_word_state(word) == ZS_READER_WRITES; /* a step that raised */
    return in_state(unfinished ? zs_word_mark_dirty(word) : word, ZS_READER_FREED);
}

uint64_t zs_word_write(uint64_t word)
{
    return zs_word_state(word) == ZS_READER_IDLE ? in_state(word, ZS_READER_WRITES) : word;
}

uint64_t zs_word_wrote(uint64_t word, bool known)
{
    word = known ? with(settled(zs_word_mark_dirty(word)), CHANGED_AT, CHANGED, 0) : zs_word_mark_dirty(word);
    return zs_word_state(word) == ZS_READER_WRITES ? in_state(word, ZS_READER_IDLE) : word;
}

uint64_t zs_word_complete(uint64_t word, bool changed)
{
    zs_reader_state state = zs_word_state(word);
    if (state != ZS_READER_IDLE && state != ZS_READER_WRITES) return word;
    if (is_dirty(word)) word = with(settled(word), CHANGED_AT, CHANGED, changed);
    return in_state(word, ZS_READER_IDLE);
}

/* --- questions ---------------------------------------------------------------------------------------------------- */

static bool in_backward(uint64_t word)
{
    zs_reader_state state = zs_word_state(word);
    return state == ZS_READER_BACKWARD || state == ZS_READER_WANTS_BACKWARD;
}

static bool evaluates(uint64_t word)
{
    zs_reader_state state = zs_word_state(word);
    return state == ZS_READER_WANTS_EVAL || state == ZS_READER_EVALUATES;
}

static bool in_pass(uint64_t word)
{
    zs_reader_state state = zs_word_state(word);
    return state != ZS_READER_IDLE && state != ZS_READER_WRITES && state != ZS_READER_FREED;
}

bool zs_word_takes_part(uint64_t owner, uint64_t mine)
{
    return reductions_ahead(owner, mine) == 0 && trains_ahead(owner, mine) >= 0;
}

static bool has_version(uint64_t owner, uint64_t mine)
{
    return zs_word_same_version(owner, mine) && !is_dirty(owner);
}

/* Equal numbers of writes by hand may have left different weights, if one rank alone has made some: it has then made
 * more operations, and normally one of the two has the weights of the last known write. (Code may skip operations on
 * shards without elements; these never change.) */
bool zs_word_is_alike(uint64_t owner, uint64_t mine, bool same_work)
{
    if (has_version(owner, mine)) return same_work || zs_word_changed(owner) == zs_word_changed(mine);
    return reductions_ahead(owner, mine) > 0 && !is_dirty(owner) && !zs_word_changed(owner) && !zs_word_changed(mine);
}

bool zs_word_clashes(uint64_t owner, uint64_t mine, bool same_work)
{
    bool same_mode = field(owner, MODE_AT, MODE) == field(mine, MODE_AT, MODE);
    bool changed = zs_word_changed(owner) || zs_word_changed(mine);
    return changed && !(same_mode && zs_word_takes_part(owner, mine)) && !zs_word_is_alike(owner, mine, same_work);
}

static bool is_open(uint64_t owner, uint64_t mine)
{
    return zs_word_state(owner) != ZS_READER_WRITES && has_version(owner, mine);
}

/* Will `owner` not reach the version of an evaluation in `mine` before that rank trains too? */
static bool is_past(uint64_t owner, uint64_t mine)
{
    return versions_ahead(owner, mine) > 0 || (in_pass(owner) && trains_ahead(owner, mine) > 0);
}

/* Is `owner` where a rank in `mine` may read it although it takes no part? */
static bool may_be_read_alone(uint64_t owner, uint64_t mine)
{
    int64_t apart = reductions_ahead(owner, mine);
    if (apart != 0) return apart > 0;
    if (in_backward(owner)) return true;
    return evaluates(mine) && is_past(owner, mine);
}

bool zs_word_admits(uint64_t owner, uint64_t mine)
{
    if (zs_word_state(owner) == ZS_READER_WRITES) return false;
    bool with_it = evaluates(mine) ? is_open(owner, mine) : zs_word_takes_part(owner, mine);
    return with_it || may_be_read_alone(owner, mine);
}

bool zs_word_stands_still(uint64_t owner, uint64_t wanted)
{
    if (zs_word_state(owner) == ZS_READER_WRITES) return false;
    int64_t apart = reductions_ahead(owner, wanted);
    if (apart != 0) return apart > 0;
    if (evaluates(wanted)) return is_open(owner, wanted) || in_pass(owner) || is_past(owner, wanted);
    return zs_word_takes_part(owner, wanted) || in_pass(owner);
}

bool zs_word_reads(uint64_t peer)
{
    switch (zs_word_state(peer)) {
    case ZS_READER_TRAINS:
    case ZS_READER_EVALUATES:
    case ZS_READER_BACKWARD: return true;
    default: return false;
    }
}

bool zs_word_lags(uint64_t peer, uint64_t mine, bool fewer)
{
    zs_reader_state state = zs_word_state(peer);
    int64_t apart = reductions_ahead(peer, mine), versions = versions_ahead(peer, mine);
    if (state == ZS_READER_FREED || apart > 0) return false;
    if (apart < 0) return true;
    bool writes = state == ZS_READER_WRITES || is_dirty(peer);
    return versions < 0 || (versions == 0 && fewer && !writes);
}

bool zs_word_delays_write(uint64_t peer, uint64_t mine)
{
    bool needs_me = zs_word_state(peer) == ZS_READER_BACKWARD && reductions_ahead(peer, mine) >= 0;
    return zs_word_reads(peer) && !needs_me;
}

bool zs_word_holds_up(uint64_t peer, uint64_t mine)
{
    zs_reader_state state = zs_word_state(peer);
    if (state == ZS_READER_FREED) return false;
    if (reductions_ahead(peer, mine) < 0) return true;
    if (in_backward(peer) || state == ZS_READER_WANTS_EVAL) return false;
    if (state == ZS_READER_EVALUATES) return !is_open(mine, peer);
    if (zs_word_reads(peer)) return true;
    return state == ZS_READER_WANTS_TRAIN && zs_word_admits(mine, peer);
}
