/* shm_word.c - see shm_word.h.
 *
 * Why a pass may read an owner (zs_word_admits), and that no circle of waits comes of it:
 *
 *   wanted   | the owner                                             | why
 *   TRAIN    | has begun as many training forwards                   | it takes part: what it did before, it has done
 *            | is in a backward with as many reductions              | it writes nothing before this rank lets it go: read alone
 *   EVAL     | has begun as many of both kinds of forward            | it takes part
 *            | has begun more training forwards, or is in a backward,| it has gone on to training, and this rank evaluates
 *            | or reads alone, with as many reductions; and is in a  | alone
 *            | pass                                                  |
 *   BACKWARD | has begun as many training forwards, or is in a       | it is past the same forward, and does not write
 *            | backward, with as many reductions                     | before the backward
 *   any      | has made more reductions                              | they needed nothing of this rank (nothing was reduced)
 *   none     | WRITES                                                | half-written
 *
 * A training forward and an evaluation never admit each other as the same pass. So others' training forwards wait until a rank
 * that evaluates alone, with other weights swapped in or not, begins its own.
 *
 * Who holds up a rank O that has ended a pass (zs_word_holds_up); O is IDLE by then, and will return to user code:
 *   peer P is    | holds up?              | why, and why no circle comes of it
 *   behind in    | yes                    | it reads O's shards in a backward that O has finished, with all its rounds: it
 *   reductions   |                        | needs nothing more from O. Or it is on its way there: within no_sync nothing else
 *                |                        | has O wait for that.
 *   IDLE, WRITES | no                     | it reads nothing
 *   FREED        | no, even if behind     | it never will
 *   WANTS_*      | if O admits it         | it may start at any moment. It waits only for ranks that have not begun its pass.
 *   of a forward | no, if O does not      | it waits for O's next pass, and cannot slip in: O is IDLE, and admits nobody new.
 *   TRAINS,      | yes                    | it reads. It waits for nobody but the user's own collectives, in which O has taken
 *   EVALUATES,   |                        | part, as it is past the same forward.
 *   ALONE        |                        |
 *   BACKWARD,    | no                     | it waits for gradients of O's own coming backward.
 *   WANTS_       |                        |
 *   BACKWARD     |                        |
 *
 * Who may come in while O changes its word? Both sides "write mine, then look at yours" (sequentially consistent):
 *   - P is WANTS_*, finds itself admitted, stores that it reads, and looks once more; if somebody does not stand still any more
 *     (it has taken the right to write, or has left the pass in which P was to read it alone), P goes back to WANTS_*. So either
 *     that rank sees P read, and waits, or P sees its new word.
 *   - P begins the forward of some count, O ends its own of that count. O ran it because P had begun it: P was WANTS_*, reads,
 *     or is through when O ended, never "not yet": no gap.
 *   - P wants to read alone, admitted by O's backward, and O ends that. If P stored WANTS_* before O looked, O waits for it, as
 *     O has made more reductions. If after, P sees an O that has made more reductions than P: P's gradients were not needed.
 *   - P begins a backward while O, past its forward, is in user code: admitted. Writing parameters that it needs between a
 *     forward and its backward breaks autograd in plain PyTorch too. A step on one rank alone is found at the next forward, by
 *     the histories.
 *
 * A step with a closure writes after the closure's passes, which have ended its right to write. Nobody reads there all the same,
 * but a backward that needs this rank's own.
 *
 * Chains of waits end: WANTS_* waits for counts below its own only, an ended pass for WANTS_* of no larger counts, for readers,
 * and for backwards of fewer reductions; neither waits for its equal in the same state.
 *
 * A rank that skipped a forward, or ran extra ones, is level with the others again after the next reduction, because that sets
 * the other counts to zero. Lone passes do not count at all.
 */
#include "comm/shm/shm_word.h"

