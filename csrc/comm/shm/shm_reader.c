/* shm_reader.c - who may read whose shards when: the one protocol of the shm transport that is not a plain count.
 *
 * Shards change only in user code (an optimizer, load_state_dict, an EMA swap), that is between passes: root forwards and
 * root backwards. Two promises follow, without a meeting of all ranks for each layer:
 *   1. what a pass reads of a peer was written before the peer began the same pass (never an older version);
 *   2. a rank returns to user code only when nobody reads what the user is about to change (never half-written).
 *
 * The one idea: a rank's whole state as a reader is one word that only it writes, so every transition is one store, and
 * whoever looks sees a consistent state:
 *
 *      reductions (28 bits) | forwards since the last reduction (34 bits) | pass (2 bits)
 *      '------------------- epoch, compared as one number ------------'
 *
 *   IDLE      in user code
 *   WANTS     has begun a forward, and waits to be admitted by all
 *   FORWARD   reads, in a forward
 *   BACKWARD  reads (or waits to be admitted), in a backward; its own shards cannot change before the backward ends
 *
 * Transitions of a rank:      begin forward: epoch + 1, WANTS -> wait until all admit -> FORWARD
 *                             end forward:   IDLE -> wait until nobody holds up -> user code
 *                             begin backward: BACKWARD -> wait until all admit
 *                             end backward:  epoch = (reductions + 1, 0), IDLE -> wait until nobody holds up -> user code
 *
 * An owner O admits a reader R (zs_shm_admits) if
 *   epoch(O) >= epoch(R)                              O has begun that pass too, so it has finished writing before it, or
 *   O is in BACKWARD with as many reductions as R     R runs extra forwards alone (an evaluation on one rank, two forwards
 *                                                     before a backward); O stands still until its backward ends.
 *
 * A peer P holds up an owner O that has ended a pass (zs_shm_holds_up); O's word is IDLE by then:
 *   P is      | holds up?                 | why, and why no circle comes of it
 *   IDLE      | no                        | it reads nothing
 *   WANTS     | if epoch(P) <= epoch(O)   | O has admitted it by its epoch, it may start at any moment. It waits only for
 *             |                           | ranks with a smaller epoch than its own.
 *             | no if epoch(P) > epoch(O) | it is waiting for O's next pass: waiting for it would be a circle. It cannot
 *             |                           | slip in: O is IDLE with a smaller epoch, which admits nobody beyond it.
 *   FORWARD   | yes                       | it reads. A forward waits for nobody but the user's own collectives, in which O
 *             |                           | has taken part, as it is past the same forward.
 *   BACKWARD  | if reductions(P) <        | it reads O's shards in a backward that O has finished, with all its rounds: it
 *             |    reductions(O)          | needs nothing more from O.
 *             | no otherwise              | its backward waits for gradients of O's own coming backward.
 *
 * The pairs of states that matter, O on its way out and P on its way in, both "write mine, then look at yours":
 *   - P begins the forward of epoch e, O ends its own of epoch e. O ran it because P had begun it (epoch(P) >= e, or P in a
 *     backward). So P's word was WANTS, FORWARD or already IDLE again when O ended, never "not yet": no gap.
 *   - P runs an extra forward admitted by O's BACKWARD; O ends that backward. If P stored WANTS before O looked, O waits:
 *     epoch(P) < (reductions + 1, 0). If after, P sees O IDLE with a larger epoch. That O is past a reduction that P has
 *     not made means that P's gradients were not needed (nothing was reduced): nobody steps on such a backward.
 *   - P begins the backward of epoch e while O, past its forward e, is in user code: admitted. Writing parameters between a
 *     forward and its backward breaks autograd in plain PyTorch too; the promise is about all other places.
 *
 * Chains of waits end: WANTS waits for smaller epochs only; an ended pass waits for WANTS of no larger epoch, for FORWARD,
 * and for BACKWARD of fewer reductions; neither waits for its equal in the same state.
 *
 * A forward that is admitted compares histories (comm.h) with all owners: theirs stand still, since each has begun this forward or
 * is in a backward. Where they differ it reads nothing, and ends as any other before that is told: then all have compared.
 *
 * A pass that fails halfway leaves its word standing (peers that end a pass wait for it) until the next forward begins:
 * that raises the epoch and so lets them go. A rank that skipped a forward or ran extra ones is level with the others again
 * after the next reduction, because that sets the count of forwards to zero.
 */
#include "shm_wait.h"

#include <stdlib.h>

enum pass { IDLE, WANTS, FORWARD, BACKWARD };

enum { PASS_BITS = 2, FORWARD_BITS = 34 };

struct zs_reader {
    uint32_t record; /* offset in the heap */
};

static enum pass pass_of(uint64_t word)
{
    return (enum pass)(word & ((1u << PASS_BITS) - 1));
}

static uint64_t epoch_of(uint64_t word)
{
    return word >> PASS_BITS;
}

static uint64_t reductions_of(uint64_t word)
{
    return word >> (PASS_BITS + FORWARD_BITS);
}

static uint64_t make_word(uint64_t epoch, enum pass pass)
{
    return epoch << PASS_BITS | (uint64_t)pass;
}