enum { STATE = 4, CHANGED = 1, MODE = 1, EVALS = 14, TRAINS = 12 };
enum {
    CHANGED_AT = STATE,
    MODE_AT = CHANGED_AT + CHANGED,
    EVALS_AT = MODE_AT + MODE,
    TRAINS_AT = EVALS_AT + EVALS,
    REDUCTIONS_AT = TRAINS_AT + TRAINS
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

/* How far `a` is ahead of `b` in a count of so many bits. */
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

static int64_t evals_ahead(uint64_t a, uint64_t b)
{
    return ahead(a, b, EVALS_AT, EVALS);
}

zs_reader_state zs_word_state(uint64_t word)
{
    return (zs_reader_state)field(word, 0, STATE);
}

static uint64_t in_state(uint64_t word, zs_reader_state state)
{
    return with(word, 0, STATE, state);
}

uint64_t zs_word_forwards(uint64_t word, zs_pass pass)
{
    return pass == ZS_PASS_EVALUATE ? field(word, EVALS_AT, EVALS) : field(word, TRAINS_AT, TRAINS);
}

bool zs_word_changed(uint64_t word)
{
    return field(word, CHANGED_AT, CHANGED) != 0;
}

bool zs_word_same_mode(uint64_t a, uint64_t b)
{
    return field(a, MODE_AT, MODE) == field(b, MODE_AT, MODE);
}

bool zs_word_same_counts(uint64_t a, uint64_t b)
{
    return a >> EVALS_AT == b >> EVALS_AT;
}

/* --- transitions ------------------------------------------------------------------------------------------------------ */

static uint64_t count(uint64_t word, zs_reader_state wants, uint64_t by)
{
    if (wants == ZS_READER_WANTS_TRAIN) return with(word, TRAINS_AT, TRAINS, field(word, TRAINS_AT, TRAINS) + by);
    return with(word, EVALS_AT, EVALS, field(word, EVALS_AT, EVALS) + by);
}

uint64_t zs_word_want(uint64_t word, const zs_reading *reading)
{
    if (reading->pass == ZS_PASS_BACKWARD) return in_state(word, ZS_READER_WANTS_BACKWARD);
    zs_reader_state wants = reading->pass == ZS_PASS_TRAIN ? ZS_READER_WANTS_TRAIN : ZS_READER_WANTS_EVAL;
    word = with(word, CHANGED_AT, CHANGED, reading->changed);
    word = with(word, MODE_AT, MODE, reading->eval_mode);
    return in_state(count(word, wants, 1), wants);
}

uint64_t zs_word_enter(uint64_t word, bool alone)
{
    zs_reader_state wants = zs_word_state(word);
    if (wants == ZS_READER_WANTS_BACKWARD) return in_state(word, ZS_READER_BACKWARD);
    if (alone) return in_state(count(word, wants, UINT64_MAX), ZS_READER_ALONE);
    return in_state(word, wants == ZS_READER_WANTS_TRAIN ? ZS_READER_TRAINS : ZS_READER_EVALUATES);
}

uint64_t zs_word_leave(uint64_t word)
{
    if (zs_word_state(word) != ZS_READER_BACKWARD) return in_state(word, ZS_READER_IDLE);
    uint64_t told = field(word, CHANGED_AT, CHANGED + MODE) << CHANGED_AT;
    return ((word >> REDUCTIONS_AT) + 1) << REDUCTIONS_AT | told;
}

uint64_t zs_word_stop(uint64_t word)
{
    return in_state(word, ZS_READER_IDLE);
}

uint64_t zs_word_free(uint64_t word)
{
    return in_state(word, ZS_READER_FREED);
}

uint64_t zs_word_write(uint64_t word)
{
    return zs_word_state(word) == ZS_READER_IDLE ? in_state(word, ZS_READER_WRITES) : word;
}

uint64_t zs_word_wrote(uint64_t word)
{
    return zs_word_state(word) == ZS_READER_WRITES ? in_state(word, ZS_READER_IDLE) : word;
}

/* --- questions ---------------------------------------------------------------------------------------------------------- */

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

bool zs_word_takes_part(uint64_t owner, uint64_t mine)
{
    if (reductions_ahead(owner, mine) != 0 || trains_ahead(owner, mine) < 0) return false;
    return !evaluates(mine) || (trains_ahead(owner, mine) == 0 && evals_ahead(owner, mine) >= 0);
}

static bool in_pass(uint64_t word)
{
    zs_reader_state state = zs_word_state(word);
    return state != ZS_READER_IDLE && state != ZS_READER_WRITES && state != ZS_READER_FREED;
}

/* Does `owner`, which does not take part, stand where a rank in `mine` may read it all the same? */
static bool may_be_read_alone(uint64_t owner, uint64_t mine)
{
    int64_t apart = reductions_ahead(owner, mine);
    if (apart != 0) return apart > 0;
    if (!in_pass(owner)) return false;
    if (in_backward(owner)) return true;
    return evaluates(mine) && (trains_ahead(owner, mine) > 0 || zs_word_state(owner) == ZS_READER_ALONE);
}

bool zs_word_admits(uint64_t owner, uint64_t mine)
{
    if (zs_word_state(owner) == ZS_READER_WRITES) return false;
    return zs_word_takes_part(owner, mine) || may_be_read_alone(owner, mine);
}

bool zs_word_stands_still(uint64_t owner, uint64_t wanted)
{
    if (zs_word_state(owner) == ZS_READER_WRITES) return false;
    int64_t apart = reductions_ahead(owner, wanted);
    return zs_word_takes_part(owner, wanted) || apart > 0 || (apart == 0 && in_pass(owner));
}

bool zs_word_reads(uint64_t peer)
{
    switch (zs_word_state(peer)) {
    case ZS_READER_TRAINS:
    case ZS_READER_EVALUATES:
    case ZS_READER_ALONE:
    case ZS_READER_BACKWARD: return true;
    default: return false;
    }
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
    if (in_backward(peer)) return false;
    if (zs_word_reads(peer)) return true;
    bool wants = state == ZS_READER_WANTS_TRAIN || state == ZS_READER_WANTS_EVAL;
    return wants && zs_word_admits(mine, peer);
}