bool zs_shm_admits(uint64_t owner, uint64_t mine)
{
    if (epoch_of(owner) >= epoch_of(mine)) return true;
    return pass_of(owner) == BACKWARD && reductions_of(owner) == reductions_of(mine);
}

bool zs_shm_holds_up(uint64_t peer, uint64_t mine)
{
    switch (pass_of(peer)) {
    case IDLE: return false;
    case WANTS: return epoch_of(peer) <= epoch_of(mine);
    case FORWARD: return true;
    case BACKWARD: return reductions_of(peer) < reductions_of(mine);
    }
    return false;
}

/* --- the table's part ------------------------------------------------------------------------------------------------- */

zs_status zs_shm_reader_new(zs_comm *comm, const char *name, zs_reader **out)
{
    zs_reader *reader = calloc(1, sizeof *reader);
    if (reader == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the reader of '%s'", name);
    zs_status status = zs_shm_record((zs_shm *)comm, sizeof(zs_shm_reader_record), name, &reader->record);
    if (status != ZS_OK) {
        free(reader);
        return status;
    }
    *out = reader;
    return ZS_OK;
}

void zs_shm_reader_free(zs_comm *comm, zs_reader *reader)
{
    if (reader == NULL) return;
    zs_shm *shm = (zs_shm *)comm;
    if (zs_shm_live(shm)) { /* a freed model reads no more: let the others go */
        _Atomic uint64_t *word = &zs_shm_reader_at(shm, comm->rank, reader->record)->word;
        zs_shm_set(shm, word, make_word(epoch_of(atomic_load(word)), IDLE));
    }
    free(reader);
}

void zs_shm_tell_history(zs_comm *comm, zs_reader *reader, uint64_t now)
{
    zs_shm *shm = (zs_shm *)comm;
    if (zs_shm_live(shm)) atomic_store(&zs_shm_reader_at(shm, comm->rank, reader->record)->history, now);
}

/* All ranks that have begun this forward, or stand in a backward, have the history that they had when they began. */
static zs_status compare_histories(zs_shm *shm, const zs_reader *reader)
{
    uint64_t mine = atomic_load(&zs_shm_reader_at(shm, shm->base.rank, reader->record)->history);
    for (int r = 0; r < shm->base.world; r++)
        if (atomic_load(&zs_shm_reader_at(shm, r, reader->record)->history) != mine)
            return zs_comm_fail_history(&shm->base, r);
    return ZS_OK;
}

/* Reads no more, and comes back when nobody reads what is this rank's. */
static zs_status leave(zs_shm *shm, const zs_reader *reader, uint64_t epoch)
{
    zs_shm_set(shm, &zs_shm_reader_at(shm, shm->base.rank, reader->record)->word, make_word(epoch, IDLE));
    zs_shm_act act = zs_shm_act_make(ZS_SHM_LEFT_ALONE, reader->record, 0);
    zs_shm_note(shm, act);
    return zs_shm_wait(shm, act);
}

zs_status zs_shm_read_begin(zs_comm *comm, zs_reader *reader, zs_phase phase)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    _Atomic uint64_t *word = &zs_shm_reader_at(shm, comm->rank, reader->record)->word;
    uint64_t epoch = epoch_of(atomic_load(word)) + (phase == ZS_PHASE_FORWARD);
    uint64_t forwards = epoch & ((UINT64_C(1) << FORWARD_BITS) - 1);
    zs_shm_act act =
        zs_shm_act_make(phase == ZS_PHASE_FORWARD ? ZS_SHM_FORWARD : ZS_SHM_BACKWARD, reader->record, forwards);
    zs_shm_note(shm, act);
    zs_shm_set(shm, word, make_word(epoch, phase == ZS_PHASE_FORWARD ? WANTS : BACKWARD));
    zs_status status = zs_shm_wait(shm, act);
    if (status == ZS_OK && phase == ZS_PHASE_FORWARD) {
        zs_status compared = compare_histories(shm, reader);
        if (compared != ZS_OK) (void)leave(shm, reader, epoch); /* once the others have compared as well */
        ZS_TRY(compared);
    }
    if (status != ZS_OK)
        zs_shm_set(shm, word, make_word(epoch, IDLE)); /* the pass will not happen; nobody should wait for its end */
    else if (phase == ZS_PHASE_FORWARD)
        atomic_store(word, make_word(epoch, FORWARD)); /* nobody waits for this change */
    return status;
}

zs_status zs_shm_read_end(zs_comm *comm, zs_reader *reader, zs_phase phase)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    zs_shm_reader_record *record = zs_shm_reader_at(shm, comm->rank, reader->record);
    uint64_t word = atomic_load(&record->word), epoch = epoch_of(word);
    if (pass_of(word) != (phase == ZS_PHASE_FORWARD ? FORWARD : BACKWARD))
        return ZS_FAIL(ZS_ERR_STATE, "'%s': cannot end a %s that has not begun", record->name,
                       phase == ZS_PHASE_FORWARD ? "forward" : "backward");
    if (phase == ZS_PHASE_BACKWARD) epoch = (reductions_of(word) + 1) << FORWARD_BITS;
    return leave(shm, reader, epoch);
}
